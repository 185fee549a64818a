"""Plain tables and sizes: aligned columns that read well at 80 columns, in a pipe and under grep."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned text; columns whose index is in `right` are flush right. The last column is not padded."""
    every = [list(header), *[list(r) for r in rows]]
    widths = [max(len(r[i]) for r in every) for i in range(len(header))]
    lines = []
    for row in every:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size(count: float) -> str:
    """Bytes for a person: 512 B, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def amount(count: int) -> str:
    """A count for a person: 3.3M, 8.03B."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f}{unit}"
    return str(count)
