"""`launch`: hands a recipe to an executor of `fp8cfg.run`, ranks of this machine or a Slurm job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8cfg.config.errors import ConfigError, printable, refuse_if

if TYPE_CHECKING:
    from fp8cfg.cli.argv import Arguments
    from fp8cfg.composition.giving_way import Settled
    from fp8cfg.execution.executor import TorchrunExecutor
    from fp8cfg.execution.slurm import SlurmExecutor

USAGE = """
fp8cfg launch --local N WORDS
fp8cfg launch --slurm KEY=VALUE,... [--wait] WORDS

Trains the recipe of WORDS through an executor, as fp8cfg.run does in Python.

  --local N            N processes on this machine, through torchrun
  --slurm KEY=VALUE,.. a Slurm job of trainer.num_nodes x trainer.devices ranks,
                       through submitit (pip install 'fp8cfg[slurm]'), with
                       sbatch's settings: partition=gpu,time=240,account=me.
                       Before its time is over it saves, goes back into the
                       queue (exit code 75, scontrol requeue) and goes on
  --wait               stay until the job has ended
  --config-dir FOLDER  recipes and presets of your own
"""


def run(argv: list[str]) -> int:
    """Train the recipe of `argv` through the executor that it names. Returns the exit code."""
    from fp8cfg.cli import WORDS
    from fp8cfg.cli.argv import recipe_file, split
    from fp8cfg.cli.composed import say, settled
    from fp8cfg.execution import runs
    from fp8cfg.execution.executor import TorchrunExecutor

    arguments = split(argv, ("--config-dir", "--local", "--slurm"), ("--wait",))
    file = recipe_file(arguments.plain, WORDS)
    executor = _executor(arguments)
    found = settled(arguments.words, arguments.one("--config-dir"), file)
    if found.problems and isinstance(executor, TorchrunExecutor):  # a layout of as many ranks as --local starts
        found = settled([*arguments.words, f"trainer.devices={executor.ranks}"], arguments.one("--config-dir"), file)
    t = found.recipe.trainer
    local = isinstance(executor, TorchrunExecutor) and (t.smoke or t.num_nodes == 1)
    refuse_if([] if local and found.layout_alone else found.problems)
    say(found.notes)
    if isinstance(executor, TorchrunExecutor) and local:
        _refuse(found, executor.ranks or 1, arguments)
    done = runs.run(found.recipe, executor)
    if done.exit_code is None:
        print(f"run folder: {printable(str(done.folder))}")
    return done.exit_code or 0


def _refuse(found: Settled, ranks: int, arguments: Arguments) -> None:
    """Raise ConfigError, before there is a run folder, where `ranks` of this machine do not have the layout or the memory, with the
    line that runs here. Each rank refuses what is not free on its own GPU."""
    from fp8cfg import smoke
    from fp8cfg.cli.argv import command_line
    from fp8cfg.report import before_run
    from fp8cfg.report.machine import find_hardware

    recipe = smoke.cut(found.recipe, ranks)
    before_run.refuse(recipe, find_hardware(recipe.trainer.accelerator),
                      lambda fit: command_line(arguments, fit.words, "launch", "--local", str(ranks)), found.problems, ranks)


def _executor(arguments: Arguments) -> TorchrunExecutor | SlurmExecutor:
    """The executor that --local or --slurm names. Raises ConfigError for both, neither, or a value that is none."""
    from fp8cfg.execution.executor import TorchrunExecutor
    from fp8cfg.execution.slurm import SlurmExecutor

    local, slurm = arguments.one("--local"), arguments.one("--slurm")
    if (local is None) == (slurm is None):
        raise ConfigError("launch: needs one of --local N and --slurm KEY=VALUE,...")
    if local is not None:
        if "--wait" in arguments.flags:
            raise ConfigError("--wait: is of --slurm; processes of this machine are waited for")
        if not local.isdecimal():
            raise ConfigError(f"--local {local}: expected a number of processes, as in --local 2")
        return TorchrunExecutor(int(local))
    parameters = {key: int(value) if value.isdecimal() else value for key, value in settings(slurm or "").items()}
    return SlurmExecutor(parameters, "--wait" in arguments.flags)


def settings(said: str) -> dict[str, str]:
    """The settings of `KEY=VALUE,...`. Raises ConfigError for what has another form."""
    pairs = [pair.partition("=") for pair in said.split(",")] if said else []
    if wrong := next(("".join(pair) for pair in pairs if not (pair[0] and pair[2])), ""):
        raise ConfigError(f"--slurm {wrong}: not of the form key=value, as in --slurm partition=gpu,time=240")
    return {key: value for key, _, value in pairs}
