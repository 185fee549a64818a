"""New folders whose name no other run has."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path


def make_new_folder(root: Path, name: str, time: datetime) -> Path:
    """Makes `root/<name>-<YYYYmmdd-HHMMSS>`, with -2, -3, ... if it exists, and its parents.

    Raises:
        OSError: The folder cannot be made.
    """
    stamped = f"{name}-{time:%Y%m%d-%H%M%S}"
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = root / (stamped if number == 1 else f"{stamped}-{number}")
        # mkdir fails if the folder exists, so two runs of the same second get different names.
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise AssertionError("unreachable")
