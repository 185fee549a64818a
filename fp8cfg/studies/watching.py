"""Follows a run from its folder: the display of training in another process. Writes nothing."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8cfg.run_folder import metrics_file
from fp8cfg.run_folder.file_names import ENVIRONMENT, METRICS, RECIPE
from fp8cfg.run_folder.files import RunFiles, RunFolderError, StrangeFile
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.schema import messages
from fp8cfg.schema.errors import ConfigError, printable
from fp8cfg.schema.messages import Say
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import title
from fp8cfg.schema.tables import labeled
from fp8cfg.studies.run_data import RunData, find_runs, open_run, read_run, read_state
from fp8cfg.training.progress import Peak, Progress, Row, peak_speed

INTERVAL = 1.0
"""Seconds between two reads of the folder."""
QUIET_SECONDS = 60.0
"""Least seconds without a step before a warning."""


def watch(
    folder: str | Path,
    wait: bool = False,
    as_json: bool = False,
    say: Say = messages.say,
    sleep: Callable[[float], None] = time.sleep,
) -> RunData:
    """Shows a run until it ends. Returns at once for a finished run.

    Args:
        folder: Run folder, or a folder of runs. The newest run is shown.
        wait: Whether to wait for a later start of the run.
        as_json: Whether to print steps as JSON.
        say: Prints a message.
        sleep: Waits between two reads of the folder. For tests.

    Returns:
        The run at its end.

    Raises:
        RunFolderError: The folder has no run, or its metrics are damaged.
    """
    run = _find(Path(folder), wait, say, sleep)
    recipe = run.read_recipe()
    say(_head(run, recipe))
    # The display of the run itself may be off, for example in a batch job.
    recipe.log.progress = "json" if as_json else "auto"
    recipe.log.level = "info"
    tail = MetricsTail(run.files)
    quiet = _QuietWarning(say)
    with Progress(recipe, say, peak=_peak(run.files, recipe)) as progress:
        progress.replay(tail.new_rows())
        while True:
            # The state first, then the rows. In the other order the last rows could be missed.
            is_running = read_state(run.files, {}, 0)[0] == "running"
            for row in tail.new_rows():
                _show(progress, row, say)
            if not is_running:
                break
            quiet.check(tail.last_row)
            sleep(INTERVAL)
    data = read_run(run.path)
    say(summary(data))
    return data


class MetricsTail:
    """Reads new rows of a growing metrics.jsonl.

    Attributes:
        last_row: The newest row, {} before the first one.
    """

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._position = 0
        self._inode = 0
        self.last_row: Row = {}

    def new_rows(self) -> list[dict[str, Any]]:
        """Returns the complete rows since the last call, empty without a file.

        Raises:
            RunFolderError: A row is damaged, or the file cannot be read.
        """
        # Opened in each call, because a resume replaces the file. Another inode shows it.
        try:
            file = self._files.open(METRICS)
        except FileNotFoundError:
            return []
        except (OSError, StrangeFile) as error:
            raise RunFolderError(printable(str(error))) from None
        with file:
            inode = os.fstat(file.fileno()).st_ino
            is_replaced = inode != self._inode
            if is_replaced:
                self._inode, self._position = inode, 0
            file.seek(self._position)
            text = file.read()
        # The run may be in the middle of a row. The next call reads it again.
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        place = str(self._files.path / METRICS)
        try:
            rows = [metrics_file.parse_line(place, line) for line in complete.splitlines()]
        except ValueError as error:
            raise RunFolderError(printable(str(error))) from None
        if not rows:
            return []
        last_step = self.last_row["step"] if self.last_row else 0
        self.last_row = rows[-1]
        if is_replaced:
            # A resume copies the file without the steps to repeat. Rows up to `last_step` are
            # known already.
            return [row for row in rows if row["step"] > last_step]
        return rows


def summary(data: RunData) -> str:
    """Returns the lines at the end of a run: state, steps, losses and speed."""
    losses = data.series("loss")[1]
    val_losses = data.series("val_loss")[1]
    speeds = data.series("tokens_per_second")[1]
    parts = [f"{data.state}: {data.steps} of {data.recipe.trainer.max_steps} steps"]
    if losses:
        parts.append(f"training loss {losses[-1]:.4f}")
    if val_losses:
        parts.append(f"validation loss {val_losses[-1]:.4f}")
    if speeds:
        # The first step compiles and warms up.
        parts.append(f"{statistics.median(speeds[1:] or speeds):,.0f} tokens/s")
    text = ", ".join(parts)
    if data.message and data.state != "done":
        text += f"\n{data.message}"
    if data.state in ("stopped", "crashed"):
        text += f"\ncontinue with fp8cfg resume {printable(shlex.quote(str(data.folder)))}"
    return text


def _find(path: Path, wait: bool, say: Say, sleep: Callable[[float], None]) -> RunFolder:
    """Opens the run in a folder, or its newest run. Waits for one with `wait`.

    Raises:
        RunFolderError: The folder has no run.
    """
    has_said = False
    while True:
        try:
            return open_run(path)
        except RunFolderError as error:
            runs = find_runs(path) if path.is_dir() else []
            if runs:
                return open_run(max(runs, key=_last_change))
            # A file never becomes a run folder, so waiting is useless.
            if path.is_file():
                raise
            if not wait:
                raise RunFolderError(f"{error}; add --wait if it starts later") from None
        if not has_said:
            has_said = True
            say(f"waiting for a run in {printable(str(path))}")
        sleep(INTERVAL)


def _last_change(run: Path) -> float:
    """Returns the time of the newest row, or of the recipe before the first row."""
    path = run / METRICS
    return (path if path.exists() else run / RECIPE).stat().st_mtime


def _show(progress: Progress, row: Row, say: Say) -> None:
    """Shows a row of a step, or of an evaluation."""
    if "loss" in row:
        progress.update(row)
    elif "val_loss" in row:
        progress.evaluation(row["step"], row["val_loss"])
        say(f"step {row['step']}: validation loss {row['val_loss']:.4f}")


def _head(run: RunFolder, recipe: Recipe) -> str:
    """Returns the header: run folder, recipe and precision."""
    fp8 = f" with {title(recipe.fp8.scaling)}" if recipe.fp8.enabled else ""
    text = f"{recipe.name}, {recipe.precision.compute}{fp8}, {recipe.trainer.max_steps} steps"
    lines = [labeled("run folder", printable(str(run.path))), labeled("recipe", text)]
    return "\n".join(lines)


def _peak(files: RunFiles, recipe: Recipe) -> Peak | None:
    """Returns the peak speed of the ranks recorded in environment.json. None if unknown."""
    try:
        environment = json.loads(files.read(ENVIRONMENT))
        gpus, ranks = environment["gpus"], environment["ranks"]
        return peak_speed(recipe, [str(name) for name in gpus], int(ranks))
    except (OSError, StrangeFile, ValueError, TypeError, KeyError, ConfigError):
        # Older folders have no number of ranks. The display works without a peak.
        return None


class _QuietWarning:
    """Warns about a long time without a step, once for each pause."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._warned_step = -1

    def check(self, row: Row) -> None:
        """Checks the age of the last row."""
        # The step number is the mark of a pause: after the next step, a warning is possible again.
        if "time" not in row or row["step"] == self._warned_step:
            return
        age = time.time() - row["time"]
        # Ten steps long, so that slow models don't trigger it.
        if age > max(QUIET_SECONDS, 10 * row.get("seconds", 0.0)):
            self._warned_step = row["step"]
            self._say(f"warning: no step for {age:.0f} s since step {row['step']}")
