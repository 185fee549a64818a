"""Errors of a run folder, each with its exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8cfg.config.errors import Fp8cfgError


class RunFolderError(Fp8cfgError):
    """A folder that is not a run folder, or a name or folder that a new run cannot have. Exit code 2."""

    exit_code = 2


class RunFolderNotWritable(RunFolderError):
    """The run folder cannot be written, or its disk has not enough space. Exit code 5."""

    exit_code = 5


class RunFolderDeleted(RunFolderError):
    """The run folder was deleted while it was used. Exit code 5."""

    exit_code = 5


class RunFolderInUse(RunFolderError):
    """Another process holds the lock of the run folder. Exit code 6."""

    exit_code = 6


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """In its block an OSError is RunFolderNotWritable, of `folder`."""
    try:
        yield
    except OSError as error:
        raise RunFolderNotWritable(f"{folder} cannot be written ({error.strerror or error})") from error
