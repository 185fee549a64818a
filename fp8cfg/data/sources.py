"""Corpora without a download: the standard library's source, a folder of text files, a shipped text."""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import platform
import stat
import sysconfig
from pathlib import Path

from fp8cfg.data.corpus import Corpus, from_documents
from fp8cfg.data.errors import DataError, require

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
MAX_TEXT_BYTES = 1 << 30  # held in memory as 2 bytes each; more belongs in a memory-mapped token file

# Debian ships no tests with its standard library, other builds do: leaving them out keeps the corpora alike.
_NOT_THE_LIBRARY = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


def stdlib_corpus() -> Corpus:
    """The running interpreter's own .py files without tests, about 11 MB; what they say depends on its version.

    A zipped or stripped interpreter has none: then this is the shipped corpus, and its description says so.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths, _ = _files_under(root, (".py",), _NOT_THE_LIBRARY) if root.is_dir() else ([], 0)
    if not paths:
        return tiny_corpus(note=f" instead of the standard library, which has no sources in {root}")
    documents = [_read(path) for path in paths]
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return from_documents("stdlib", documents, f"standard library of {version}, {_size(documents)}", len(paths))


def text_corpus(path: str | os.PathLike[str]) -> Corpus:
    """One UTF-8 text file, or every .md, .py, .rst and .txt file below a folder, one document each.

    Links below the folder and hidden folders are left out: a link can lead out of the folder, or to the same text
    twice. DataError for a missing path, a folder without text, a file that is not UTF-8 text, or more than 1 GiB.
    """
    root = Path(path)
    is_folder = stat.S_ISDIR(require(root).st_mode)
    paths, links = _files_under(root, TEXT_SUFFIXES, set()) if is_folder else ([root], 0)
    skipped = f", {links} links not followed" if links else ""
    if not paths:
        raise DataError(f"{root}: no text file below this folder ({' '.join(TEXT_SUFFIXES)}{skipped})")
    _refuse_too_much(root, paths)
    documents = [document for document in map(_read_text, paths) if document]
    if not documents:
        raise DataError(f"{root}: empty; give a file or folder with text in it")
    return from_documents("text", documents, f"text of {root}, {_size(documents)}{skipped}", len(documents))


def tiny_corpus(note: str = "") -> Corpus:
    """The text shipped with the package: equal on every machine, for tests and first runs. Documents are separated by
    two empty lines."""
    text = importlib.resources.files("fp8cfg.data").joinpath("tiny.txt").read_bytes()
    documents = text.rstrip(b"\n").split(b"\n\n\n")
    return from_documents("tiny", documents, f"the shipped text{note}, {_size(documents)}", 1)


def _files_under(root: Path, suffixes: tuple[str, ...], skip: set[str]) -> tuple[list[Path], int]:
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
            if path.suffix.lower() not in suffixes:
                continue
            mode = path.lstat().st_mode
            links += stat.S_ISLNK(mode)
            if stat.S_ISREG(mode):
                found.append(path)
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()), links


def _raise(error: OSError) -> None:
    raise DataError(f"{error.filename}: this folder cannot be read ({error.strerror})") from error


def _refuse_too_much(root: Path, paths: list[Path]) -> None:
    for path in paths:
        if not path.is_file():  # a pipe or a device would be waited on for ever
            raise DataError(f"{path}: not a regular file; give a text file or a folder")
    size = sum(path.stat().st_size for path in paths)
    if size > MAX_TEXT_BYTES:
        raise DataError(
            f"{root}: {size / 2**30:.1f} GiB of text, more than the {MAX_TEXT_BYTES / 2**30:.1f} GiB that are held in "
            "memory; tokenize it into a Megatron .bin/.idx pair and use source 'tokens'"
        )


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
        raise DataError(f"{path}: not UTF-8 text (byte {bad} is 0x{raw[bad]:02x}); convert it or take it out")
    return raw


def _size(documents: list[bytes]) -> str:
    return f"{len(documents)} documents, {sum(map(len, documents)) / 1e6:.2f} MB"
