"""Text tables and byte sizes: aligned columns, readable at 80 columns, in a pipe and under grep."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

WIDTH = 80
"""Columns of whatever a person reads."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned text; columns whose index is in `right` are flush right. The last column is not padded. Beyond WIDTH its words go
    on in lines below it, or, where it is flush right, all columns stand closer."""
    every = [list(header), *[list(r) for r in rows]]
    widths = [max(len(r[i]) for r in every) for i in range(len(header))]
    numbers = len(header) - 1 in right
    gap = "  " if fits(header, rows) or not numbers else " "
    last = sum(widths[:-1]) + len(gap) * len(widths[:-1])
    lines = []
    for row in every:
        cells = [
            c.rjust(w) if i in right else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        line = gap.join(cells).rstrip()
        room = not numbers and len(row[-1]) > WIDTH - last >= 20
        longest = max(map(len, row[-1].split()), default=0)
        lines.append(
            wrapped(row[-1], line[:last], " " * min(last, max(0, WIDTH - longest)))
            if room
            else line
        )
    return "\n".join(lines)


def fits(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the table is at most WIDTH wide as it is."""
    return sum(max(map(len, column)) + 2 for column in zip(header, *rows, strict=True)) - 2 <= WIDTH


class _Wrapper(textwrap.TextWrapper):
    """Breaks after commas too: a list in a word of the command line has no spaces."""

    wordsep_simple_re = re.compile(r"(\s+)|(?<=,)(?=\S)")


def wrapped(text: str, first: str = "", more: str = "") -> str:
    """`text` in lines of at most WIDTH, the first of which begins with `first` and the others with `more`. A path, or another
    word without a place to break, stays whole."""
    return _Wrapper(
        WIDTH,
        initial_indent=first,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    ).fill(text)


def size(count: float) -> str:
    """Bytes for a person: 512 B, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def amount(count: int) -> str:
    """A count for a person: 3.3M, 8.03B."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f}{unit}"
    return str(count)


def cut(text: str, width: int) -> str:
    """`text` in at most `width` characters, whole words and "..." where it is longer."""
    if len(text) <= width:
        return text
    return text[: width - 3].rpartition(" ")[0].rstrip(" ,;:(") + "..."
