"""Sources of documents: text files, tables (JSONL, CSV, Parquet, datasets) and shipped texts."""

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
"""File name endings by format."""
MAX_TEXT_BYTES = 1 << 30  # a token in memory takes 2 bytes or more; larger data needs token files
Row = tuple[str, Mapping[str, Any]]
"""Place of a row for errors, such as data.jsonl:12, and its values by column."""


OnBadRow = Callable[[DataError], None]
"""Called with the error of a bad row. The row is skipped unless the callback raises."""


def raise_error(error: DataError) -> None:
    """Raises `error`, so that a bad row stops reading."""
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
        column: The only column to read from Parquet, if the file has it. Saves time and memory.
        on_bad_row: Called for a line without a JSON object, and for a CSV row with another number
            of cells than the header.

    Raises:
        DataError: The file cannot be read.
    """
    if kind == "jsonl":
        return _json_lines(path, first, on_bad_row)
    if kind == "csv":
        return _csv_rows(path, first, on_bad_row)
    return _parquet(path, first, column)


def library(name: str, path: Path) -> Any:
    """Imports an optional package.

    Args:
        name: Module to import.
        path: File to read with it, for the error.

    Raises:
        DataError: The package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise DataError(
            f"{path}: needs the package {package}; pip install 'fp8cfg[data]', or write it as JSONL"
        ) from None


def _json_lines(path: Path, first: int, on_bad_row: OnBadRow) -> Iterator[tuple[int, Row]]:
    """Yields the rows of a JSONL file. Empty lines are skipped, but counted."""
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
    """Yields the rows of a CSV file with a header."""
    csv.field_size_limit(MAX_TEXT_BYTES)  # the default, 128 KiB, is less than a long document
    with _opened(path) as file:
        # utf-8-sig drops the byte order mark that Excel writes. Without newline="" the csv module
        # could not tell line ends inside of cells.
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
            # DictReader has surplus cells under the key None, and None for missing cells.
            if None in row or None in row.values():
                columns = len(reader.fieldnames or ())
                on_bad_row(DataError(f"{place}: doesn't have the {columns} cells of the header"))
                continue
            yield number, (place, row)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a file and decompresses it. Raises DataError, also for errors while reading."""
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
    """Parses one JSON object. Raises DataError."""
    try:
        row = json.loads(line.rstrip())
    except UnicodeDecodeError as e:
        raise DataError(f"{place}: not UTF-8 (byte {e.start} of the line)") from None
    except json.JSONDecodeError as e:
        raise DataError(f"{place}: not JSON ({e.msg}, column {e.colno})") from None
    except ValueError as e:  # Python limits integers to 4300 digits
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
    """Yields the rows of a Parquet file."""
    parquet = library("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(str(path)) as file:
            sizes = [
                file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)
            ]
            # Skip whole row groups before the first row, so that a resume starts quickly.
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
    except Exception as e:  # pyarrow raises many types
        raise DataError(
            f"{path}: no Parquet file that can be read ({' '.join(str(e).split())[:120]})"
        ) from None


TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt", ".txt.gz", ".txt.zst")

# Debian's standard library has no tests, other builds have. Without tests, all have the same text.
_NOT_THE_LIBRARY = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


@dataclass(frozen=True)
class Documents:
    """Texts of a source.

    Attributes:
        texts: UTF-8 texts, read as needed.
        name: Name of the source.
        what: Description for messages.
        size: Bytes of the files. 0 for sources that always fit in memory.
        remark: Text after the description, such as skipped links.
    """

    texts: Iterator[bytes]
    name: str
    what: str
    size: int = 0
    remark: str = ""


def stdlib_documents() -> Documents:
    """Returns the standard library's .py files without tests, about 11 MB.

    The text depends on the Python version. If the interpreter has no sources (zipped or stripped),
    the shipped text is used, and the description reports it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    if root.is_dir():
        paths, _ = files_under(root, (".py",), _NOT_THE_LIBRARY)
    if not paths:
        return tiny_documents(
            note=f" instead of the standard library, which has no sources in {root}"
        )
    return Documents(map(_read, paths), "stdlib", f"Python {platform.python_version()}")


def text_documents(path: str | os.PathLike[str]) -> Documents:
    """Opens text files, with one document per file.

    Hidden folders and links in a folder are skipped. A link could lead out of the folder, or to the
    same text twice.

    Args:
        path: A file, a folder (files with TEXT_SUFFIXES), or a pattern.

    Raises:
        DataError: No such file. While reading: a file is not UTF-8.
    """
    root = Path(path)
    paths, links = text_files(root)
    skipped = f", {links} links not followed" if links else ""
    texts = (text for text in map(_read_text, paths) if text)
    return Documents(texts, "text", f"text of {root}", size_of(paths), skipped)


def text_files(root: Path) -> tuple[list[Path], int]:
    """Returns the text files at a path, and the number of skipped links. Raises DataError."""
    return readable_files(root, TEXT_SUFFIXES, "text file")


def tiny_documents(note: str = "") -> Documents:
    """Returns the text in this package, for tests and first runs. It is equal on all machines.

    Args:
        note: Text after the description.
    """
    # Two empty lines separate documents.
    text = importlib.resources.files("fp8cfg.data").joinpath("tiny.txt").read_bytes()
    documents = text.rstrip(b"\n").split(b"\n\n\n")
    return Documents(iter(documents), "tiny", f"the shipped text{note}")


def refuse_too_much(documents: Documents, root: object) -> None:
    """Raises DataError if the text is too large for memory.

    Args:
        documents: The texts.
        root: Their path, for the message.
    """
    if documents.size > MAX_TEXT_BYTES:
        raise DataError(
            f"{root}: {documents.size / 2**30:.1f} GiB of text, more than the"
            f" {MAX_TEXT_BYTES / 2**30:.1f} GiB that are held in memory; write token files with"
            " 'fp8cfg data prepare' and use source 'tokens', or read JSONL, CSV and Parquet as it comes"
            " with data.streaming=true"
        )


def _read(path: Path) -> bytes:
    """Reads a file. Raises DataError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _read_text(path: Path) -> bytes:
    """Reads a UTF-8 text file. Raises DataError for other contents."""
    with _opened(path) as file:
        raw: bytes = file.read()
    # A NUL is valid UTF-8, but means a binary file or UTF-16.
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
"""Formats of tables, and the meaning of data.path for each."""


def table_documents(kind: str, path: str, text_key: str) -> Documents:
    """Opens a table, with one document per row. Empty texts are skipped.

    Args:
        kind: Format, a key of TABLES.
        path: File, folder or pattern.
        text_key: Column of the text.

    Raises:
        DataError: No such file. While reading: a row has no text in this column.
    """
    rows, size = table_rows(kind, path)

    def read_texts() -> Iterator[bytes]:
        for place, row in rows:
            text = text_of(place, row, text_key)
            if text:
                yield text.encode("utf-8", "replace")

    return Documents(read_texts(), kind, f"{text_key!r} of {path}", size)


def table_rows(kind: str, path: str) -> tuple[Iterator[Row], int]:
    """Opens a table.

    Args:
        kind: Format, a key of TABLES.
        path: File, folder or pattern.

    Returns:
        Its rows, read as needed, and the size of its files in bytes. 0 for a dataset.
    """
    if kind == "dataset":
        return _dataset(Path(path)), 0
    paths, _ = table_files(kind, path)
    return (row for file in paths for _, row in file_rows(kind, file)), size_of(paths)


def table_files(kind: str, path: str) -> tuple[list[Path], int]:
    """Returns the files of a table, and the number of skipped links.

    Args:
        kind: Format, a key of SUFFIXES.
        path: File, folder or pattern.

    Raises:
        DataError: No such file.
    """
    return readable_files(Path(path), SUFFIXES[kind], f".{kind} file")


def kind_of(path: str) -> str:
    """Guesses the format of a table from its file names. Defaults to JSONL.

    Args:
        path: File, folder or pattern.

    Returns:
        A key of TABLES.

    Raises:
        DataError: The path does not exist, or the folder has tables of several formats.
    """
    root = Path(path)
    if not is_pattern(root):
        require(root)
    names = [path]
    if root.is_dir():
        if (root / "dataset_info.json").exists() or (root / "dataset_dict.json").exists():
            return "dataset"
        every_suffix = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        names = [file.name for file in files_under(root, every_suffix, set())[0]]
    kinds = []
    for kind, suffixes in SUFFIXES.items():
        if any(name.lower().endswith(suffixes) for name in names):
            kinds.append(kind)
    if len(kinds) > 1:
        raise DataError(
            f"{path}: has files of several formats ({', '.join(kinds)}); give a pattern such as"
            f" {root / '*'}{SUFFIXES[kinds[0]][0]}"
        )
    return kinds[0] if kinds else "jsonl"


CONVERSATIONS = frozenset({"messages", "conversations", "completion", "instruction"})
"""Columns that mark a row as a conversation."""


def text_of(place: str, row: Mapping[str, Any], key: str) -> str:
    """Returns the text in a column.

    Args:
        place: Place of the row, for errors.
        row: The row.
        key: Name of the column.

    Raises:
        DataError: The row has no such column, or the value is not text.
    """
    if key not in row:
        similar = difflib.get_close_matches(key, map(str, row), n=1)
        hint = f"it has {_names(row)}"
        if similar:
            hint = f"did you mean {similar[0]!r}?"
        if not CONVERSATIONS.isdisjoint(row):
            hint += "; for conversations set data=chat"
        raise DataError(f"{place}: has no {key!r}; {hint}")
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key!r} is {type(value).__name__}, not text")
    return value


def _names(row: Mapping[str, Any]) -> str:
    """Lists the first columns of a row."""
    return ", ".join(map(repr, list(row)[:8])) or "nothing"


def _dataset(path: Path) -> Iterator[Row]:
    """Yields the rows of a dataset from Dataset.save_to_disk."""
    require(path)
    datasets = library("datasets", path)
    # A DatasetDict has one folder per split, and the run needs one of them.
    if (path / "dataset_dict.json").exists():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        example = path / (splits or ["train"])[0]
        raise DataError(
            f"{path}: holds the splits {', '.join(splits)}; give the folder of one, as in {example}"
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
    """Finds the places of documents in their files, such as data.jsonl:12. Reads the files again.

    Args:
        name: Name of the source.
        path: File, folder or pattern.
        text_key: Column of the text in tables.
        numbers: Document numbers from `Samples.origins`.

    Returns:
        Places by number. Empty for stdlib, tiny and tokens, which have no rows or files.
    """
    if path is None or not numbers or name in ("stdlib", "tiny", "tokens"):
        return {}
    places: Iterator[str]
    if name == "chat":
        places = (place for place, _ in table_rows(kind_of(path), path)[0])
    elif name == "text":
        # Empty texts are no documents, here and below, so they must not be counted.
        places = (str(file) for file in text_files(Path(path))[0] if _read_text(file))
    else:
        rows = table_rows(name, path)[0]
        places = (place for place, row in rows if text_of(place, row, text_key))
    return {
        number: place
        for number, place in enumerate(islice(places, max(numbers) + 1))
        if number in numbers
    }
