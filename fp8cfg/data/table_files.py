"""Files of tables, row by row from any row on: JSON Lines, plain or compressed, and Parquet, which pyarrow reads.

Rows are numbered from 0 within their file. Lines of nothing but spaces are no rows, and are counted.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8cfg.data.errors import DataError

SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"), "parquet": (".parquet",)}
"""Kinds of tables that are files, and the ends of their names."""
Row = tuple[str, Mapping[str, Any]]
"""A row, after the place that an error names."""


def file_rows(
    kind: str, path: Path, first: int = 0, column: str | None = None
) -> Iterator[tuple[int, Row]]:
    """The rows of one file from number `first` on, each with its number; of Parquet that `column` alone, where one is named and
    there. DataError for a file that cannot be read, and a line that is no JSON object."""
    return _json_lines(path, first) if kind == "jsonl" else _parquet(path, first, column)


def library(name: str, path: Path) -> Any:
    """The package `name`, which `path` is read with. DataError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise DataError(
            f"{path}: needs the package {package}; pip install 'fp8cfg[data]', or write it as JSONL"
        ) from None


def _json_lines(path: Path, first: int) -> Iterator[tuple[int, Row]]:
    with _opened(path) as file:
        for number, line in enumerate(file):
            if number >= first and line.strip():
                place = f"{path}:{number + 1}"
                yield number, (place, _object(place, line))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, decompressed."""
    packed = path.name.rpartition(".")[2].lower()
    try:
        if packed == "gz":
            with gzip.open(path, "rb") as file:
                yield file
        elif packed == "zst":
            with (
                library("pyarrow", path).input_stream(str(path), compression="zstd") as stream,
                io.BufferedReader(stream) as file,
            ):
                yield file
        else:
            with path.open("rb") as file:
                yield file
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(
            f"{path}: cannot be read"
            f" ({getattr(e, 'strerror', None) or ' '.join(str(e).split())[:120]})"
        ) from None


def _object(place: str, line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line.rstrip())
    except UnicodeDecodeError as e:
        raise DataError(f"{place}: not UTF-8 (byte {e.start} of the line)") from None
    except json.JSONDecodeError as e:
        raise DataError(f"{place}: not JSON ({e.msg}, column {e.colno})") from None
    except ValueError as e:  # a number with too many digits
        raise DataError(f"{place}: not JSON ({str(e)[:80]})") from None
    except RecursionError:
        raise DataError(f"{place}: JSON that is nested too deep") from None
    if not isinstance(row, dict):
        raise DataError(
            f'{place}: a JSON {type(row).__name__}; each line has an object, such as {{"text":'
            ' "..."}'
        )
    return row


def _parquet(path: Path, first: int, column: str | None) -> Iterator[tuple[int, Row]]:
    parquet = library("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(str(path)) as file:
            sizes = [
                file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)
            ]
            group = number = 0
            while group < len(sizes) and number + sizes[group] <= first:
                number += sizes[group]
                group += 1
            columns = [column] if column in file.schema_arrow.names else None
            for batch in file.iter_batches(
                1024, row_groups=list(range(group, len(sizes))), columns=columns
            ):
                for row in batch.to_pylist():
                    if number >= first:
                        yield number, (f"{path}, row {number}", row)
                    number += 1
    except DataError:
        raise
    except Exception as e:  # pyarrow's own
        raise DataError(
            f"{path}: no Parquet file that can be read ({' '.join(str(e).split())[:120]})"
        ) from None
