"""The files of a run folder, all of them opened through here: relative to the folder's descriptor, and never through a link.

A file with a second name (a hard link) could lead a writer to any file of the reader as a link does: nothing is written into a file
that was there before but the lock, and what replaces a file is written under a new random name first.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO

from fp8cfg.training.folder_descriptor import FolderDescriptor, StrangeFile

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

    def remove(self, name: str, ignore_errors: bool = False) -> None:
        """Remove the folder `name` with all that is in it. What a link in it leads to stays."""
        shutil.rmtree(name, ignore_errors, dir_fd=self.descriptor)

    def free(self) -> int:
        """Free bytes of the disk."""
        return shutil.disk_usage(self.descriptor).free

    def sync(self) -> None:
        """Bring the names in the folder to disk."""
        sync(self.descriptor)


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
