"""Files of training data: finds the files of a path, a folder or a pattern. Has DataError."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import stat
from pathlib import Path


class DataError(ValueError):
    """Training data cannot be used. The message is one line: file or key, problem, remedy."""


def require(path: Path, candidates: list[str] | None = None) -> os.stat_result:
    """Returns the status of a path. It must exist.

    Args:
        path: File or folder.
        candidates: Valid names in the same folder, for the suggestion. Defaults to all names.

    Raises:
        DataError: The path does not exist. The message suggests a similar name.
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
    """Suggests an existing name for a missing path, or the deepest existing folder."""
    folder = path.parent
    if not os.path.isdir(folder):
        while not os.path.isdir(folder):
            folder = folder.parent
        return f"the nearest folder that exists is {folder}"
    if candidates is None:
        candidates = []
        if os.access(folder, os.R_OK):
            candidates = sorted(os.listdir(folder))
    similar = difflib.get_close_matches(path.name, candidates, n=1)
    if not similar:
        return f"nothing in {folder} has a similar name"
    return f"did you mean {folder / similar[0]}?"


def readable_files(root: Path, suffixes: tuple[str, ...], kind: str) -> tuple[list[Path], int]:
    """Finds the files at a path.

    Args:
        root: A file, a folder (searched recursively), or a pattern such as `shards/*.jsonl`.
        suffixes: Endings of file names in a folder, in lower case.
        kind: Name of such a file, for errors.

    Returns:
        The files in a fixed order, and the number of skipped links in a folder.

    Raises:
        DataError: No such file, or not a regular file.
    """
    if is_pattern(root):
        return _named(root, suffixes, kind), 0
    paths, links = [root], 0
    if stat.S_ISDIR(require(root).st_mode):
        paths, links = files_under(root, suffixes, set())
    if not paths:
        skipped = ""
        if links:
            skipped = (
                f"; {links} links are not followed, a pattern such as"
                f" {root / '*'}{suffixes[0]} finds them"
            )
        raise DataError(f"{root}: no {kind} below this folder ({' '.join(suffixes)}{skipped})")
    for path in paths:
        if not path.is_file():  # reading a pipe or a device could wait forever
            raise DataError(f"{path}: not a regular file; give a {kind} or a folder")
    return paths, links


def is_pattern(path: Path) -> bool:
    """Returns whether a path is a shell pattern. A file with such a name is no pattern."""
    return glob.has_magic(str(path)) and not os.path.lexists(path)


def _named(pattern: Path, suffixes: tuple[str, ...], kind: str) -> list[Path]:
    """Returns the files of a pattern, in the order of `files_under`."""
    # Links are followed here: the user asked for these names.
    root = next(folder for folder in pattern.parents if not glob.has_magic(str(folder)))
    paths = []
    for name in glob.glob(str(pattern), recursive=True):
        if name.lower().endswith(suffixes) and os.path.isfile(name):
            paths.append(Path(name))
    if not paths:
        raise DataError(f"{pattern}: no {kind} has such a name ({' '.join(suffixes)})")
    return _ordered(paths, root)


def files_under(root: Path, suffixes: tuple[str, ...], skip: set[str]) -> tuple[list[Path], int]:
    """Finds the regular files below a folder. Hidden folders and links are skipped.

    The order is by a hash of the relative path. It is the same on all file systems. With
    alphabetical order, the validation data at the end would not be representative.

    Args:
        root: The folder.
        suffixes: Endings of the file names, in lower case.
        skip: Names of folders to skip.

    Returns:
        The files, and the number of links.
    """
    paths: list[Path] = []
    links = 0
    for folder, folders, names in os.walk(root, onerror=_raise):
        links += sum(os.path.islink(os.path.join(folder, name)) for name in folders)
        # Changing the list in place keeps os.walk out of these folders.
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.lower().endswith(suffixes):
                continue
            mode = path.lstat().st_mode
            links += stat.S_ISLNK(mode)
            if stat.S_ISREG(mode):
                paths.append(path)
    return _ordered(paths, root), links


def _ordered(paths: list[Path], root: Path) -> list[Path]:
    """Sorts paths by a hash of their names relative to `root`."""
    return sorted(
        paths, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
    )


def _raise(error: OSError) -> None:
    """Raises DataError for an unreadable folder. os.walk would skip it silently."""
    raise DataError(f"{error.filename}: this folder cannot be read ({error.strerror})") from error


def size_of(paths: list[Path]) -> int:
    """Returns the total size of files in bytes."""
    return sum(path.stat().st_size for path in paths)
