"""Rows of tables: JSONL, read here, and Parquet and saved datasets, which the datasets library reads.

A row is a mapping from columns to values, with the place that an error names. Local files alone: `datasets` gets no names of the
hub, and no loading scripts, which its versions from 4 on do not run any more.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8cfg.data.errors import DataError, require
from fp8cfg.data.sources import Documents, readable_files, size_of

TABLES = {
    "jsonl": "a .jsonl file, a JSON object a line, or a folder of them",
    "parquet": "a .parquet file, or a folder of them",
    "dataset": "a folder that Dataset.save_to_disk wrote",
}
"""Kinds of tables, and what their path is."""
Row = tuple[str, Mapping[str, Any]]


def table_documents(kind: str, path: str, text_key: str) -> Documents:
    """The column `text_key` of every row, one document each. DataError for rows without it, or where it is no text."""
    rows, size = table_rows(kind, path)
    texts = (text for place, row in rows if (text := text_of(place, row, text_key)))
    return Documents((text.encode("utf-8", "replace") for text in texts), kind, f"{text_key!r} of {path}", size)


def table_rows(kind: str, path: str) -> tuple[Iterator[Row], int]:
    """The rows of the table at `path`, read as they are asked for, and the bytes of its files."""
    if kind == "dataset":
        return _dataset(Path(path)), 0
    paths, _ = readable_files(Path(path), (f".{kind}",), f".{kind} file")
    return (_json_lines(paths) if kind == "jsonl" else _parquet(paths)), size_of(paths)


def kind_of(path: str) -> str:
    """The kind of table that stands at `path`, by the names of its files."""
    at = Path(path)
    require(at)
    if at.is_dir() and ((at / "dataset_info.json").exists() or (at / "dataset_dict.json").exists()):
        return "dataset"
    return "parquet" if at.suffix == ".parquet" or (at.is_dir() and any(at.rglob("*.parquet"))) else "jsonl"


def text_of(place: str, row: Mapping[str, Any], key: str) -> str:
    """The text in the column `key`."""
    if key not in row:
        near = difflib.get_close_matches(key, map(str, row), n=1)
        raise DataError(f"{place}: has no {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"it has {_names(row)}"))
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key!r} is {type(value).__name__}, not text")
    return value


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(row)[:8])) or "nothing"


def _json_lines(paths: list[Path]) -> Iterator[Row]:
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        place = f"{path}:{number}"
                        yield place, _object(place, line)
        except OSError as e:
            raise DataError(f"{path}: cannot be read ({e.strerror})") from None


def _object(place: str, line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as e:
        raise DataError(f"{place}: not UTF-8 (byte {e.start} of the line)") from None
    except ValueError as e:
        raise DataError(f"{place}: not JSON ({str(e)[:80]})") from None
    except RecursionError:
        raise DataError(f"{place}: JSON that is nested too deep") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON {type(row).__name__}; each line has an object, such as {{\"text\": \"...\"}}")
    return row


def _parquet(paths: list[Path]) -> Iterator[Row]:
    library = _library(paths[0])
    for path in paths:
        try:  # streaming: nothing is copied into a cache
            table = library.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
            for number, row in enumerate(table):
                yield f"{path}, row {number}", row
        except DataError:
            raise
        except Exception as e:  # pyarrow's and the library's own
            raise DataError(f"{path}: no Parquet file that can be read ({' '.join(str(e).split())[:120]})") from None


def _dataset(path: Path) -> Iterator[Row]:
    require(path)
    library = _library(path)
    if (path / "dataset_dict.json").exists():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        one = path / (splits or ["train"])[0]
        raise DataError(f"{path}: holds the splits {', '.join(splits)}; give the folder of one, as in {one}")
    try:
        table = library.load_from_disk(str(path))
    except Exception as e:
        raise DataError(f"{path}: no folder that Dataset.save_to_disk wrote ({' '.join(str(e).split())[:120]})") from None
    for number, row in enumerate(table):
        yield f"{path}, row {number}", row


def _library(path: Path) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{path}: needs the package datasets; pip install 'fp8cfg[data]', or write it as JSONL") from None
    return datasets
