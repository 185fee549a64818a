"""`sweep`: `train -m` by a name of its own, a run for each combination of values."""

from __future__ import annotations

from fp8cfg.cli import train

USAGE = """
fp8cfg sweep [recipe=NAME | FILE.yaml] [key=a,b ...] [hydra.KEY=VALUE ...]
fp8cfg -m fp8.margin=0,1,2 precision=bf16_fp8,bf16_fp8_current

Trains every combination of key=a,b, key=choice(a,b), key=range(0,3), and for
presets recipe=glob(llama_1*). Each value and each combination is checked before
the first run. A combination that a rule between keys refuses is named then; it
ends with exit code 2 and its line under the table, and costs nothing. A run
that fails does not stop the others.

Hydra's launchers and sweepers do the work, with their settings as words:
hydra/launcher=submitit_slurm (pip install 'fp8cfg[slurm]'), hydra.launcher.*,
hydra/sweeper=NAME, hydra.sweep.dir=FOLDER (default log.dir/sweep-DATE-TIME).

Ends with a table of results, in results.json of the sweep's folder too; the
runs are the folders 0, 1, ... in it, or hydra.sweep.subdir.
Exit code: 0 where every run ended with 0; else the largest of the runs' codes,
the 2 of a refused combination among them. 2, and nothing has run, where a word
is wrong or no combination can run.
"""


def run(argv: list[str]) -> int:
    """Sweep over the words of `argv`. Returns the exit code."""
    return train.run(["--multirun", *argv])
