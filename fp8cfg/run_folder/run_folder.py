"""Run folder: recipe, environment, checkpoints and metrics of one run.

A lock keeps a second process out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.run_folder.environment import collect_environment
from fp8cfg.run_folder.file_names import (
    CHECKPOINTS,
    COVERAGE,
    ENVIRONMENT,
    FP8_STATS,
    LOCK,
    LOGGERS,
    METRICS,
    PLAN,
    RECIPE,
    REQUEST,
    SOURCES,
    STATUS,
    TENSORBOARD,
)
from fp8cfg.run_folder.files import (
    RunFiles,
    RunFolderError,
    StrangeFile,
    convert_write_errors,
)
from fp8cfg.run_folder.summary import run_folder_html
from fp8cfg.schema.errors import ConfigError, folder_taken
from fp8cfg.schema.new_folder import make_new_folder
from fp8cfg.schema.safe_files import plain_text

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe


class RunFolderDeleted(RunFolderError):
    """The run folder was deleted while it was used. Exit code 5."""

    exit_code = 5


class OtherRunFormat(RunFolderError):
    """A version of fp8cfg with another format of run folders wrote the run folder. Exit code 4."""

    exit_code = 4


class RunFolderInUse(RunFolderError):
    """Another process holds the lock of the run folder. Exit code 6."""

    exit_code = 6


def take_lock(files: RunFiles) -> FileIO:
    """Locks run.lock, and writes the process and the host into it for people.

    The kernel releases the lock when the process ends, also after a kill.

    Args:
        files: The run folder.

    Returns:
        The open file. Closing it releases the lock.

    Raises:
        RunFolderInUse: Another process has the lock.
        OSError: The file cannot be opened or locked.
        StrangeFile: The lock file is a link or another special file.
    """
    # No `with`: the file stays open as long as the run, and the lock with it.
    file = open(files.open_lock_file(LOCK), "rb+", buffering=0)  # noqa: SIM115
    try:
        _lock(file)
    except OSError as error:
        # The holder wrote its process and host into the file.
        holder = (file.read(200) or b"").decode(errors="replace").strip()
        file.close()
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise RunFolderInUse(
                f"{files.path}: in use by {holder or 'another process'}; wait for it or stop it"
            ) from error
        raise
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    # A forked data worker shares the open file and so the lock. If it outlives the run, the folder
    # would stay locked.
    os.register_at_fork(after_in_child=file.close)
    return file


def _lock(file: FileIO) -> None:
    """Locks a file. Raises OSError if another process keeps it locked.

    To check for a running process, a reader takes a shared lock for some microseconds (status.py).
    A shared lock fails only while a run holds the lock, so then there is no other try.
    """
    for _ in range(LOCK_TRIES - 1):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(LOCK_PAUSE)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


LOCK_TRIES = 1000
"""Number of tries to lock a run folder while readers check the lock."""
LOCK_PAUSE = 0.01
"""Seconds between two tries."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
RUN_FORMAT = 2
"""Format of a run folder, in its environment.json. Change it if older folders cannot be resumed."""
_FILES_WITHOUT_STEPS = (RECIPE, ENVIRONMENT, LOCK, STATUS, LOGGERS, PLAN, SOURCES)
"""Files of a run that has not done a step."""
PAST_RECIPE = re.compile(r"recipe-until-step-([0-9]{1,12})\.yaml")


@dataclass
class RunFolder:
    """A run folder, locked until `close` or the end of the process. Use it as a context manager.

    Attributes:
        files: Reads and writes files in the folder, also after it was renamed.
    """

    files: RunFiles
    _lock: FileIO | None = None
    is_new: bool = False  # this process created the run
    _is_new_folder: bool = False
    _is_new_root: bool = False

    @classmethod
    def create(
        cls,
        root: Path,
        name: str,
        now: datetime,
        recipe: str,
        folder: Path | None = None,
        key: str = "",
    ) -> RunFolder:
        """Creates and locks a run folder with recipe.yaml and environment.json.

        Args:
            root: Parent of the new folder. Unused with `folder`.
            name: Name of the run. The folder is `root/<name>-<YYYYmmdd-HHMMSS>`, with -2, -3, ...
                if the name is taken.
            now: Time in the folder's name.
            recipe: Text of recipe.yaml.
            folder: Exact path of the folder. It may exist, but without a run.
            key: Key of the recipe for the path, for errors.

        Raises:
            RunFolderError: The name has other characters, or the folder has a run already.
            RunFolderInUse: Another process has locked the folder.
            RunFolderNotWritable: The folder cannot be written, or the disk is too full.
            StrangeFile: A name in the folder is a link or another special file.
        """
        if not NAME.fullmatch(name):
            raise RunFolderError(
                f"run name {name!r}: letters, digits, '.', '_' and '-' only, at most 100 of them"
            )
        with convert_write_errors(folder or root, key):
            if folder is not None:
                path = Path(folder)
                is_new_folder = not path.exists()
                is_new_root = not path.parent.exists()
            else:
                is_new_folder = True
                is_new_root = not Path(root).exists()
                path = make_new_folder(Path(root), name, now)
            path.mkdir(parents=True, exist_ok=True)
            files = RunFiles.at(path)
            _refuse_run(files)
            run = cls(files, take_lock(files))
            run._is_new_folder = is_new_folder
            run._is_new_root = is_new_root
            try:
                _refuse_run(files)  # again: another process may have run before we got the lock
                run.is_new = True
                # Permission bits do not tell about a full disk, a read-only mount, or root.
                files.probe()
                files.folder(CHECKPOINTS, make=True)
                text = json.dumps({"run_format": RUN_FORMAT, **collect_environment()}, indent=1)
                files.replace(ENVIRONMENT, f"{text}\n".encode(), mode=0o600)
                # The recipe comes last. Readers take a folder with recipe.yaml as complete.
                run.write_recipe(recipe)
                files.sync()
            except BaseException:
                with suppress(OSError):
                    run.remove_unused()
                run.close()
                raise
            return run

    @staticmethod
    def refuse_taken(path: Path) -> None:
        """Raises RunFolderError if `path` has a run. An early check before slow work."""
        if path.is_dir():
            _refuse_run(RunFiles.at(path))

    @classmethod
    def open(cls, path: str | Path, lock: bool = True) -> RunFolder:
        """Opens an existing run folder.

        Args:
            path: The folder.
            lock: Whether to lock it. Readers do not, and only one rank of a run does.

        Raises:
            RunFolderError: The path is not a run folder. The message has the missing file.
            RunFolderInUse: Another process has locked the folder.
            RunFolderNotWritable: The lock cannot be written.
            StrangeFile: A name in the folder is a link or another special file.
        """
        run = cls.reading(path)
        missing = [
            str(run.path / part)
            for part in (RECIPE, ENVIRONMENT, CHECKPOINTS)
            if not run.files.kind(part)
        ]
        if missing:
            raise RunFolderError(
                f"{path}: not a run folder, {missing[0]} is missing; check the path, or list your"
                " runs with fp8cfg runs"
            )
        try:
            run.files.folder(CHECKPOINTS)
        except OSError as error:
            raise RunFolderError(f"{run.checkpoints}: cannot be read ({error.strerror})") from None
        if lock:
            run.lock()
        return run

    @classmethod
    def reading(cls, path: str | Path) -> RunFolder:
        """Opens a folder for reading, without a check of its files.

        Raises:
            RunFolderError: The path is not a folder.
        """
        try:
            return cls(RunFiles.at(Path(path)))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
                raise RunFolderError(f"{str(path)[:40]}...: {error.strerror}") from None
            if Path(path).is_file():
                problem = "not a run folder, but a file"
            elif isinstance(error, FileNotFoundError | NotADirectoryError):
                problem = "run folder not found; check the path, or list your runs with fp8cfg runs"
            else:
                problem = f"not a run folder ({error})"
            raise RunFolderError(f"{path}: {problem}") from None

    @property
    def path(self) -> Path:
        """Current path of the folder."""
        return self.files.path

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Returns a summary for notebooks."""
        try:
            recipe = self.read_recipe()
            text = f"{recipe.name}, {recipe.trainer.max_steps} steps"
        except (ConfigError, RunFolderError, StrangeFile) as error:
            text = str(error)
        return run_folder_html(self.files, text)

    @property
    def recipe(self) -> Path:
        """Path of recipe.yaml, the recipe of the run."""
        return self.path / RECIPE

    @property
    def environment(self) -> Path:
        """Path of environment.json: versions and hardware when the run was created."""
        return self.path / ENVIRONMENT

    @property
    def checkpoints(self) -> Path:
        """Path of the folder with the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        """Path of metrics.jsonl, with one JSON object for each logged step."""
        return self.path / METRICS

    @property
    def fp8_stats(self) -> Path:
        """Path of fp8_stats.jsonl, with one JSON object for each step, layer and tensor.

        It exists if log.fp8_stats_every_n_steps is set.
        """
        return self.path / FP8_STATS

    @property
    def coverage(self) -> Path:
        """Path of coverage.json: the formats in which GEMMs ran."""
        return self.path / COVERAGE

    def read_recipe(self, config_dir: str | None = None) -> Recipe:
        """Reads and checks recipe.yaml.

        Raises:
            ConfigError: The recipe is not valid. The message names the file.
            StrangeFile: recipe.yaml is not a regular file.
            RunFolderError: recipe.yaml cannot be read.
        """
        return self._read_recipe(RECIPE, config_dir)

    def _read_recipe(self, name: str, config_dir: str | None = None) -> Recipe:
        """Reads and checks the recipe in the file `name`."""
        from fp8cfg.composition import from_yaml

        path = self.path / name
        try:
            return from_yaml(plain_text(self.files.read(name), path), config_dir)
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be read ({error.strerror})") from None
        except ConfigError as error:
            # Some of these messages have a prefix or the path already.
            lines = []
            for problem in error.problems:
                line = problem.removeprefix("YAML: ").removeprefix(f"{path}: ")
                lines.append(f"{path}: {line}")
            raise ConfigError(lines) from None

    def past_recipes(self) -> list[tuple[int, Recipe]]:
        """Returns earlier recipes of the run, each with the last step that used it.

        A resume with changes replaces the recipe. Raises the errors of `read_recipe`.
        """
        return [(step, self._read_recipe(name)) for step, name in self._past_names()]

    def keep_recipe(self, step: int, text: str) -> None:
        """Saves `text` as the recipe of the steps up to `step`. Raises RunFolderNotWritable."""
        with convert_write_errors(self.path):
            self.files.replace(f"recipe-until-step-{step}.yaml", text.encode())

    def forget_recipes(self, step: int) -> None:
        """Deletes past recipes that ended at `step` or later. The run resumes from `step`."""
        with convert_write_errors(self.path):
            for last, name in self._past_names():
                if last >= step:
                    self.files.unlink(name)

    def _past_names(self) -> list[tuple[int, str]]:
        """Returns the last step and the file name of each past recipe, in order."""
        steps_and_names = []
        for name in self.files.names():
            match = PAST_RECIPE.fullmatch(name)
            if match:
                steps_and_names.append((int(match[1]), name))
        return sorted(steps_and_names)

    def write_recipe(self, text: str) -> None:
        """Replaces recipe.yaml by `text`. Raises RunFolderNotWritable."""
        with convert_write_errors(self.path):
            self.files.replace(RECIPE, text.encode())

    def check_there(self) -> None:
        """Raises RunFolderDeleted if the folder or its recipe no longer exists."""
        if not self.files.exists or not self.files.kind(RECIPE):
            raise RunFolderDeleted(
                f"{self.path}: was deleted while the run used it; nothing can be saved any more"
            )

    def check_format(self) -> None:
        """Raises OtherRunFormat if the checkpoints of this folder may have another format.

        A damaged environment.json is no error: each checkpoint has a version too.
        """
        try:
            environment = json.loads(self.files.read(ENVIRONMENT))
        except (OSError, ValueError, RecursionError, StrangeFile):
            return
        run_format = 0
        if isinstance(environment, dict):
            run_format = environment.get("run_format", 0)
        if run_format != RUN_FORMAT:
            raise OtherRunFormat(
                f"{self.path}: has run folder format {run_format!r}, but this version of fp8cfg"
                f" reads format {RUN_FORMAT}; use the version that wrote it, or start a new run"
            )

    def remove_unused(self) -> None:
        """Deletes the folder of a run without steps, so that its name is free again.

        Only deletes a folder that this process created and that has no other files. Raises OSError.
        """
        if not self.is_new or not self._is_unused():
            return
        path = self.path
        for name in self.files.names():
            if name == REQUEST:  # an executor deletes it
                continue
            if self.files.kind(name) == "folder":
                self.files.remove(name)
            else:
                self.files.unlink(name)
        if self._is_new_folder:
            path.rmdir()
        if self._is_new_root:
            path.parent.rmdir()

    def _is_unused(self) -> bool:
        """Returns whether the folder has only the files of a run without steps."""
        for name in self.files.names():
            kind = self.files.kind(name)
            if name in (METRICS, FP8_STATS):
                is_unused = kind == "file" and self.files.size(name) == 0
            elif name == CHECKPOINTS:
                is_unused = kind == "folder" and not self.files.folder(name).names()
            elif name == TENSORBOARD:
                is_unused = kind == "folder" and self._has_only_events(name)
            else:
                is_unused = kind == "file" and name in (*_FILES_WITHOUT_STEPS, REQUEST)
            if not is_unused:
                return False
        return True

    def _has_only_events(self, name: str) -> bool:
        """Returns whether the folder `name` has only event files of TensorBoard."""
        for file_name in self.files.folder(name).names():
            if not file_name.startswith("events.out.tfevents"):
                return False
        return True

    def lock(self) -> None:
        """Takes the lock, unless this object has it already.

        Raises:
            RunFolderInUse: Another process has it.
            RunFolderNotWritable: The folder cannot be written.
            StrangeFile: The lock file is not a regular file.
        """
        with convert_write_errors(self.path):
            if self._lock is None:
                self._lock = take_lock(self.files)

    def close(self) -> None:
        """Releases the lock. You can call it again."""
        if self._lock:
            self._lock.close()
        self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_run(files: RunFiles) -> None:
    """Raises RunFolderError if the folder has a run, or if a new run would overwrite files."""
    if files.kind(RECIPE):
        raise RunFolderError(folder_taken(str(files.path)))
    names = [name for name in (METRICS, FP8_STATS, COVERAGE) if files.kind(name)]
    # After a kill at the start of a run these two files remain. A new run may overwrite them.
    if files.kind(ENVIRONMENT) and not files.kind(LOCK):
        names.append(ENVIRONMENT)
    if files.kind(CHECKPOINTS) == "folder" and files.folder(CHECKPOINTS).names():
        names.append(CHECKPOINTS)
    if names:
        raise RunFolderError(
            f"{files.path}: has no {RECIPE}, but {names[0]}, which a run would overwrite; choose"
            " another folder, or move it away"
        )
