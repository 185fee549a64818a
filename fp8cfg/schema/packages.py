"""Entry points of installed packages: what they offer to a group, and a warning instead of an end where one is broken."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from importlib import metadata
from typing import Any

from fp8cfg.schema.errors import PackageWarning


def offered(group: str) -> list[importlib.metadata.EntryPoint]:
    """The entry points of `group`; none of them is loaded."""
    return list(importlib.metadata.entry_points(group=group))


def load(point: importlib.metadata.EntryPoint) -> Any:
    """The object that `point` names. None where importing it raises, with a PackageWarning: one line that names the package."""
    try:
        return point.load()
    except (Exception, SystemExit) as e:  # a stranger's module may raise anything
        warn(point, f"cannot be loaded ({reason(e)})")
        return None


def warn(point: importlib.metadata.EntryPoint, what: str) -> None:
    """Warn that the entry point `point` is left out, and why."""
    warnings.warn(f"{described(point)} {what}; it is left out", PackageWarning, stacklevel=3)


def described(point: importlib.metadata.EntryPoint) -> str:
    """The package of `point` and the entry point, in words."""
    package = getattr(getattr(point, "dist", None), "name", None) or "an installed one"
    return f"package {package}: its entry point {point.name} of {point.group}"


def reason(e: BaseException) -> str:
    """The kind of `e` and the first line of what it says."""
    said = str(e).partition("\n")[0]
    return f"{type(e).__name__}: {said}" if said else type(e).__name__


def installed_version(package: str) -> str | None:
    """The version of the distribution `package`, None where it is not installed."""
    try:
        return _version(package)
    except metadata.PackageNotFoundError:  # not kept: it may be installed meanwhile
        return None


@functools.cache
def _version(package: str) -> str:
    """Kept: to read it the whole text of METADATA is parsed, in some milliseconds, and each choice of a backend asks."""
    return metadata.version(package)
