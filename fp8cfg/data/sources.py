"""Corpora without a download: the standard library's source, a folder of text files, a shipped text."""

from __future__ import annotations

import glob
import hashlib
import importlib.resources
import os
import platform
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8cfg.data.errors import DataError, require

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
MAX_TEXT_BYTES = 1 << 30  # held in memory as 2 bytes each; more belongs in token files

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
    """One UTF-8 text file, or every .md, .py, .rst and .txt file below a folder, one document each.

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


def readable_files(root: Path, suffixes: tuple[str, ...], kind: str) -> tuple[list[Path], int]:
    """The file `root`, or those with one of `suffixes` below it, or of such names where it is a pattern as `shards/*.jsonl`; and
    how many links below a folder were passed over. DataError for none."""
    if is_pattern(root):
        return _named(root, suffixes, kind), 0
    is_folder = stat.S_ISDIR(require(root).st_mode)
    paths, links = files_under(root, suffixes, set()) if is_folder else ([root], 0)
    if not paths:
        skipped = (
            f"; {links} links are not followed, a pattern such as {root / '*'}{suffixes[0]} finds"
            " them"
            if links
            else ""
        )
        raise DataError(f"{root}: no {kind} below this folder ({' '.join(suffixes)}{skipped})")
    for path in paths:
        if not path.is_file():  # a pipe or a device would be waited on for ever
            raise DataError(f"{path}: not a regular file; give a {kind} or a folder")
    return paths, links


def is_pattern(path: Path) -> bool:
    """Whether `path` is a pattern of names, as a shell has them, and not the name of a file."""
    return glob.has_magic(str(path)) and not os.path.lexists(path)


def _named(pattern: Path, suffixes: tuple[str, ...], kind: str) -> list[Path]:
    """The files of these names, links too, which were asked for by name; in the order of `files_under`."""
    above = next(folder for folder in pattern.parents if not glob.has_magic(str(folder)))
    names = glob.glob(str(pattern), recursive=True)
    found = [
        Path(name) for name in names if name.lower().endswith(suffixes) and os.path.isfile(name)
    ]
    if not found:
        raise DataError(f"{pattern}: no {kind} has such a name ({' '.join(suffixes)})")
    return _ordered(found, above)


def size_of(paths: list[Path]) -> int:
    """The bytes of all files."""
    return sum(path.stat().st_size for path in paths)


def refuse_too_much(documents: Documents, root: object) -> None:
    """Raise DataError for more text than is held in memory."""
    if documents.size > MAX_TEXT_BYTES:
        raise DataError(
            f"{root}: {documents.size / 2**30:.1f} GiB of text, more than the"
            f" {MAX_TEXT_BYTES / 2**30:.1f} GiB that are held in memory; write token files with"
            " 'fp8cfg data prepare' and use source 'tokens', or read JSONL and Parquet as it comes"
            " with data.streaming=true"
        )


def files_under(root: Path, suffixes: tuple[str, ...], skip: set[str]) -> tuple[list[Path], int]:
    """Regular files with one of `suffixes`, and how many links were passed over.

    Ordered by a hash of the name below `root`: the same on every file system, and, unlike the alphabet, it leaves the
    tail that becomes the validation part a fair sample of the whole.
    """
    found: list[Path] = []
    links = 0
    for folder, folders, names in os.walk(root, onerror=_raise):
        links += sum(os.path.islink(os.path.join(folder, name)) for name in folders)
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.lower().endswith(suffixes):
                continue
            mode = path.lstat().st_mode
            links += stat.S_ISLNK(mode)
            if stat.S_ISREG(mode):
                found.append(path)
    return _ordered(found, root), links


def _ordered(paths: list[Path], root: Path) -> list[Path]:
    return sorted(
        paths, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
    )


def _raise(error: OSError) -> None:
    raise DataError(f"{error.filename}: this folder cannot be read ({error.strerror})") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _read_text(path: Path) -> bytes:
    raw = _read(path)
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
