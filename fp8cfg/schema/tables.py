"""Text tables and sizes, as wide as the terminal, and in 80 columns in a pipe or a file.

The tables are our own, because rich breaks long paths and has a frame or color to turn off.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

WIDTH = 80
"""Columns of output that is no terminal, such as a pipe or a notebook."""
LABEL_WIDTH = len("run folder: ")
"""Columns of the labels of a run header."""
_MIN_WRAP = 20
"""Least width of the last column for wrapping. In a narrower one text becomes a strip of words."""


class Table(str):
    """Text of a table, with its cells for other forms of output."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Table:
    """Returns a text table.

    A text in the last column continues on more lines if the table is wider than the output. If the last
    column has numbers, the columns move closer together instead.

    Args:
        header: The header of each column.
        rows: The cells of each row.
        right: Indices of the right-aligned columns.
    """
    all_rows = [header, *rows]
    columns = output_width()
    widths = [max(len(row[index]) for row in all_rows) for index in range(len(header))]
    ends_in_numbers = len(header) - 1 in right
    gap = "  " if fits(header, rows) or not ends_in_numbers else " "
    last_start = sum(widths[:-1]) + len(gap) * len(widths[:-1])
    lines = []
    for row in all_rows:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if index in right else cell.ljust(width))
        line = gap.join(cells).rstrip()
        text, room = row[-1], columns - last_start
        if not ends_in_numbers and len(text) > room >= _MIN_WRAP:
            # Continuation lines start at the last column, or further left if a long path needs it.
            longest_word = max((len(word) for word in text.split()), default=0)
            indent = min(last_start, max(0, columns - longest_word))
            line = wrapped(text, line[:last_start], " " * indent)
        lines.append(line)
    result = Table("\n".join(lines))
    result.header, result.rows, result.right = header, rows, right
    return result


def fits(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Returns whether the table is at most as wide as the output without wrapping."""
    columns = zip(header, *rows, strict=True)
    return sum(max(len(cell) for cell in column) + 2 for column in columns) - 2 <= output_width()


def output_width() -> int:
    """Returns the columns of the terminal, or WIDTH if standard output is none."""
    stdout = sys.stdout
    if stdout is None or not stdout.isatty():
        return WIDTH
    return max(40, shutil.get_terminal_size().columns)


class _Wrapper(textwrap.TextWrapper):
    """Breaks lines after commas too: a list in an override has no spaces."""

    wordsep_simple_re = re.compile(r"(\s+)|(?<=,)(?=\S)")


def wrapped(text: str, first: str = "", more: str = "") -> str:
    """Wraps `text` at the width of the output. A word without a place to break, such as a path, stays on one line.

    Args:
        text: The text.
        first: Prefix of the first line.
        more: Prefix of all other lines.
    """
    return _Wrapper(
        output_width(),
        initial_indent=first,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    ).fill(text)


def labeled(label: str, text: str) -> str:
    """Returns a line of a run header: a label and a text, wrapped next to the label."""
    return wrapped(text, f"{label}:".ljust(LABEL_WIDTH), " " * LABEL_WIDTH)


def size(count: float) -> str:
    """Formats bytes: 512 B, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def amount(count: int) -> str:
    """Formats a count: 3.3M, 8.03B."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f}{unit}"
    return str(count)


def cut(text: str, width: int) -> str:
    """Shortens `text` to `width` characters, at the end of a word and with "..."."""
    if len(text) <= width:
        return text
    return text[: width - 3].rpartition(" ")[0].rstrip(" ,;:(") + "..."
