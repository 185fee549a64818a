"""Files of training data: the error of this package, and the files of a path, a folder or a pattern."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import stat
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


def size_of(paths: list[Path]) -> int:
    """The bytes of all files."""
    return sum(path.stat().st_size for path in paths)
