"""Executor protocol, the command that each one runs, and executors on this machine.

A run is one command on every rank, `python -m fp8cfg FOLDER/request.yaml log.folder=FOLDER log.resume=auto`, so that whatever
starts processes can start it, and start it again, and what a run leaves is what the command line leaves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fp8cfg.composition import to_yaml
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, NotWritable, folder_taken
from fp8cfg.schema.recipe import Recipe

REQUEST = "request.yaml"
"""The recipe of a run that is to start, in its folder."""
STARTED = "recipe.yaml"
"""What a run folder has once the run has started (training/run_folder.py)."""
REQUEUE = 75
"""Exit code of a run that a signal stopped after a checkpoint."""


class RunFailed(Fp8cfgError):
    """A run ended with an exit code other than 0, which is this error's."""

    def __init__(self, folder: Path, code: int) -> None:
        super().__init__(
            f"{folder}: the run ended with exit code {code}; its output has the reason"
        )
        self.exit_code = code


@dataclass(frozen=True)
class Command:
    """The words after `python -m fp8cfg` that run a recipe in `folder`, or go on with it there, on `nodes` machines with `ranks`
    processes each; a `smoke` run (trainer.smoke) is cut to any others."""

    folder: Path
    ranks: int = 1
    nodes: int = 1
    smoke: bool = False

    def words(self) -> list[str]:
        """As a list, for a process."""
        return [str(self.folder / REQUEST), f"log.folder='{self.folder}'", "log.resume=auto"]


@runtime_checkable
class Executor(Protocol):
    """Runs a command on all of its ranks. `execute` returns its exit code, or None where it is under way and not waited for."""

    def execute(self, command: Command) -> int | None: ...


@dataclass(frozen=True)
class LocalExecutor:
    """One process on this machine; on GPUs as many as the command line starts."""

    def execute(self, command: Command) -> int | None:
        return _process(["-m", "fp8cfg", *command.words()])


@dataclass(frozen=True)
class TorchrunExecutor:
    """`ranks` processes on this machine, through torch.distributed's launcher; by default trainer.devices."""

    ranks: int | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise ConfigError(f"TorchrunExecutor: ranks={self.ranks}: must be at least 1")

    def execute(self, command: Command) -> int | None:
        if command.nodes > 1 and not command.smoke:
            raise ConfigError(
                f"trainer.num_nodes={command.nodes}: TorchrunExecutor has one machine; write 1, or"
                " use SlurmExecutor"
            )
        return _process(
            ["-m", "fp8cfg.execution.executor", str(self.ranks or command.ranks), *command.words()]
        )


def _process(argv: Sequence[str]) -> int:
    return subprocess.run([sys.executable, *argv], env=environment(), check=False).returncode


def environment() -> dict[str, str]:
    """This process's, in which fp8cfg is found where this one found it, and no launcher's ranks."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {**{k: v for k, v in os.environ.items() if k not in ranks}, "PYTHONPATH": path}


def start(ranks: int, argv: Sequence[str]) -> int:
    """Run `fp8cfg ARGV` on that many ranks of this machine. Returns the exit code of the rank that failed first; 75 where a signal
    stopped them, 0 where none failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(
        logging.CRITICAL
    )  # the ranks say in a line what was wrong
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, of which it would warn
    try:
        run.run(
            run.parse_args(["--standalone", "--nproc-per-node", str(ranks), "-m", "fp8cfg", *argv])
        )
    except ChildFailedError as e:
        _, first = e.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException:
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(start(int(sys.argv[1]), sys.argv[2:]))


def is_one(executor: object) -> bool:
    """Whether `executor` is of nemo_run, which is not imported for that."""
    return any(
        cls.__module__.partition(".")[0] == "nemo_run" and cls.__name__ == "Executor"
        for cls in type(executor).__mro__
    )


class NemoExecutor:
    """Runs through an executor of nemo_run: LocalExecutor, SlurmExecutor, SkypilotExecutor, ... with its own nodes and ranks. Where
    it packages files, the run folder must be one that its machines see. Of an exit code nemo_run tells that it was not 0.
    """

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def execute(self, command: Command) -> int | None:
        import nemo_run

        local = type(self.executor).__name__ == "LocalExecutor"
        python, root = (
            (sys.executable, str(Path(__file__).parents[2])) if local else ("python", None)
        )
        env = {"PYTHONPATH": environment()["PYTHONPATH"]} if root else {}
        script = nemo_run.Script(
            path="fp8cfg", args=command.words(), entrypoint=python, m=True, env=env
        )
        with nemo_run.Experiment(command.folder.name, executor=self.executor) as experiment:
            experiment.add(script, name=command.folder.name, tail_logs=True)
            experiment.run(detach=False, tail_logs=True)
        states = [
            job.state.name for job in experiment.jobs
        ]  # status() knows no local task that has ended (0.11.1)
        return 0 if states == ["SUCCEEDED"] else 1  # once the experiment is left, which waits


@dataclass(frozen=True)
class Execution:
    """A run that an executor has taken: its folder, for `fp8cfg.resume` and `fp8cfg.RunFolder`, and its exit code, which is None
    while it is not waited for."""

    folder: Path
    exit_code: int | None


def run(recipe: Recipe, executor: Any = None, folder: str | Path | None = None) -> Execution:
    """Train `recipe` through `executor` into `folder`, by default log.folder, or a new one under log.dir: LocalExecutor (the
    default), TorchrunExecutor, SlurmExecutor, one of nemo_run's, or whatever has `execute(command)`. A folder with a run in it is
    refused, or gone on with under log.resume=auto. Raises ConfigError for a recipe that breaks a rule, before anything starts,
    NotWritable, and RunFailed with the exit code of a run that failed."""
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"run: expected a Recipe, got {type(recipe).__name__}; to train a job write"
            " fp8cfg.fit(job)"
        )
    chosen = (
        NemoExecutor(executor)
        if is_one(executor)
        else LocalExecutor()
        if executor is None
        else executor
    )
    if not isinstance(chosen, Executor) or isinstance(chosen, type):
        raise ConfigError(
            "run: executor: expected one with execute(command), such as fp8cfg.LocalExecutor(),"
            f" got {executor!r}"
        )
    recipe.check()
    t, given = recipe.trainer, folder or recipe.log.folder
    home = (Path(given).parent if given else Path(recipe.log.dir)).absolute()
    absent = [each for each in (home, *home.parents) if not each.exists()]
    try:
        path = _requested(recipe, Path(given).absolute() if given else None)
    except OSError as e:
        raise NotWritable(
            f"{given or recipe.log.dir}: cannot be written ({e.strerror or e})"
        ) from None
    try:
        code = chosen.execute(Command(path, ranks=t.devices, nodes=t.num_nodes, smoke=t.smoke))
    except ConfigError:
        _remove(path, absent)
        raise
    if code == ConfigError.exit_code and not (path / STARTED).exists():
        _remove(path, absent)
    if code:
        raise RunFailed(path, code)
    return Execution(path, code)


def _requested(recipe: Recipe, given: Path | None) -> Path:
    """The folder `given`, or a new one, with the request of a run of `recipe`. Raises ConfigError where a run is there already that
    is not to go on, and OSError."""
    path = given or _new(recipe).absolute()
    if (path / STARTED).exists() and recipe.log.resume == "never":
        raise ConfigError(folder_taken(str(path)))
    path.mkdir(parents=True, exist_ok=True)
    (path / REQUEST).write_text(to_yaml(recipe), encoding="utf-8")
    return path


def _remove(path: Path, above: Sequence[Path]) -> None:
    """Take the request of a run that has not started away, and, once they are empty, its folder and those `above`."""
    (path / REQUEST).unlink()
    with contextlib.suppress(OSError):
        for each in (path, *above):
            each.rmdir()


def _new(recipe: Recipe) -> Path:
    """A folder under log.dir that nobody has, made here."""
    root = Path(recipe.log.dir)
    name = f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise AssertionError("unreachable")
