"""Errors of a run folder, each with its exit code."""

from __future__ import annotations

import os
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
def writable(folder: Path, key: str = "") -> Iterator[None]:
    """In its block an OSError is RunFolderNotWritable, of `folder`, which `key` names where it is one of the recipe's."""
    try:
        yield
    except OSError as error:
        named = f"{key}={folder}:" if key else str(folder)
        why = (
            "it is no folder"
            if os.path.exists(folder) and not os.path.isdir(folder)
            else error.strerror or error
        )
        raise RunFolderNotWritable(f"{named} cannot be written ({why})") from error
