"""Selection of rows by `--only`, for check_gpu.py and bench_gpu.py."""

from __future__ import annotations

from collections.abc import Sequence


def is_selected(name: str, only: Sequence[str] | None) -> bool:
    """Whether the row `name` has all words of one of the texts `only`. Without `only` every row is selected."""
    if not only:
        return True
    words = name.split()
    return any(all(word in words for word in text.split()) for text in only)


def unknown(only: Sequence[str] | None, names: Sequence[str]) -> str:
    """The first of the texts `only` that selects none of the rows `names`, or "": it would cost a run on a GPU."""
    for text in only or ():
        if not any(is_selected(name, [text]) for name in names):
            return text
    return ""
