"""Data error: the one exception of this package, and the suggestion for a path that does not exist."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


class DataError(ValueError):
    """Training data that cannot be used; one line: which file or key, what is wrong, what would be right."""


def require(path: Path, candidates: list[str] | None = None) -> os.stat_result:
    """`path`'s status; where there is nothing, DataError naming the nearest thing that exists.

    candidates: names beside `path` that would be valid; every name of its folder when None.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{path}: no such file or folder; {_nearest(path, candidates)}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise DataError(
            f"{path}: cannot be reached ({getattr(error, 'strerror', error)})"
        ) from error


def _nearest(path: Path, candidates: list[str] | None) -> str:
    folder = path.parent
    if not os.path.isdir(folder):
        while not os.path.isdir(folder):
            folder = folder.parent
        return f"the nearest folder that exists is {folder}"
    if candidates is None:
        candidates = sorted(os.listdir(folder)) if os.access(folder, os.R_OK) else []
    close = difflib.get_close_matches(path.name, candidates, n=1)
    return (
        f"did you mean {folder / close[0]}?" if close else f"nothing in {folder} has a similar name"
    )
