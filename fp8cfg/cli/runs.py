"""`runs`: lists the runs in a folder, newest first."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fp8cfg.cli.argv import split
from fp8cfg.schema.errors import ConfigError, printable, suggest
from fp8cfg.schema.tables import size

if TYPE_CHECKING:
    from fp8cfg.studies.runs import RunSummary

USAGE = """
fp8cfg runs [FOLDER] [--where KEY=VALUE ...] [--sort COLUMN] [--json]

List the runs in a folder and all folders in it, newest first.

Examples:
  fp8cfg runs
  fp8cfg runs --where precision=bf16_fp8 state=done
  fp8cfg runs runs/sweep --sort val_loss

FOLDER is runs by default. The state is running, done, stopped, diverged,
crashed or damaged. A precision with a + has keys that differ from the preset.
The age is the time since the last step.

On a narrow terminal some columns are left out. Piped output has all of them.

Options:
  --where KEY=VALUE ...  only runs with this value; KEY is state or any key of a
                         recipe. Two values of one key are alternatives
  --sort COLUMN          age, loss, best, val_loss, tokens/s or size; the lowest
                         loss, but the highest speed and size come first
  --json                 print JSON, with the message of each run
"""
SORT_KEYS: dict[str, Callable[[RunSummary], float | None]] = {
    "age": lambda run: -run.updated,
    "loss": lambda run: run.loss,
    "best": lambda run: run.best_loss,
    "val_loss": lambda run: run.val_loss,
    "tokens/s": lambda run: None if run.tokens_per_second is None else -run.tokens_per_second,
    "size": lambda run: -run.size,
}
"""Sort keys of `--sort`, lowest first. A run without a value comes last."""
DEFAULT_FOLDER = "runs"
"""Default of log.dir, relative to the working directory."""


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        title: Header of the column.
        cell: Returns the text for a run.
        rank: Priority on a narrow terminal, 0 first.
        is_number: Whether to align the column to the right.
    """

    title: str
    cell: Callable[[RunSummary], str]
    rank: int
    is_number: bool = False


COLUMNS = [
    Column("run", lambda run: printable(str(run.folder)), 0),
    Column("recipe", lambda run: run.recipe, 8),
    Column("precision", lambda run: run.precision, 4),
    Column("backend", lambda run: run.backend, 9),
    Column("ranks", lambda run: _text(run.ranks, "d"), 11, True),
    Column("data", lambda run: printable(run.data), 10),
    Column("step", lambda run: _steps(run), 2, True),
    Column("loss", lambda run: _text(run.loss, ".4f"), 3, True),
    Column("best", lambda run: _text(run.best_loss, ".4f"), 12, True),
    Column("val loss", lambda run: _text(run.val_loss, ".4f"), 5, True),
    Column("tokens/s", lambda run: _text(run.tokens_per_second, ",.0f"), 7, True),
    Column("state", lambda run: run.state, 1),
    Column("age", lambda run: _age(time.time() - run.updated), 6, True),
    Column("size", lambda run: size(run.size), 13, True),
]
STYLES = {
    "running": "cyan",
    "done": "green",
    "stopped": "yellow",
    "diverged": "red",
    "crashed": "red",
    "damaged": "red",
}


def run(argv: list[str]) -> int:
    """Lists the runs in the folder of `argv`. Returns the exit code."""
    # Further words after --where KEY=VALUE are conditions too: --where a=1 b=2.
    arguments = split(argv, ("--where", "--sort"), ("--json",))
    if len(arguments.plain) > 1:
        raise ConfigError(f"runs: takes one folder, got {', '.join(arguments.plain)}")
    conditions = [*arguments.options.get("--where", []), *arguments.words]
    folder, hint = Path(DEFAULT_FOLDER), "; name the folder of your runs: fp8cfg runs FOLDER"
    if arguments.plain:
        folder, hint = Path(arguments.plain[0]), ""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder{hint}")

    column = arguments.one("--sort") or "age"
    if column not in SORT_KEYS:
        raise ConfigError(f"--sort {column}: no such column{suggest(column, SORT_KEYS)}")

    from fp8cfg.studies.runs import list_runs

    runs = sorted(list_runs(folder, conditions), key=lambda run: _sort_key(run, column))
    if "--json" in arguments.flags:
        print(json.dumps([run.as_data() for run in runs], indent=1))
    elif runs:
        print_table(runs)
    elif conditions:
        print(f"no run in {printable(str(folder))} with {', '.join(conditions)}")
    else:
        print(f"no run in {printable(str(folder))}; train one with: fp8cfg recipe=llama_tiny")
    return 0


def _sort_key(run: RunSummary, column: str) -> tuple[bool, float]:
    """Returns a key that puts missing values and NaN last."""
    value = SORT_KEYS[column](run)
    if value is None or math.isnan(value):
        return True, 0.0
    return False, value


def print_table(runs: list[RunSummary]) -> None:
    """Prints a table of runs, the errors of damaged folders, and the number of runs.

    Args:
        runs: The summaries, at least one.
    """
    from rich.console import Console
    from rich.text import Text

    # Not rich's Table: it takes seconds for a thousand rows, and shortens cells without room.
    console = Console(highlight=False)
    titles = [column.title for column in COLUMNS]
    rows = [[column.cell(run) for column in COLUMNS] for run in runs]
    widths = [max(len(row[index]) for row in [titles, *rows]) for index in range(len(COLUMNS))]
    # A pipe has no width, so scripts get all columns.
    indices = list(range(len(COLUMNS)))
    if console.is_terminal:
        indices = _fitting_columns(widths, console.width)

    def print_row(cells: list[str], style: str, styled_title: str = "") -> None:
        """Prints a line. The style holds for the column `styled_title`, or for all columns."""
        line = Text()
        for index in indices:
            column, width = COLUMNS[index], widths[index]
            cell = cells[index].ljust(width)
            if column.is_number:
                cell = cells[index].rjust(width)
            is_styled = styled_title in ("", column.title)
            line.append(cell, style if is_styled else "")
            line.append("  ")
        line.rstrip()
        console.print(line, soft_wrap=True)

    print_row(titles, "bold")
    for run, row in zip(runs, rows, strict=True):
        print_row(row, STYLES[run.state], "state")

    counts = Counter(run.state for run in runs)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    plural = "" if len(runs) == 1 else "s"
    print(f"\n{len(runs)} run{plural}: {states}")
    # Messages of damaged folders explain what to fix. Others are only shown for a single run.
    for run in runs:
        if run.message and (run.state == "damaged" or len(runs) == 1):
            print(printable(run.message))


def _fitting_columns(widths: list[int], room: int) -> list[int]:
    """Returns the indices of the columns for a terminal of `room` characters."""
    # A column without room is skipped, and a narrower one of lower priority may still fit. The most
    # important column always stays.
    indices: list[int] = []
    used = 0
    for index in sorted(range(len(widths)), key=lambda index: COLUMNS[index].rank):
        if not indices or used + widths[index] <= room:
            indices.append(index)
            used += widths[index] + 2  # two spaces between columns
    return sorted(indices)


def _text(value: float | None, form: str) -> str:
    """Formats a number, "" without one."""
    if value is None:
        return ""
    return format(value, form)


def _steps(run: RunSummary) -> str:
    """Formats done and planned steps."""
    if run.steps is None:
        return ""
    return f"{run.steps}/{run.max_steps}"


def _age(seconds: float) -> str:
    """Formats a duration in its largest unit: 45s, 12m, 3h, 5d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    # Below 0 if the clock of another machine is ahead.
    return f"{max(seconds, 0):.0f}s"
