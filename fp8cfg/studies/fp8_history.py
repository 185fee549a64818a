"""History of FP8 statistics: fp8_stats.jsonl, merged to a fixed number of columns.

The file has a line for each tensor of each measured step, millions of lines for a long run. It is
read once, line by line. Only merged columns stay in memory: at most 512, each with the steps of a
short stretch of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8cfg.run_folder.file_names import FP8_STATS
from fp8cfg.run_folder.files import RunFiles, RunFolderError, StrangeFile
from fp8cfg.run_folder.metrics_file import complete_lines, parse_line
from fp8cfg.schema.errors import printable
from fp8cfg.studies.decimation import Floats, Reduction, merge_columns

COLUMNS = 256
"""Least columns of a long history. The reader merges pairs of neighbors at twice as many."""


STATISTICS = {
    "amax": "max",
    "scale_min": "min",
    "scale_max": "max",
    "underflow": "mean",
    "overflow": "max",
    "error": "mean",
    "nonfinite": "max",
}
"""Fields of fp8_stats.jsonl with a history, and how columns are merged.

Amaxes and counts of clipped and non-finite values keep their maximum: short trouble stays visible.
Scales keep both ends of their range. Underflow and rounding error occur in every step. Their mean
is the useful figure."""
_REDUCTIONS: dict[str, Reduction] = {"max": np.fmax, "min": np.fmin, "mean": np.nanmean}


@dataclass(frozen=True)
class FP8History:
    """FP8 statistics of a run over time.

    Attributes:
        rows: Layer and tensor of each row, such as ("layers.0.mlp.linear_fc1", "input"), in file
            order.
        steps: First and last measured step of each column, int64 [columns, 2].
        values: Matrix of each statistic, float64 [rows, columns]. NaN without a measurement.
        num_steps: Number of measured steps.
    """

    rows: Sequence[tuple[str, str]]
    steps: np.ndarray[Any, np.dtype[np.int64]]
    values: dict[str, Floats]
    num_steps: int

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors, such as "input"."""
        return list(dict.fromkeys(tensor for _, tensor in self.rows))

    def of_tensor(self, name: str, tensor: str) -> tuple[list[str], Floats]:
        """Returns one statistic of one tensor in all layers.

        Args:
            name: The statistic, such as "amax".
            tensor: The tensor, such as "input".

        Returns:
            Names of the layers, and the matrix, float64 [layers, columns].
        """
        index = [i for i, row in enumerate(self.rows) if row[1] == tensor]
        return [self.rows[i][0] for i in index], self.values[name][index]

    def merged(self, num_columns: int) -> FP8History:
        """Returns the history with at most `num_columns` columns."""
        # The same boundaries as in `merge_columns`: steps and values must match.
        columns = len(self.steps)
        if columns <= num_columns:
            return self
        starts = (np.arange(num_columns) * columns) // num_columns
        ends = np.append(starts[1:], columns) - 1
        steps = np.stack([self.steps[starts, 0], self.steps[ends, 1]], axis=1)
        values = {
            name: merge_columns(matrix, num_columns, _REDUCTIONS[STATISTICS[name]])
            for name, matrix in self.values.items()
        }
        return FP8History(self.rows, steps, values, self.num_steps)


def read_history(files: RunFiles) -> FP8History | None:
    """Reads fp8_stats.jsonl of a run folder.

    Args:
        files: The run folder. The run may still write.

    Returns:
        The history. None if the run recorded no statistics.

    Raises:
        RunFolderError: The file is damaged.
    """
    try:
        if not files.kind(FP8_STATS):
            return None
        path = files.path / FP8_STATS  # once, because it asks the system
        reader = _Reader()
        with files.open(FP8_STATS) as file:
            for number, line in enumerate(complete_lines(file), 1):
                reader.add(f"{path}:{number}", line)
            return reader.finish()
    except (OSError, ValueError, StrangeFile) as error:
        raise RunFolderError(printable(str(error))) from None


class _Column:
    """Statistics of one or several neighboring measured steps.

    Attributes:
        steps: First and last step.
        num_steps: Number of measured steps.
        values: Vector of each statistic, float64 [rows]. Shorter if rows appeared later.
    """

    def __init__(self, first: int) -> None:
        self.steps = [first, first]
        self.num_steps = 1
        self.values: dict[str, Floats] = {}


class _Reader:
    """Collects lines into columns of equal numbers of steps.

    The length of the run is unknown at the start. So columns begin with one step each. At twice
    COLUMNS columns, pairs of neighbors are merged and later columns get twice as many steps.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], int] = {}
        self._columns: list[_Column] = []
        self._steps_per_column = 1
        self._step = 0
        self._lines: list[tuple[int, list[float]]] = []
        self._num_steps = 0

    def add(self, place: str, line: bytes) -> None:
        """Adds a line of the file. Raises ValueError if it is damaged."""
        values = parse_line(place, line)
        try:
            row = values["layer"], values["tensor"]
            numbers = [_number(values[name]) for name in STATISTICS]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{place}: not a line of FP8 statistics ({error}); delete it"
            ) from None
        # Lines of a step are neighbors, so a new number ends the step.
        if values["step"] != self._step:
            self._end_step()
            self._step = values["step"]
        self._lines.append((self._rows.setdefault(row, len(self._rows)), numbers))

    def finish(self) -> FP8History | None:
        """Returns the history of all lines. None without lines."""
        # The run may have written only some tensors of its last step. The others are NaN.
        self._end_step()
        if not self._columns:
            return None
        num_rows = len(self._rows)
        values = {}
        for name in STATISTICS:
            # Early columns are shorter if a layer appeared later.
            matrix = np.full((num_rows, len(self._columns)), np.nan)
            for i, column in enumerate(self._columns):
                part = column.values[name]
                matrix[: len(part), i] = part
            values[name] = matrix
        steps = np.array([column.steps for column in self._columns], dtype=np.int64)
        return FP8History(list(self._rows), steps, values, self._num_steps)

    def _end_step(self) -> None:
        """Adds the lines of one step to the last column, or as a new column."""
        if not self._lines:
            return
        column = _Column(self._step)
        matrix = np.full((len(self._rows), len(STATISTICS)), np.nan)
        index = [row for row, _ in self._lines]
        matrix[index] = [numbers for _, numbers in self._lines]
        column.values = {name: matrix[:, i] for i, name in enumerate(STATISTICS)}
        self._lines.clear()
        self._num_steps += 1
        # Fill the last column before a new one begins.
        last = self._columns[-1] if self._columns else None
        if last is not None and last.num_steps < self._steps_per_column:
            self._columns[-1] = _merge(last, column)
        else:
            self._columns.append(column)
        if len(self._columns) == 2 * COLUMNS:
            # The newest column may be incomplete. After the merge it gets the next steps.
            pairs = zip(self._columns[::2], self._columns[1::2], strict=True)
            self._columns = [_merge(a, b) for a, b in pairs]
            self._steps_per_column *= 2


def _merge(a: _Column, b: _Column) -> _Column:
    """Merges two neighboring columns. Means are weighted by the number of steps."""
    merged = _Column(a.steps[0])
    merged.steps[1] = b.steps[1]
    merged.num_steps = a.num_steps + b.num_steps
    for name, merge in STATISTICS.items():
        x, y = a.values[name], b.values[name]
        if len(x) < len(y):  # a layer appeared later
            x = np.append(x, np.full(len(y) - len(x), np.nan))
        if merge == "mean":
            weight = b.num_steps / merged.num_steps
            mean = x * (1 - weight) + y * weight
            # A column without a measurement of a tensor doesn't count.
            merged.values[name] = np.where(np.isnan(x), y, np.where(np.isnan(y), x, mean))
        else:
            merged.values[name] = _REDUCTIONS[merge](x, y)
    return merged


def _number(value: Any) -> float:
    """Converts a number of a line. None, a missing measurement, becomes NaN."""
    if value is None:
        return math.nan
    return float(value)
