"""Safe access to the files of a run folder, and the errors of this access.

All files are opened relative to the folder's descriptor. Symbolic links are never followed, so a
shared folder cannot redirect a write to another file of the user. A hard link could do the same.
So files are never written in place, except for the lock: new content goes to a file with a random
name, and a rename replaces the old file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import sys
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Self

from fp8cfg.schema.errors import Fp8cfgError

_REQUIRED_CALLS = {os.open, os.stat, os.mkdir, os.rename, os.unlink}
"""System calls that must take paths relative to a folder descriptor."""


class StrangeFile(Fp8cfgError):
    """A link, a pipe or a device in a run folder, where a file or a folder of ours should be.
    Exit code 2."""

    exit_code = 2


class RunFolderError(Fp8cfgError):
    """A folder that is not a run folder, or a name or folder that a new run cannot have.
    Exit code 2."""

    exit_code = 2


class RunFolderNotWritable(RunFolderError):
    """The run folder cannot be written, or its disk has not enough space. Exit code 5."""

    exit_code = 5


@contextmanager
def convert_write_errors(folder: Path, key: str = "") -> Iterator[None]:
    """Context manager to convert OSError to RunFolderNotWritable.

    Args:
        folder: The run folder, for the message.
        key: Key of the recipe for the folder, such as "log.dir". "" without one.
    """
    try:
        yield
    except OSError as error:
        name = str(folder)
        if key:
            name = f"{key}={folder}:"
        reason = error.strerror or str(error)
        if os.path.exists(folder) and not os.path.isdir(folder):
            reason = "it is no folder"
        raise RunFolderNotWritable(f"{name} cannot be written ({reason})") from error


class FolderDescriptor:
    """An open folder. It stays valid if the folder is renamed.

    Raises:
        OSError: A system call failed. The error has the path.
        StrangeFile: The name is a link, a pipe or a device.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self._path = path
        # A finalizer closes the descriptor with the object, so callers need no `with` block.
        self.close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def at(cls, folder: Path | Self) -> Self:
        """Opens a folder. A FolderDescriptor is returned unchanged.

        Args:
            folder: The folder. Links in this path are followed, because the user wrote it.

        Raises:
            OSError: The folder cannot be opened, or the system lacks openat and similar calls.
        """
        if not isinstance(folder, Path):
            return folder
        if _REQUIRED_CALLS - os.supports_dir_fd:
            raise OSError(
                errno.ENOTSUP,
                "this system cannot open files relative to a folder, and so not without following"
                " links",
            )
        return cls(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), Path(folder))

    @property
    def path(self) -> Path:
        """Current path of the folder. The original path if the current one is unknown."""
        with suppress(OSError):
            return self._current_path() or self._path
        return self._path

    @property
    def exists(self) -> bool:
        """Whether the folder still exists. True if the system cannot tell."""
        with suppress(OSError):
            return self._current_path() is not None
        # An error here (no permission, a network file system) does not prove a deletion.
        return True

    @property
    def stable_path(self) -> Path:
        """Path for libraries that need one. On Linux it stays valid after a rename."""
        link = Path(f"/proc/self/fd/{self.descriptor}")
        if sys.platform == "linux" and link.exists():
            return link
        return self.path

    def kind(self, name: str) -> str:
        """Returns the type of a file.

        Args:
            name: Path relative to the folder.

        Returns:
            "file", "folder", "strange" (a link, a pipe or a device), or "" if it does not exist.
        """
        parts = Path(name).parts
        # Each parent too: stat would follow a link there.
        for depth in range(1, len(parts) + 1):
            kind = self._kind_of_last(Path(*parts[:depth]))
            is_parent = depth < len(parts)
            if is_parent and kind == "file":
                return ""
            if kind != "folder":
                return kind
        return "folder"

    def names(self) -> list[str]:
        """Returns the names in the folder, sorted."""
        return sorted(os.listdir(self.descriptor))

    def open_regular(self, name: str, flags: int) -> int:
        """Opens a regular file and returns its descriptor.

        Args:
            name: Path relative to the folder.
            flags: Flags of os.open.
        """
        # Without O_NONBLOCK, open() of a pipe waits until another process opens its other end.
        descriptor = self.open_at(name, flags | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return descriptor
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path / name))
        raise self._strange_file(name)

    def open_at(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Opens a file or a folder without following links, and returns its descriptor.

        Args:
            name: Path relative to the folder.
            flags: Flags of os.open.
            mode: Permission bits of a new file, before the umask.
        """
        # O_NOFOLLOW only covers the last part of a path, so each parent is opened separately.
        *parents, last = Path(name).parts
        folder = self.descriptor
        try:
            for parent in parents:
                flags_of_parent = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                subfolder = os.open(parent, flags_of_parent, dir_fd=folder)
                if folder != self.descriptor:
                    os.close(folder)
                folder = subfolder
            return os.open(last, flags | os.O_NOFOLLOW, mode, dir_fd=folder)
        except OSError as error:
            # A link is ELOOP, or ENOTDIR with O_DIRECTORY. A pipe without a reader, or a socket, is
            # ENXIO.
            if error.errno in (errno.ELOOP, errno.ENXIO) or (
                error.errno == errno.ENOTDIR and self.kind(name) == "strange"
            ):
                raise self._strange_file(name) from None
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None
        finally:
            if folder != self.descriptor:
                os.close(folder)

    def _kind_of_last(self, name: Path) -> str:
        """Returns the type of `name` like `kind`, but follows links in its parents."""
        try:
            mode = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return ""
        if stat.S_ISREG(mode):
            return "file"
        if stat.S_ISDIR(mode):
            return "folder"
        return "strange"

    def _strange_file(self, name: str) -> StrangeFile:
        """Returns the error for a link, a pipe or a device."""
        return StrangeFile(
            f"{self.path / name}: is no file or folder but a link, a pipe or a device; none is"
            " followed in a run folder"
        )

    def _current_path(self) -> Path | None:
        """Returns a path of the open folder, or None if it was deleted."""
        folder = os.fstat(self.descriptor)
        # The user's path first: messages should have it unless the folder was renamed.
        for path in (self._path, self._kernel_path()):
            with suppress(FileNotFoundError, NotADirectoryError):
                if os.path.samestat(os.stat(path), folder):
                    return path
        return None

    def _kernel_path(self) -> Path:
        """Returns the path that the kernel has for the descriptor."""
        if hasattr(fcntl, "F_GETPATH"):  # macOS
            path = fcntl.fcntl(self.descriptor, fcntl.F_GETPATH, bytes(1024))
            return Path(os.fsdecode(path.rstrip(b"\0")))
        return Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))


MAX_BYTES = 1 << 20
"""Limit of `RunFiles.read`, in bytes. fp8cfg writes no larger file for it."""
_NEW = os.O_CREAT | os.O_EXCL


class RunFiles(FolderDescriptor):
    """Files of a run folder.

    Names are relative to the folder, such as "checkpoints/step-00000002/state.json".

    Raises:
        OSError: A system call failed. The error has the path.
        StrangeFile: The name is a link, a pipe or a device.
    """

    def folder(self, name: str, make: bool = False) -> RunFiles:
        """Opens a folder in this one.

        Args:
            name: Path relative to this folder.
            make: Whether to create it if it does not exist. Its parent must exist.
        """
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.descriptor)
        return RunFiles(self.open_at(name, os.O_RDONLY | os.O_DIRECTORY), self.path / name)

    def size(self, name: str) -> int:
        """Returns the size of a regular file in bytes."""
        with self.open(name) as file:
            return os.fstat(file.fileno()).st_size

    def open(self, name: str) -> BufferedReader:
        """Opens a regular file for reading, in binary mode."""
        return open(self.open_regular(name, os.O_RDONLY), "rb")

    def read(self, name: str, limit: int = MAX_BYTES) -> bytes:
        """Reads a whole file.

        Args:
            name: Path relative to the folder.
            limit: Maximum size in bytes.

        Raises:
            OSError: The file cannot be read, or is larger than `limit`.
        """
        with self.open(name) as file:
            # One byte more than allowed tells a file at the limit from a larger one.
            data = file.read(limit + 1)
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(self.path / name))
        return data

    @contextmanager
    def replacing(self, name: str, mode: int = 0o666) -> Iterator[FileIO]:
        """Context manager that replaces a file atomically.

        Yields an unbuffered new file. At the end of the block the file is synced to disk and
        renamed to `name`. An exception deletes the new file and keeps the old one. The caller can
        continue to append through a duplicate of the descriptor.

        Args:
            name: Path relative to the folder.
            mode: Permission bits, before the umask.
        """
        new_name = f"{name}.tmp-{uuid.uuid4().hex[:12]}"
        descriptor = self.open_at(new_name, os.O_RDWR | os.O_APPEND | _NEW, mode)
        with open(descriptor, "ab", buffering=0) as file:
            try:
                yield file
                # Sync before the rename. Otherwise a power loss could leave an empty file.
                os.fsync(file.fileno())
                self.rename(new_name, name)
            except BaseException:
                with suppress(OSError):
                    os.unlink(new_name, dir_fd=self.descriptor)
                raise

    def replace(self, name: str, data: bytes, mode: int = 0o666) -> None:
        """Replaces the content of a file atomically. After a crash it has the old or the new bytes.

        Args:
            name: Path relative to the folder.
            data: The new content.
            mode: Permission bits, before the umask.
        """
        with self.replacing(name, mode) as file:
            write_all(file, data)

    def probe(self) -> None:
        """Raises OSError unless a file of 4 KiB can be written."""
        # Not an empty file: a full disk often still accepts one.
        name = f".probe-{uuid.uuid4().hex[:12]}"
        with open(self.open_at(name, os.O_WRONLY | _NEW), "wb", buffering=0) as file:
            try:
                write_all(file, bytes(4096))
            finally:
                os.unlink(name, dir_fd=self.descriptor)

    def open_lock_file(self, name: str) -> int:
        """Opens a lock file for reading and writing, and creates it if needed.

        Returns:
            The descriptor.

        Raises:
            StrangeFile: The file has a hard link, or is not a regular file.
        """
        descriptor = self.open_regular(name, os.O_RDWR | os.O_CREAT)
        if os.fstat(descriptor).st_nlink > 1:
            os.close(descriptor)
            raise StrangeFile(
                f"{self.path / name}: has a second name (a hard link); nothing is written to such a"
                " file"
            )
        return descriptor

    def rename(self, old: str, new: str) -> None:
        """Renames a file or a folder within this folder. Replaces a file of the new name."""
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def unlink(self, name: str) -> None:
        """Deletes a file."""
        os.unlink(name, dir_fd=self.descriptor)

    def remove(self, name: str, ignore_errors: bool = False) -> None:
        """Deletes a folder and its contents. Links in it are deleted, but not their targets."""
        shutil.rmtree(name, ignore_errors, dir_fd=self.descriptor)

    def free_bytes(self) -> int:
        """Returns the free space of the disk in bytes."""
        return shutil.disk_usage(self.descriptor).free

    def sync(self) -> None:
        """Syncs the folder's entries to disk, so that renames survive a power loss."""
        sync(self.descriptor)

    def sync_file(self, name: str) -> None:
        """Syncs a file to disk. Does nothing if it does not exist."""
        # fsync also covers bytes that another process or a library wrote.
        if self.kind(name):
            with self.open(name) as file:
                sync(file.fileno())


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Writes all bytes to an unbuffered file. Raises OSError."""
    unwritten = memoryview(data)
    # write() may take fewer bytes: Linux writes at most 2 GiB per call.
    while unwritten:
        num_written = file.write(unwritten)
        unwritten = unwritten[num_written:]


def sync(descriptor: int) -> None:
    """Syncs a file, or the entries of a folder, to disk. Raises OSError."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems return EINVAL for a folder. Their renames are durable already.
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
