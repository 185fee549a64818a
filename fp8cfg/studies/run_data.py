"""Data of a run, read from its folder. Works while the run trains, and loads no torch."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.checkpoint.manifest import list_steps
from fp8cfg.run_folder import metrics_file
from fp8cfg.run_folder.files import RunFiles, StrangeFile
from fp8cfg.run_folder.run_folder import (
    CHECKPOINTS,
    ENVIRONMENT,
    LOCK,
    METRICS,
    RECIPE,
    STATUS,
    RunFolder,
    RunFolderError,
)
from fp8cfg.run_folder.status import State, Status, is_locked, read_status
from fp8cfg.schema.errors import printable
from fp8cfg.schema.recipe import Recipe


@dataclass(frozen=True)
class RunData:
    """A finished, stopped or running run.

    Attributes:
        folder: The run folder.
        name: Name of the folder.
        recipe: The recipe. If a resume changed it, the last one.
        state: "running", "done", "stopped", "diverged" or "crashed".
        rows: Rows of metrics.jsonl, in order of steps.
        message: One line on how the run ended, or "".
    """

    folder: Path
    name: str
    recipe: Recipe
    state: State
    rows: list[dict[str, Any]]
    message: str = ""

    @property
    def steps(self) -> int:
        """Optimizer steps done, as far as metrics.jsonl has them."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns one metric over time.

        Args:
            name: Field of metrics.jsonl, such as "loss".

        Returns:
            Steps and values. Rows without the metric are left out.
        """
        steps = []
        values = []
        for row in self.rows:
            value = row.get(name)
            if isinstance(value, (int, float)):
                steps.append(row["step"])
                values.append(float(value))
        return steps, values


def read_run(folder: str | Path) -> RunData:
    """Reads a run folder. Does not lock it and writes nothing.

    Args:
        folder: The run folder. Only its recipe.yaml is needed.

    Returns:
        The run, as far as it is written.

    Raises:
        RunFolderError: It is not a run folder, or its metrics are damaged.
        ConfigError: Its recipe is not valid in this version of fp8cfg.
    """
    run = open_run(folder)
    rows = read_rows(run.files)
    recipe = run.read_recipe()
    last: dict[str, Any] = next((row for row in reversed(rows) if "loss" in row), {})
    state, status = read_state(run.files, last, recipe.trainer.max_steps)
    message = status.message if status else ""
    return RunData(run.path, run_name(run.path), recipe, state, rows, message)


def find_runs(folder: str | Path) -> list[Path]:
    """Finds run folders, also in the folders of sweeps.

    Links are not followed.

    Args:
        folder: Where to search, with all folders in it. May be a run folder itself.

    Returns:
        Paths of the run folders, sorted.

    Raises:
        RunFolderError: There is no such folder.
    """
    files = RunFolder.reading(folder).files
    return sorted(_runs_below(files.path))


def open_run(folder: str | Path) -> RunFolder:
    """Opens a run folder to read. Raises RunFolderError if it is none."""
    run = RunFolder.reading(folder)
    if _has_run(os.listdir(run.path)):
        return run
    below = sorted(_runs_below(run.path))
    advice = "check the path, or list your runs with fp8cfg runs"
    if below:
        count = "1 run" if len(below) == 1 else f"{len(below)} runs"
        advice = f"it has {count} in it, such as {below[0]}"
    raise RunFolderError(f"{folder}: not a run folder, {run.recipe} is missing; {advice}")


def run_name(folder: Path) -> str:
    """Returns the name of a run folder, also for a path such as "."."""
    return folder.name or folder.resolve().name


def read_rows(files: RunFiles) -> list[dict[str, Any]]:
    """Reads metrics.jsonl, in order of steps. Raises RunFolderError if it is damaged."""
    try:
        rows: list[dict[str, Any]] = list(metrics_file.read(files, METRICS))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, StrangeFile) as error:
        raise RunFolderError(printable(str(error))) from None
    # A row of an evaluation or a save comes after the row of its step.
    return sorted(rows, key=lambda row: row["step"])


def read_state(
    files: RunFiles, last: dict[str, Any], max_steps: int
) -> tuple[State, Status | None]:
    """Determines the state of a run.

    Args:
        files: The run folder.
        last: Last row of metrics.jsonl with a training loss, or empty.
        max_steps: Planned optimizer steps.

    Returns:
        The state, and the status that the run has written. None in folders of older versions.
    """
    status = read_status(files)
    is_used = is_locked(files)
    # In this process, the status is up to date even while it keeps the lock.
    if is_used and not (status and _is_own_lock(files)):
        return "running", status
    if status is None:
        return _guess_state(files, last, max_steps), None
    if status.state == "running" and is_used is False:
        killed = "the process was killed, or its machine stopped"
        return "crashed", Status("crashed", status.step, killed, status.time)
    return status.state, status


def _guess_state(files: RunFiles, last: dict[str, Any], max_steps: int) -> State:
    """Returns the state of a run without status.json, by its last row and its checkpoints."""
    step = last.get("step", 0)
    if not math.isfinite(last.get("loss", 0.0)):
        return "diverged"
    if step >= max_steps:
        return "done"
    # A run that is stopped saves its last step. A run that crashes doesn't.
    return "stopped" if step == newest_checkpoint(files)[0] else "crashed"


def newest_checkpoint(files: RunFiles) -> tuple[int, Path | None]:
    """Returns step and folder of the newest checkpoint, unverified. Step 0 without one."""
    try:
        root = files.folder(CHECKPOINTS)
        steps = list_steps(root)
    except (OSError, StrangeFile):
        return 0, None
    if not steps:
        return 0, None
    step, name = steps[0]
    return step, root.path / name


def _is_own_lock(files: RunFiles) -> bool:
    """Whether this process has the lock, by the text of run.lock."""
    try:
        return files.read(LOCK).decode() == f"pid {os.getpid()} on {socket.gethostname()}\n"
    except (OSError, ValueError, StrangeFile):
        return False


def _has_run(names: list[str]) -> bool:
    """Whether a folder with these files is a run folder.

    A recipe.yaml alone may be a recipe file of the user.
    """
    return RECIPE in names and not {ENVIRONMENT, METRICS, STATUS}.isdisjoint(names)


def _runs_below(folder: Path) -> Iterator[Path]:
    """Yields the run folders in a folder, which may be one itself."""
    for path, folders, names in os.walk(folder):
        if _has_run(names):
            folders.clear()  # a run folder has no runs in it
            yield Path(path)
