"""Executor protocol, the command that each one runs, and executors on this machine.

A run is one command on every rank, `python -m fp8cfg FOLDER/request.yaml log.folder=FOLDER log.resume=auto`, so that whatever
starts processes can start it, and start it again, and what a run leaves is what the command line leaves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from fp8cfg.config.errors import ConfigError, Fp8cfgError

REQUEST = "request.yaml"
"""The recipe of a run that is to start, in its folder."""
STARTED = "recipe.yaml"
"""What a run folder has once the run has started (training/run_folder.py)."""
REQUEUE = 75
"""Exit code of a run that a signal stopped after a checkpoint."""


class RunFailed(Fp8cfgError):
    """A run ended with an exit code other than 0, which is this error's."""

    def __init__(self, folder: Path, code: int) -> None:
        super().__init__(f"{folder}: the run ended with exit code {code}; what it wrote says why")
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
            ["-m", "fp8cfg.execution.torchrun", str(self.ranks or command.ranks), *command.words()]
        )


def _process(argv: Sequence[str]) -> int:
    return subprocess.run([sys.executable, *argv], env=environment(), check=False).returncode


def environment() -> dict[str, str]:
    """This process's, in which fp8cfg is found where this one found it, and no launcher's ranks."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {**{k: v for k, v in os.environ.items() if k not in ranks}, "PYTHONPATH": path}
