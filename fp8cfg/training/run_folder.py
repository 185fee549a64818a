"""Run folder: the recipe, environment, checkpoints and metrics of one run, with a lock against a second process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO

from fp8cfg.config.errors import Fp8cfgError
from fp8cfg.training.environment import environment

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class RunFolderError(Fp8cfgError):
    """A folder that is not a run folder, or a name or folder that a new run cannot have. Exit code 2."""

    exit_code = 2


class RunFolderNotWritable(RunFolderError):
    """The run folder cannot be written, or its disk has not enough space. Exit code 5."""

    exit_code = 5


class RunFolderInUse(RunFolderError):
    """Another process holds the lock of the run folder. Exit code 6."""

    exit_code = 6


@dataclass
class RunFolder:
    """A run folder, held locked until close() or the end of the process, and usable as a context manager."""

    path: Path
    _lock: IO[str] | None = None

    @classmethod
    def create(
        cls, root: Path, name: str, now: datetime, recipe: str, folder: Path | None = None, need_bytes: int = 0
    ) -> RunFolder:
        """Make and lock `root/<name>-<YYYYmmdd-HHMMSS>` (with -2, -3, ... where taken), or exactly `folder` where given.

        Writes `recipe`, the text of recipe.yaml, and environment.json, after a check that the folder is writable and that
        its disk has `need_bytes` free. Raises RunFolderError for a name that is not plain or a `folder` that has a run in it,
        RunFolderInUse, RunFolderNotWritable.
        """
        if not NAME.fullmatch(name):
            raise RunFolderError(f"run name {name!r}: letters, digits, '.', '_' and '-' only, at most 100 of them")
        with _writable(folder or root):
            path = Path(folder) if folder else _new_folder(Path(root), f"{name}-{now:%Y%m%d-%H%M%S}")
            path.mkdir(parents=True, exist_ok=True)
            if (path / "recipe.yaml").exists():
                raise RunFolderError(f"{path} already holds a run; resume it, or choose another folder")
            run = cls(path, _lock(path))
            try:
                preflight(path, need_bytes)
                run.checkpoints.mkdir(exist_ok=True)
                run.environment.write_text(json.dumps(environment(), indent=1) + "\n", encoding="utf-8")
                # Last: a folder with a recipe is a whole run folder.
                run.recipe.write_text(recipe, encoding="utf-8")
            except BaseException:
                run.close()
                raise
            return run

    @classmethod
    def open(cls, path: Path, lock: bool = True) -> RunFolder:
        """An existing run folder, locked unless `lock` is False (readers, and ranks other than the one that locked it).

        Raises RunFolderError naming what is missing, RunFolderInUse, RunFolderNotWritable.
        """
        run = cls(Path(path))
        parts = (run.path, run.recipe, run.environment, run.checkpoints)
        missing = [str(part) for part in parts if not part.exists()]
        if missing:
            raise RunFolderError(f"{path} is not a run folder: there is no {missing[0]}")
        if lock:
            with _writable(run.path):
                run._lock = _lock(run.path)
        return run

    @property
    def recipe(self) -> Path:
        """The recipe the run was started with, as YAML."""
        return self.path / "recipe.yaml"

    @property
    def environment(self) -> Path:
        """What environment() found when the run was created, as JSON."""
        return self.path / "environment.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, by step."""
        return self.path / "metrics.jsonl"

    @property
    def fp8_stats(self) -> Path:
        """One JSON object a line, by step, layer and tensor; there where log.fp8_stats_every_n_steps asks for it."""
        return self.path / "fp8_stats.jsonl"

    @property
    def coverage(self) -> Path:
        """Which GEMMs ran in what, as JSON."""
        return self.path / "coverage.json"

    def close(self) -> None:
        """Release the lock; safe to call again."""
        if self._lock:
            self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def preflight(folder: Path, need_bytes: int = 0) -> None:
    """Raise RunFolderNotWritable unless a file can be written to `folder` and its disk has `need_bytes` free."""
    probe = folder / f".probe-{os.getpid()}"
    with _writable(folder):
        # By doing it: permission bits say nothing on a full disk, a read-only mount, or to root.
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise RunFolderNotWritable(f"{folder}: not enough space: needs {need_bytes} bytes, {free} are free")


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderNotWritable(f"{folder} cannot be written: {error}") from error


def _new_folder(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()  # fails where it exists: of two runs that start in one second each gets its own
            return path
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def _lock(folder: Path) -> IO[str]:
    """Lock run.lock, which the kernel undoes when the process ends, however it ends; what it says is for people."""
    file = open(folder / "run.lock", "a+", encoding="utf-8")  # noqa: SIM115, held open as long as the run
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read(200).strip()
        file.close()
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise RunFolderInUse(f"{folder} is in use by {holder or 'another process'}") from error
        raise
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    # A forked data worker that outlives its parent would hold the lock with its copy of the handle.
    os.register_at_fork(after_in_child=file.close)
    return file
