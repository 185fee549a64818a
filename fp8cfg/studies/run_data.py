"""Data of a run, read from its folder. Works during training and does not import torch."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.checkpoint.manifest import list_steps
from fp8cfg.run_folder import metrics_file
from fp8cfg.run_folder.file_names import CHECKPOINTS, ENVIRONMENT, LOCK, METRICS, RECIPE, STATUS
from fp8cfg.run_folder.files import RunFiles, RunFolderError, StrangeFile
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.run_folder.status import State, Status, is_locked, read_status
from fp8cfg.schema.errors import printable
from fp8cfg.schema.recipe import Recipe


@dataclass(frozen=True)
class RunData:
    """A finished, stopped or running run.

    Attributes:
        folder: The run folder.
        name: Name of the folder.
        recipe: The recipe, after the last resume.
        state: "running", "done", "stopped", "diverged" or "crashed".
        rows: Rows of metrics.jsonl, sorted by step.
        message: A line on the end of the run, or "".
    """

    folder: Path
    name: str
    recipe: Recipe
    state: State
    rows: list[dict[str, Any]]
    message: str = ""

    @property
    def steps(self) -> int:
        """Number of optimizer steps in metrics.jsonl."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def skipped_steps(self) -> list[int]:
        """Steps without an update: bad steps, and overflows of the loss scale."""
        steps, stepped = self.series("stepped")
        return [step for step, value in zip(steps, stepped, strict=True) if not value]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns one metric over time.

        Args:
            name: Field of metrics.jsonl, such as "loss".

        Returns:
            Steps and values. Rows without the metric are left out.
        """
        # Rows of evaluations and saves have other fields than rows of steps.
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
        folder: The run folder. Files other than recipe.yaml may be missing.

    Returns:
        The run until its last complete row.

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
    """Finds run folders, also in the folders of sweeps. Does not follow links.

    Args:
        folder: Folder to search, with all folders in it. May be a run folder itself.

    Returns:
        Sorted paths of the run folders.

    Raises:
        RunFolderError: The folder does not exist.
    """
    files = RunFolder.reading(folder).files
    return sorted(_runs_below(files.path))


def open_run(folder: str | Path) -> RunFolder:
    """Opens a run folder to read. Raises RunFolderError for any other folder."""
    run = RunFolder.reading(folder)
    if _has_run(os.listdir(run.path)):
        return run
    # The usual mistake is the folder above: name a run in it.
    inner_runs = sorted(_runs_below(run.path))
    advice = "check the path, or list your runs with fp8cfg runs"
    if inner_runs:
        count = "1 run" if len(inner_runs) == 1 else f"{len(inner_runs)} runs"
        advice = f"it has {count} in it, such as {inner_runs[0]}"
    raise RunFolderError(f"{folder}: not a run folder, {run.recipe} is missing; {advice}")


def run_name(folder: Path) -> str:
    """Returns the name of a run folder."""
    # The path "." has no name of its own before it is resolved.
    return folder.name or folder.resolve().name


def read_rows(files: RunFiles) -> list[dict[str, Any]]:
    """Reads metrics.jsonl, sorted by step. Raises RunFolderError if it is damaged."""
    try:
        rows: list[dict[str, Any]] = list(metrics_file.read_metrics(files, METRICS))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, StrangeFile) as error:
        raise RunFolderError(printable(str(error))) from None
    # A stable sort: a row of an evaluation or a save stays after the row of its step.
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
        The state, and the contents of status.json. Folders of older versions have none.
    """
    status = read_status(files)
    is_used = is_locked(files)
    # A lock means a running process. But after `fit`, this process may keep the lock of a finished
    # run: the status is right then.
    if is_used and not (status and _is_own_lock(files)):
        return "running", status
    if status is None:
        return _guess_state(files, last, max_steps), None
    # A killed process can't write its end. is_used is None if the file system has no locks: then
    # the status has to be believed.
    if status.state == "running" and is_used is False:
        killed = "the process was killed, or its machine stopped"
        return "crashed", Status("crashed", status.step, killed, status.time)
    return status.state, status


def _guess_state(files: RunFiles, last: dict[str, Any], max_steps: int) -> State:
    """Guesses the state of a run without status.json from its last row and its checkpoints."""
    step = last.get("step", 0)
    if not math.isfinite(last.get("loss", 0.0)):
        return "diverged"
    if step >= max_steps:
        return "done"
    # A stopped run saves its last step, a crashed one doesn't.
    return "stopped" if step == newest_checkpoint(files)[0] else "crashed"


def newest_checkpoint(files: RunFiles) -> tuple[int, Path | None]:
    """Returns step and folder of the newest checkpoint. Step 0 and None without one."""
    # Not verified: reading all tensors would take minutes.
    try:
        root = files.folder(CHECKPOINTS)
        steps = list_steps(root)
    except (OSError, StrangeFile):
        return 0, None
    if not steps:
        return 0, None
    step, name = steps[0]
    return step, root.path / name


def read_json(files: RunFiles, name: str) -> dict[str, Any]:
    """Reads the JSON object in a file. Returns {} if it is missing or damaged."""
    try:
        data = json.loads(files.read(name))
    except (OSError, ValueError, RecursionError, StrangeFile):
        return {}
    return data if isinstance(data, dict) else {}


def data_digest(run: RunData) -> str | None:
    """Returns the sha256 of the training data. None without a checkpoint."""
    checkpoint = newest_checkpoint(RunFiles.at(run.folder))[1]
    if checkpoint is None:
        return None
    try:
        data = read_json(RunFiles.at(checkpoint), "state.json").get("data")
    except OSError:  # a checkpoint that is deleted at the moment
        return None
    digest = data.get("corpus_sha256") if isinstance(data, dict) else None
    return digest if isinstance(digest, str) else None


def _is_own_lock(files: RunFiles) -> bool:
    """Whether this process has the lock, by the text in run.lock."""
    # A process can't ask the kernel: flock tells only whether anybody has the lock.
    try:
        return files.read(LOCK).decode() == f"pid {os.getpid()} on {socket.gethostname()}\n"
    except (OSError, ValueError, StrangeFile):
        return False


def _has_run(names: list[str]) -> bool:
    """Whether a folder with these files is a run folder."""
    # With just a recipe.yaml, the folder may be the user's own folder of recipes.
    return RECIPE in names and not {ENVIRONMENT, METRICS, STATUS}.isdisjoint(names)


def _runs_below(folder: Path) -> Iterator[Path]:
    """Yields all run folders in a folder, or the folder itself."""
    for path, folders, names in os.walk(folder):
        if _has_run(names):
            folders.clear()  # a run folder has no runs in it
            yield Path(path)
