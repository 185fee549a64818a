"""Rows of tables: JSONL, Parquet, and saved datasets, which the datasets library reads.

A row is a mapping from columns to values, with the place that an error names. Local files alone: `datasets` gets no names of the
hub.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8cfg.data.errors import DataError, require
from fp8cfg.data.sources import Documents, is_pattern, readable_files, size_of
from fp8cfg.data.table_files import SUFFIXES, Row, file_rows, library

TABLES = {
    "jsonl": "a .jsonl file, a JSON object a line, or a folder of them",
    "parquet": "a .parquet file, or a folder of them",
    "dataset": "a folder that Dataset.save_to_disk wrote",
}
"""Kinds of tables, and what their path is."""


def table_documents(kind: str, path: str, text_key: str) -> Documents:
    """The column `text_key` of every row, one document each. DataError for rows without it, or where it is no text."""
    rows, size = table_rows(kind, path)
    texts = (text for place, row in rows if (text := text_of(place, row, text_key)))
    return Documents(
        (text.encode("utf-8", "replace") for text in texts), kind, f"{text_key!r} of {path}", size
    )


def table_rows(kind: str, path: str) -> tuple[Iterator[Row], int]:
    """The rows of the table at `path`, read as they are asked for, and the bytes of its files."""
    if kind == "dataset":
        return _dataset(Path(path)), 0
    paths, _ = table_files(kind, path)
    return (row for file in paths for _, row in file_rows(kind, file)), size_of(paths)


def table_files(kind: str, path: str) -> tuple[list[Path], int]:
    """The files of that kind at `path`, and how many links were passed over."""
    return readable_files(Path(path), SUFFIXES[kind], f".{kind} file")


def kind_of(path: str) -> str:
    """The kind of table that stands at `path`, by the names of its files."""
    at = Path(path)
    if not is_pattern(at):
        require(at)
    if at.is_dir() and ((at / "dataset_info.json").exists() or (at / "dataset_dict.json").exists()):
        return "dataset"
    return (
        "parquet"
        if at.suffix == ".parquet" or (at.is_dir() and any(at.rglob("*.parquet")))
        else "jsonl"
    )


def text_of(place: str, row: Mapping[str, Any], key: str) -> str:
    """The text in the column `key`."""
    if key not in row:
        near = difflib.get_close_matches(key, map(str, row), n=1)
        raise DataError(
            f"{place}: has no {key!r}; "
            + (f"did you mean {near[0]!r}?" if near else f"it has {_names(row)}")
        )
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key!r} is {type(value).__name__}, not text")
    return value


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(row)[:8])) or "nothing"


def _dataset(path: Path) -> Iterator[Row]:
    require(path)
    datasets = library("datasets", path)
    if (path / "dataset_dict.json").exists():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        one = path / (splits or ["train"])[0]
        raise DataError(
            f"{path}: holds the splits {', '.join(splits)}; give the folder of one, as in {one}"
        )
    try:
        table = datasets.load_from_disk(str(path))
    except Exception as e:
        raise DataError(
            f"{path}: no folder that Dataset.save_to_disk wrote ({' '.join(str(e).split())[:120]})"
        ) from None
    for number, row in enumerate(table):
        yield f"{path}, row {number}", row
