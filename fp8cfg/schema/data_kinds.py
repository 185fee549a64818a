"""Kind of data at a path: by the ending of its name, or by the names of the files in a folder."""

from __future__ import annotations

import os

ENDINGS: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"),
    "csv": (".csv", ".csv.gz", ".csv.zst"),
    "parquet": (".parquet",),
    "tokens": (".bin", ".idx"),
    "text": (".md", ".py", ".rst", ".txt", ".txt.gz", ".txt.zst"),
}
"""Values of data.name, each with the endings of its files."""
TABLES = ("jsonl", "csv", "parquet")
"""Kinds of files with rows and columns."""
DATASET_FILES = ("dataset_info.json", "dataset_dict.json")
"""Files that Dataset.save_to_disk writes into its folder."""


def kind_by_ending(path: str) -> str | None:
    """Returns the value of data.name for a file or a pattern of this name; None if the name doesn't tell."""
    for kind, endings in ENDINGS.items():
        if path.lower().endswith(endings):
            return kind
    return None


def kind_at(path: str) -> str | None:
    """Returns the value of data.name for `path`; None if it can't be told.

    A folder has the kind of the files below it. Text next to tables, such as a README, doesn't count.
    """
    if kind := kind_by_ending(path):
        return kind
    if os.path.isfile(f"{path}.bin"):
        return "tokens"
    if any(os.path.isfile(os.path.join(path, name)) for name in DATASET_FILES):
        return "dataset"
    if not os.path.isdir(path):
        return None
    names = [name for _, _, names in os.walk(path) for name in names]
    kinds = {kind for name in names if (kind := kind_by_ending(name))}
    if len(kinds) > 1:
        kinds -= {"text"}
    return kinds.pop() if len(kinds) == 1 else None
