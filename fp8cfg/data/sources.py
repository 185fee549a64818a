"""Corpora without a download: the standard library's source, a folder of text files, a shipped text."""

from __future__ import annotations

import csv
import difflib
import gzip
import importlib
import importlib.resources
import io
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fp8cfg.data.files import DataError, files_under, is_pattern, readable_files, require, size_of

SUFFIXES = {
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"),
    "csv": (".csv", ".csv.gz", ".csv.zst"),
    "parquet": (".parquet",),
}
"""Kinds of tables that are files, and the ends of their names."""
MAX_TEXT_BYTES = 1 << 30  # held in memory as 2 bytes each; more belongs in token files
Row = tuple[str, Mapping[str, Any]]
"""A row, after the place that an error names."""


OnBadRow = Callable[[DataError], None]
"""Is called with the error of a row that can't be used. The row is skipped unless it raises."""


def raise_error(error: DataError) -> None:
    """Raises `error`: a bad row ends the reading."""
    raise error


def file_rows(
    kind: str,
    path: Path,
    first: int = 0,
    column: str | None = None,
    on_bad_row: OnBadRow = raise_error,
) -> Iterator[tuple[int, Row]]:
    """Yields the rows of one file from number `first` on, each with its number.

    Args:
        kind: A key of SUFFIXES.
        path: The file.
        first: Number of the first row, from 0.
        column: The column to read of Parquet, if the file has it.
        on_bad_row: Is called for a line that is no JSON object, or a CSV row of another length than the header.

    Raises:
        DataError: The file can't be read.
    """
    if kind == "jsonl":
        return _json_lines(path, first, on_bad_row)
    if kind == "csv":
        return _csv_rows(path, first, on_bad_row)
    return _parquet(path, first, column)


def library(name: str, path: Path) -> Any:
    """The package `name`, which `path` is read with. DataError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise DataError(
            f"{path}: needs the package {package}; pip install 'fp8cfg[data]', or write it as JSONL"
        ) from None


def _json_lines(path: Path, first: int, on_bad_row: OnBadRow) -> Iterator[tuple[int, Row]]:
    with _opened(path) as file:
        for number, line in enumerate(file):
            if number < first or not line.strip():
                continue
            place = f"{path}:{number + 1}"
            try:
                row = _object(place, line)
            except DataError as e:
                on_bad_row(e)
                continue
            yield number, (place, row)


def _csv_rows(path: Path, first: int, on_bad_row: OnBadRow) -> Iterator[tuple[int, Row]]:
    """The rows after the header, whose cells are the columns."""
    csv.field_size_limit(MAX_TEXT_BYTES)  # the default, 128 KiB, is less than a long document
    with _opened(path) as file:
        reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        rows = enumerate(reader)
        while True:
            try:
                number, row = next(rows)
            except StopIteration:
                return
            except (csv.Error, UnicodeDecodeError) as e:
                raise DataError(f"{path}:{reader.line_num + 1}: not CSV in UTF-8 ({e})") from None
            place = f"{path}:{reader.line_num}"
            if number < first:
                continue
            if None in row or None in row.values():
                columns = len(reader.fieldnames or ())
                on_bad_row(DataError(f"{place}: doesn't have the {columns} cells of the header"))
                continue
            yield number, (place, row)


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


TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt", ".txt.gz", ".txt.zst")

# Debian ships no tests with its standard library, other builds do: leaving them out keeps the corpora alike.
_NOT_THE_LIBRARY = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


@dataclass(frozen=True)
class Documents:
    """The texts of a source, read as they are asked for.

    what: for people; remark: for people too, after what was found. size: bytes of the files, where these may be too many to hold.
    """

    texts: Iterator[bytes]
    name: str
    what: str
    size: int = 0
    remark: str = ""


def stdlib_documents() -> Documents:
    """The running interpreter's own .py files without tests, about 11 MB; what they say depends on its version.

    A zipped or stripped interpreter has none: then this is the shipped corpus, and its description says so.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths, _ = files_under(root, (".py",), _NOT_THE_LIBRARY) if root.is_dir() else ([], 0)
    if not paths:
        return tiny_documents(
            note=f" instead of the standard library, which has no sources in {root}"
        )
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return Documents(map(_read, paths), "stdlib", f"standard library of {version}")


def text_documents(path: str | os.PathLike[str]) -> Documents:
    """One UTF-8 text file, or every one below a folder (TEXT_SUFFIXES), one document each.

    Links below the folder and hidden folders are left out: a link can lead out of the folder, or to the same text
    twice. DataError for a missing path, a folder without text, a file that is not UTF-8 text.
    """
    root = Path(path)
    paths, links = text_files(root)
    skipped = f", {links} links not followed" if links else ""
    texts = (text for text in map(_read_text, paths) if text)
    return Documents(texts, "text", f"text of {root}", size_of(paths), skipped)


def text_files(root: Path) -> tuple[list[Path], int]:
    """The text files at `root`, and how many links were passed over."""
    return readable_files(root, TEXT_SUFFIXES, "text file")


def tiny_documents(note: str = "") -> Documents:
    """The text shipped with the package: equal on every machine, for tests and first runs. Documents are separated by
    two empty lines."""
    text = importlib.resources.files("fp8cfg.data").joinpath("tiny.txt").read_bytes()
    documents = text.rstrip(b"\n").split(b"\n\n\n")
    return Documents(iter(documents), "tiny", f"the shipped text{note}")


def refuse_too_much(documents: Documents, root: object) -> None:
    """Raise DataError for more text than is held in memory."""
    if documents.size > MAX_TEXT_BYTES:
        raise DataError(
            f"{root}: {documents.size / 2**30:.1f} GiB of text, more than the"
            f" {MAX_TEXT_BYTES / 2**30:.1f} GiB that are held in memory; write token files with"
            " 'fp8cfg data prepare' and use source 'tokens', or read JSONL, CSV and Parquet as it comes"
            " with data.streaming=true"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _read_text(path: Path) -> bytes:
    with _opened(path) as file:
        raw: bytes = file.read()
    try:
        raw.decode("utf-8")
        bad = raw.find(b"\0")
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        raise DataError(
            f"{path}: not UTF-8 text (byte {bad} is 0x{raw[bad]:02x}); convert it or take it out"
        )
    return raw


TABLES = {
    "jsonl": "a .jsonl file, a JSON object a line, or a folder of them",
    "csv": "a .csv file with a header, or a folder of them",
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
    names = [file.name for file in at.rglob("*")] if at.is_dir() else [path]
    for kind in ("parquet", "csv"):
        if any(name.lower().endswith(SUFFIXES[kind]) for name in names):
            return kind
    return "jsonl"


CONVERSATIONS = frozenset({"messages", "conversations", "completion", "instruction"})
"""Columns that only rows of conversations have."""


def text_of(place: str, row: Mapping[str, Any], key: str) -> str:
    """The text in the column `key`."""
    if key not in row:
        near = difflib.get_close_matches(key, map(str, row), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {_names(row)}"
        if not CONVERSATIONS.isdisjoint(row):
            hint += "; for conversations set data=chat"
        raise DataError(f"{place}: has no {key!r}; {hint}")
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


def document_places(
    name: str, path: str | None, text_key: str, numbers: Collection[int]
) -> dict[int, str]:
    """Where documents stand in the files of a source, such as data.jsonl:12, by the numbers that `Samples.origins` gives.

    Reads the files again. Empty for sources that have no rows or files: stdlib, tiny, and tokens, whose index has the numbers.
    """
    if path is None or not numbers or name in ("stdlib", "tiny", "tokens"):
        return {}
    places: Iterator[str]
    if name == "chat":
        places = (place for place, _ in table_rows(kind_of(path), path)[0])
    elif name == "text":
        places = (str(file) for file in text_files(Path(path))[0] if _read_text(file))
    else:
        rows = table_rows(name, path)[0]
        places = (place for place, row in rows if text_of(place, row, text_key))
    return {
        number: place
        for number, place in enumerate(islice(places, max(numbers) + 1))
        if number in numbers
    }
