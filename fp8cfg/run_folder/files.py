"""The files of a run folder, all of them opened through here: relative to the folder's descriptor, and never through a link.

A file with a second name (a hard link) could lead a writer to any file of the reader as a link does: nothing is written into a file
that was there before but the lock, and what replaces a file is written under a new random name first.
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

_NEEDED = {os.open, os.stat, os.mkdir, os.rename, os.unlink}


class StrangeFile(Fp8cfgError):
    """A link, a pipe or a device in a run folder, where a file or a folder of ours should be. Exit code 2."""

    exit_code = 2


class FolderDescriptor:
    """A folder by its descriptor.

    Every method raises OSError as the system does, and StrangeFile for what is no regular file or folder; both name the path.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor, self._path = descriptor, path
        self.close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def at(cls, folder: Path | Self) -> Self:
        """That of `folder`, a path of the user's, who may have links of his own on the way to it."""
        if not isinstance(folder, Path):
            return folder
        if _NEEDED - os.supports_dir_fd:
            raise OSError(
                errno.ENOTSUP,
                "this system cannot open files relative to a folder, and so not without following"
                " links",
            )
        return cls(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), Path(folder))

    @property
    def path(self) -> Path:
        """Where the folder is now, as it was given where it has not been renamed."""
        with suppress(OSError):
            return self._found() or self._path
        return self._path

    @property
    def there(self) -> bool:
        """Whether the folder is still in the file system, as far as the system says."""
        with suppress(OSError):
            return self._found() is not None
        return True

    @property
    def reached(self) -> Path:
        """A path for libraries that take nothing else. On Linux it goes through the descriptor, so a rename does not matter."""
        through = Path(f"/proc/self/fd/{self.descriptor}")
        return through if sys.platform == "linux" and through.exists() else self.path

    def kind(self, name: str) -> str:
        """What `name` is: "file", "folder", "strange" (a link, a pipe, a device), or "" where it is not there."""
        parts, found = Path(name).parts, "folder"
        for count in range(1, len(parts) + 1):  # a link on the way is not followed either
            found = self._kind(Path(*parts[:count]))
            if found != "folder":
                return found if found == "strange" or count == len(parts) else ""
        return found

    def names(self) -> list[str]:
        """What is in the folder, sorted."""
        return sorted(os.listdir(self.descriptor))

    def open_regular(self, name: str, flags: int) -> int:
        """A descriptor of the regular file `name`. A pipe is not waited for."""
        descriptor = self.open_at(name, flags | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return descriptor
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path / name))
        raise self._strange(name)

    def open_at(self, name: str, flags: int, mode: int = 0o666) -> int:
        """A descriptor of `name`, one part of the path after the other: O_NOFOLLOW is about the last one alone."""
        *above, last = Path(name).parts
        at = self.descriptor
        try:
            for part in above:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                if at != self.descriptor:
                    os.close(at)
                at = inner
            return os.open(last, flags | os.O_NOFOLLOW, mode, dir_fd=at)
        except OSError as error:
            # A link is ELOOP, or ENOTDIR where a folder was wanted; a pipe without a reader, or a socket, is ENXIO.
            if error.errno in (errno.ELOOP, errno.ENXIO) or (
                error.errno == errno.ENOTDIR and self.kind(name) == "strange"
            ):
                raise self._strange(name) from None
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None
        finally:
            if at != self.descriptor:
                os.close(at)

    def _kind(self, name: Path) -> str:
        try:
            mode = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return ""
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "strange"

    def _strange(self, name: str) -> StrangeFile:
        what = (
            "is no file or folder but a link, a pipe or a device; none is followed in a run folder"
        )
        return StrangeFile(f"{self.path / name}: {what}")

    def _found(self) -> Path | None:
        """A path that leads to the folder now, or None."""
        mine = os.fstat(self.descriptor)
        for path in (self._path, self._said_by_the_system()):
            with suppress(FileNotFoundError, NotADirectoryError):
                if os.path.samestat(os.stat(path), mine):
                    return path
        return None

    def _said_by_the_system(self) -> Path:
        if hasattr(fcntl, "F_GETPATH"):  # macOS
            return Path(
                os.fsdecode(
                    fcntl.fcntl(self.descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")
                )
            )
        return Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))


MAX_BYTES = 1 << 20
"""A larger file is none of ours where it is read as a whole."""
_NEW = os.O_CREAT | os.O_EXCL


class RunFiles(FolderDescriptor):
    """The files in one folder, by names relative to it, such as "recipe.yaml" and "checkpoints/step-00000002/state.json".

    Every method raises OSError as the system does, and StrangeFile for what is no regular file or folder; both name the path.
    """

    def folder(self, name: str, make: bool = False) -> RunFiles:
        """The folder `name`, made where `make` is set and it is not there."""
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.descriptor)
        return RunFiles(self.open_at(name, os.O_RDONLY | os.O_DIRECTORY), self.path / name)

    def size(self, name: str) -> int:
        """The length of the regular file `name`, in bytes."""
        with self.open(name) as file:
            return os.fstat(file.fileno()).st_size

    def open(self, name: str) -> BufferedReader:
        """The regular file `name`, to read."""
        return open(self.open_regular(name, os.O_RDONLY), "rb")

    def read(self, name: str, limit: int = MAX_BYTES) -> bytes:
        """The bytes of `name`. Raises OSError where they are more than `limit`."""
        with self.open(name) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(self.path / name))
        return data

    @contextmanager
    def replacing(self, name: str, mode: int = 0o666) -> Iterator[FileIO]:
        """A new file, unbuffered, that takes the place of `name` at the end of the block, brought to disk; and stays open if the
        caller keeps a duplicate of its descriptor. It has `mode`, less the umask."""
        new = f"{name}.tmp-{uuid.uuid4().hex[:12]}"
        with open(
            self.open_at(new, os.O_RDWR | os.O_APPEND | _NEW, mode), "ab", buffering=0
        ) as file:
            try:
                yield file
                os.fsync(file.fileno())
                self.rename(new, name)
            except BaseException:
                with suppress(OSError):
                    os.unlink(new, dir_fd=self.descriptor)
                raise

    def replace(self, name: str, data: bytes, mode: int = 0o666) -> None:
        """Write `data` as the whole of `name`, which has its old bytes or the new ones whatever happens."""
        with self.replacing(name, mode) as file:
            write_all(file, data)

    def probe(self) -> None:
        """Raise OSError unless a file of a few KB can be written."""
        name = f".probe-{uuid.uuid4().hex[:12]}"
        with open(self.open_at(name, os.O_WRONLY | _NEW), "wb", buffering=0) as file:
            try:
                write_all(file, bytes(4096))
            finally:
                os.unlink(name, dir_fd=self.descriptor)

    def shared(self, name: str) -> int:
        """A descriptor of `name`, to read and to write, made where it is not there: of a lock. It has no second name."""
        descriptor = self.open_regular(name, os.O_RDWR | os.O_CREAT)
        if os.fstat(descriptor).st_nlink > 1:
            os.close(descriptor)
            raise StrangeFile(
                f"{self.path / name}: has a second name (a hard link); nothing is written to such a"
                " file"
            )
        return descriptor

    def rename(self, old: str, new: str) -> None:
        """Give `old` the name `new`."""
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def unlink(self, name: str) -> None:
        """Remove the file `name`."""
        os.unlink(name, dir_fd=self.descriptor)

    def remove(self, name: str, ignore_errors: bool = False) -> None:
        """Remove the folder `name` with all that is in it. What a link in it leads to stays."""
        shutil.rmtree(name, ignore_errors, dir_fd=self.descriptor)

    def free(self) -> int:
        """Free bytes of the disk."""
        return shutil.disk_usage(self.descriptor).free

    def sync(self) -> None:
        """Bring the names in the folder to disk."""
        sync(self.descriptor)

    def sync_file(self, name: str) -> None:
        """Bring the bytes of the file `name` to disk, whoever wrote them; nothing where it is not there."""
        if self.kind(name):
            with self.open(name) as file:
                sync(file.fileno())


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all of `data` to an unbuffered file, which may take less at once. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def sync(descriptor: int) -> None:
    """Bring the bytes of a file, or the names in a folder, to disk. Raises OSError."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder and say so with EINVAL; their renames are durable by themselves.
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
