"""Metrics files of a run folder: JSON Lines, one object with a step per line. Loads no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fp8cfg.run_folder.file_names import METRICS
from fp8cfg.run_folder.files import RunFiles

Value = float | int | str | bool | None
# JSON has no such numbers. They are written as these strings and read back as floats.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MEASURED = ("time", "seconds", "tokens_per_second", "memory")
"""Fields of metrics.jsonl that differ between two equal runs."""


def read_metrics(path: Path | RunFiles, name: str = "") -> list[dict[str, Value]]:
    """Reads a metrics file. Skips an incomplete last line.

    Args:
        path: The file, or a run folder together with `name`.
        name: File name in the run folder.

    Returns:
        Step and metrics of each line. Floats have the bits that were written.

    Raises:
        OSError: The file cannot be read.
        StrangeFile: The file is not a regular file.
        ValueError: A line is not a JSON object with a step.
    """
    if isinstance(path, RunFiles):
        folder = path
    else:
        folder = RunFiles.at(Path(path).parent)
        name = Path(path).name
    full_path = folder.path / name  # outside the loop, because each access is a system call
    rows = []
    with folder.open(name) as file:
        for number, line in enumerate(complete_lines(file), 1):
            rows.append(parse_line(f"{full_path}:{number}", line))
    return rows


def read_history(files: RunFiles) -> list[dict[str, Any]]:
    """Reads metrics.jsonl with one row per optimizer step.

    Args:
        files: The run folder.

    Returns:
        The rows in order of steps. A row has "step" and the metrics of this step, also those of an
        evaluation or a save after it. Empty without a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is damaged.
    """
    if not files.kind(METRICS):
        return []
    rows: dict[int, dict[str, Any]] = {}
    for row in read_metrics(files, METRICS):
        step = row["step"]
        assert isinstance(step, int)
        rows.setdefault(step, {}).update(row)
    return [rows[step] for step in sorted(rows)]


def to_json_value(value: Value) -> Value:
    """Returns a value that JSON can represent. See NON_FINITE."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    if value > 0:
        return "Infinity"
    return "-Infinity"


def parse_line(place: str, line: bytes) -> dict[str, Any]:
    """Parses one line of a metrics file.

    Args:
        place: Path and line number, for errors.
        line: The line.

    Returns:
        Step and metrics. Strings such as "NaN" become floats again.

    Raises:
        ValueError: The line is not a JSON object with a step.
    """
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: not a line of metrics: {_quote(line)}; delete that line"
        ) from error
    # Not isinstance: True is an int too.
    if not isinstance(raw, dict) or type(raw.get("step")) is not int:
        raise ValueError(
            f"{place}: a line of metrics without a step: {_quote(line)}; delete that line"
        )
    values = {}
    for name, value in raw.items():
        values[name] = value
        if isinstance(value, str) and value in NON_FINITE:
            values[name] = NON_FINITE[value]
    return values


def _quote(line: bytes) -> str:
    """Quotes the beginning of a line, for errors."""
    return repr(line[:80].decode(errors="replace").rstrip())


def complete_lines(lines: Iterable[bytes]) -> Iterable[bytes]:
    """Returns the lines without an incomplete last one."""
    # A killed run can leave half a line at the end.
    return (line for line in lines if line.endswith(b"\n"))
