"""Entry points and versions of installed packages. A broken entry point only warns."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import warnings
from importlib import metadata
from typing import Any

from fp8cfg.schema.errors import PackageWarning


def offered(group: str) -> list[importlib.metadata.EntryPoint]:
    """Returns the entry points of `group` without loading them."""
    return list(importlib.metadata.entry_points(group=group))


def load(point: importlib.metadata.EntryPoint) -> Any:
    """Imports the object of an entry point. Returns None with a PackageWarning if that fails."""
    try:
        return point.load()
    # A module of another package may raise anything, and some call sys.exit at import.
    except (Exception, SystemExit) as error:
        warn(point, f"cannot be loaded ({reason(error)})")
        return None


def warn(point: importlib.metadata.EntryPoint, problem: str) -> None:
    """Warns about a skipped entry point.

    Args:
        point: The entry point.
        problem: The reason, as the end of a sentence.
    """
    warnings.warn(f"{described(point)} {problem}; it is skipped", PackageWarning, stacklevel=3)


def described(point: importlib.metadata.EntryPoint) -> str:
    """Returns the package of an entry point and its name, for messages."""
    package = getattr(getattr(point, "dist", None), "name", None) or "an installed one"
    return f"package {package}: its entry point {point.name} of {point.group}"


def reason(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    message = str(error).partition("\n")[0]
    if message:
        return f"{type(error).__name__}: {message}"
    return type(error).__name__


def installed_version(package: str) -> str | None:
    """Returns the version of the distribution `package`, or None if it is not installed."""
    try:
        return _version(package)
    # Not cached, because a notebook may install the package later.
    except metadata.PackageNotFoundError:
        return None


def major_and_minor(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version: 2.8.0, 2.8rc1 and 2.8+local give (2, 8)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2])


@functools.cache
def _version(package: str) -> str:
    """Reads a version. Cached: it parses all of METADATA, and each choice of a backend needs it."""
    return metadata.version(package)
