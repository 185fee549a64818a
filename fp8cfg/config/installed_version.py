"""Installed version of a package, as its metadata says, without importing it."""

from __future__ import annotations

import functools
from importlib import metadata


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
