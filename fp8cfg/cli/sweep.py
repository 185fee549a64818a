"""`sweep`: another name for `train -m`, which trains each combination of values."""

from __future__ import annotations

from fp8cfg.cli import train

USAGE = """
fp8cfg sweep [recipe=NAME | FILE.yaml] [key=a,b ...] [hydra.KEY=VALUE ...]
fp8cfg -m [recipe=NAME | FILE.yaml] [key=a,b ...] [hydra.KEY=VALUE ...]

Train every combination of values, and print a table of results.

Examples:
  fp8cfg sweep precision=bf16_fp8,bf16_fp8_current
  fp8cfg -m fp8.margin=0,1,2 precision=bf16_fp8
  fp8cfg -m 'optim.lr=interval(1e-4,1e-2)' hydra/sweeper=optuna

Values: key=a,b, key=choice(a,b), key=range(0,3), and for presets
recipe=glob(llama_1*). All values are checked before the first run. If keys of a
combination conflict, only that combination is skipped. If a run fails, the
others continue.

Options:
  hydra/launcher=NAME  such as submitit_slurm (pip install 'fp8cfg[slurm]')
  hydra/sweeper=NAME   such as optuna
  hydra.sweep.dir=FOLDER
                       the sweep folder; default log.dir/sweep-DATE-TIME. Runs
                       are in 0, 1, ... (or hydra.sweep.subdir), and the table
                       is in results.json

Exit code: 0 if every run ended with 0; 1 if one ended with 1; otherwise the
largest code. 2 if an argument is wrong, if no combination can run, or if one
was skipped.
"""


def run(argv: list[str]) -> int:
    """Runs a sweep and returns the exit code."""
    return train.run(["--multirun", *argv])
