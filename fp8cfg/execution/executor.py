"""Executor protocol, the command of a run, and executors for this machine.

Each rank runs the same command, `python -m fp8cfg FOLDER/request.yaml log.folder=FOLDER
log.resume=auto`. Any launcher can start it, and start it again after a stop. The run folder is the
same as on the command line.
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
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fp8cfg.composition import to_yaml
from fp8cfg.composition.overrides import quoted
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, NotWritable, folder_taken
from fp8cfg.schema.new_folder import make_new_folder
from fp8cfg.schema.recipe import Recipe

REQUEST = "request.yaml"
"""Recipe file that `run` writes into the run folder for the command."""
STARTED = "recipe.yaml"
"""File of a run folder after the run has started (run_folder/run_folder.py)."""
REQUEUE = 75
"""Exit code of a run that saved a checkpoint after a signal. Slurm jobs are requeued then."""


class RunFailed(Fp8cfgError):
    """A run ended with a nonzero exit code. The error has the same exit code."""

    def __init__(self, folder: Path, code: int) -> None:
        super().__init__(
            f"{folder}: the run ended with exit code {code}; its output has the reason"
        )
        self.exit_code = code


@dataclass(frozen=True)
class Command:
    """Command of a run: the arguments after `python -m fp8cfg` that start or resume it.

    Attributes:
        folder: Run folder.
        ranks: Processes per machine, from trainer.devices.
        nodes: Machines, from trainer.num_nodes.
        smoke: Whether trainer.smoke adapts the run to any number of ranks.
    """

    folder: Path
    ranks: int = 1
    nodes: int = 1
    smoke: bool = False

    def words(self) -> list[str]:
        """Returns the arguments as a list, for a process."""
        # Hydra's override grammar needs the quotes for paths with special characters.
        folder = quoted(str(self.folder))
        # log.resume=auto makes a restart continue the run.
        return [str(self.folder / REQUEST), f"log.folder={folder}", "log.resume=auto"]


@runtime_checkable
class Executor(Protocol):
    """Protocol: runs a command on all of its ranks.

    `execute` returns the exit code, or None if it does not wait for the run.
    """

    def execute(self, command: Command) -> int | None: ...


@dataclass(frozen=True)
class LocalExecutor:
    """Runs the command line on this machine. With GPUs the command starts its own ranks."""

    def execute(self, command: Command) -> int | None:
        """Runs the command and returns its exit code."""
        return _run_python(["-m", "fp8cfg", *command.words()])


@dataclass(frozen=True)
class TorchrunExecutor:
    """Runs ranks on this machine through the torchrun launcher.

    Attributes:
        ranks: Number of processes. Defaults to trainer.devices.
    """

    ranks: int | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise ConfigError(f"TorchrunExecutor: ranks={self.ranks}: must be at least 1")

    def execute(self, command: Command) -> int | None:
        """Runs the command on all ranks and returns the first exit code that is not 0.

        Raises:
            ConfigError: The recipe needs several machines.
        """
        if command.nodes > 1 and not command.smoke:
            raise ConfigError(
                f"trainer.num_nodes={command.nodes}: TorchrunExecutor has one machine; set it to"
                " 1, or use SlurmExecutor"
            )
        num_ranks = str(self.ranks or command.ranks)
        # This module's own main function, see the end of the file.
        return _run_python(["-m", "fp8cfg.execution.executor", num_ranks, *command.words()])


def _run_python(argv: Sequence[str]) -> int:
    """Runs Python with `argv` and returns the exit code."""
    process = subprocess.run([sys.executable, *argv], env=child_environment(), check=False)
    return process.returncode


SOURCE_ROOT = Path(__file__).parents[2]
"""Folder of the package fp8cfg: a checkout or site-packages."""
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables from which torch.distributed gets its process group."""


def child_environment() -> dict[str, str]:
    """Returns the environment variables for a child process of a run.

    The child finds the same fp8cfg as this process. Rank variables of a launcher are removed.
    """
    variables = dict(os.environ)
    # If this process is a rank itself, its child must not join the same process group.
    for name in RANK_VARIABLES:
        variables.pop(name, None)
    # The source folder comes first: fp8cfg may run from a checkout that is not installed.
    folders = [str(SOURCE_ROOT)]
    if variables.get("PYTHONPATH"):
        folders.append(variables["PYTHONPATH"])
    variables["PYTHONPATH"] = os.pathsep.join(folders)
    return variables


def launch_ranks(ranks: int, argv: Sequence[str]) -> int:
    """Runs `fp8cfg ARGV` on several ranks of this machine.

    Args:
        ranks: Number of processes.
        argv: Arguments of the command line.

    Returns:
        The exit code of the rank that failed first, 75 if a signal stopped them, otherwise 0.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The ranks print their errors themselves. The launcher would add a long report.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Torchrun uses the same default, but warns if the variable is not set.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = ["--standalone", "--nproc-per-node", str(ranks)]
    try:
        run.run(run.parse_args([*options, "-m", "fp8cfg", *argv]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            # The number of a signal. Shells report it as 128 + signal.
            return 128 - failure.exitcode
        return failure.exitcode
    except SignalException:
        return REQUEUE
    return 0


def is_nemo_executor(executor: object) -> bool:
    """Returns whether `executor` is a nemo_run executor, without importing nemo_run."""
    for base in type(executor).__mro__:
        package = base.__module__.partition(".")[0]
        if package == "nemo_run" and base.__name__ == "Executor":
            return True
    return False


class NemoExecutor:
    """Runs the command through an executor of nemo_run, with its nodes and ranks.

    If the executor packages files, its machines must see the run folder. The exit code is 0 or 1,
    because nemo_run only reports whether a job succeeded.

    Args:
        executor: For example nemo_run.LocalExecutor, SlurmExecutor or SkypilotExecutor.
    """

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def execute(self, command: Command) -> int | None:
        """Runs the command as a nemo_run experiment and waits for it. Returns 0 or 1."""
        import nemo_run

        python = "python"
        variables = {}
        if type(self.executor).__name__ == "LocalExecutor":
            # Only a local job uses this interpreter and this copy of fp8cfg.
            python = sys.executable
            variables["PYTHONPATH"] = child_environment()["PYTHONPATH"]
        script = nemo_run.Script(
            path="fp8cfg", args=command.words(), entrypoint=python, m=True, env=variables
        )
        with nemo_run.Experiment(command.folder.name, executor=self.executor) as experiment:
            experiment.add(script, name=command.folder.name, tail_logs=True)
            experiment.run(detach=False, tail_logs=True)
        # Leaving the experiment waits for the job, so its state is final here. Do not call
        # experiment.status(): in nemo_run 0.11.1 it does not know finished local tasks.
        states = [job.state.name for job in experiment.jobs]
        if states == ["SUCCEEDED"]:
            return 0
        return 1


@dataclass(frozen=True)
class Execution:
    """A run that an executor started.

    Attributes:
        folder: Run folder, for `fp8cfg.resume` and `fp8cfg.RunFolder`.
        exit_code: 0, or None if the executor did not wait for the run.
    """

    folder: Path
    exit_code: int | None


def run(recipe: Recipe, executor: Any = None, folder: str | Path | None = None) -> Execution:
    """Trains a recipe through an executor.

    Args:
        recipe: The recipe.
        executor: A LocalExecutor, TorchrunExecutor, SlurmExecutor, an executor of nemo_run, or an
            object with `execute(command)`. Defaults to a LocalExecutor.
        folder: Run folder. Defaults to log.folder, or a new folder under log.dir. An existing run
            there is an error, unless log.resume=auto continues it.

    Returns:
        The run folder and the exit code.

    Raises:
        ConfigError: The recipe breaks a rule, the executor is not one, or the folder has a run.
            Nothing was started.
        NotWritable: The folder cannot be written.
        RunFailed: The run ended with a nonzero exit code.
    """
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"run: expected a Recipe, got {type(recipe).__name__}; to train a job write"
            " fp8cfg.fit(job)"
        )
    chosen = executor
    if executor is None:
        chosen = LocalExecutor()
    elif is_nemo_executor(executor):
        chosen = NemoExecutor(executor)
    # A class has `execute` too, but it must be called on an instance.
    if not isinstance(chosen, Executor) or isinstance(chosen, type):
        raise ConfigError(
            "run: executor: expected one with execute(command), such as fp8cfg.LocalExecutor(),"
            f" got {executor!r}"
        )
    recipe.check()
    chosen_folder = folder or recipe.log.folder
    if chosen_folder:
        parent = Path(chosen_folder).parent.absolute()
    else:
        parent = Path(recipe.log.dir).absolute()
    # Parents that do not exist yet are removed again if the run does not start.
    new_parents = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        path, old_request = _write_request(recipe, chosen_folder)
    except OSError as error:
        raise NotWritable(
            f"{chosen_folder or recipe.log.dir}: cannot be written ({error.strerror or error})"
        ) from None
    trainer = recipe.trainer
    command = Command(path, ranks=trainer.devices, nodes=trainer.num_nodes, smoke=trainer.smoke)
    had_started = (path / STARTED).exists()
    try:
        code = chosen.execute(command)
    except ConfigError:
        _undo_request(path, old_request, new_parents)
        raise
    # The command itself rejected the recipe and neither started nor continued a run.
    if code == ConfigError.exit_code and (had_started or not (path / STARTED).exists()):
        _undo_request(path, old_request, new_parents)
    if code:
        raise RunFailed(path, code)
    return Execution(path, code)


def _write_request(recipe: Recipe, folder: str | Path | None) -> tuple[Path, bytes | None]:
    """Creates the run folder and writes the requested recipe into it.

    Args:
        recipe: The recipe.
        folder: The folder. Defaults to a new one under log.dir.

    Returns:
        The absolute path of the run folder, and its earlier request, None if it had none.

    Raises:
        ConfigError: The folder has a run, and log.resume=never.
        OSError: The folder cannot be written.
    """
    if folder:
        path = Path(folder).absolute()
    else:
        path = make_new_folder(Path(recipe.log.dir), recipe.name, datetime.now()).absolute()
    if (path / STARTED).exists() and recipe.log.resume == "never":
        raise ConfigError(folder_taken(str(path)))
    path.mkdir(parents=True, exist_ok=True)
    request = path / REQUEST
    old_request = None
    if request.exists():
        old_request = request.read_bytes()
    request.write_text(to_yaml(recipe), encoding="utf-8")
    return path, old_request


def _undo_request(path: Path, old_request: bytes | None, new_parents: Sequence[Path]) -> None:
    """Restores the earlier request of a folder, or removes what a new one has created.

    Args:
        path: The run folder.
        old_request: The earlier request. A job that waits for a restart reads it. None if there
            was none.
        new_parents: Parents that did not exist before. They are deleted if they are empty.
    """
    request = path / REQUEST
    if old_request is not None:
        request.write_bytes(old_request)
        return
    request.unlink()
    # rmdir raises for a folder that is not empty, which ends the loop.
    with contextlib.suppress(OSError):
        for folder in (path, *new_parents):
            folder.rmdir()


if __name__ == "__main__":
    # TorchrunExecutor starts this file: number of ranks, then arguments of the command line.
    sys.exit(launch_ranks(int(sys.argv[1]), sys.argv[2:]))
