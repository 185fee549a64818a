"""Folder file system: the files of a folder for torch.distributed.checkpoint, below the folder's descriptor, summed as they are
written.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase

from fp8cfg.training.checkpoint.failpoint import failpoint
from fp8cfg.training.checkpoint.manifest import FileEntry
from fp8cfg.training.run_files import RunFiles

CHUNK = 64 << 20
Name = str | os.PathLike[str]


class SummedFile(io.FileIO):
    """A file that is written from its beginning to its end, and knows its length and sha256."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb")
        self._digest, self._size = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Write all of `data`, bytes. Raises OSError."""
        whole = memoryview(data).cast("B")
        for start in range(0, len(whole), CHUNK):
            part = left = whole[start : start + CHUNK]
            while left:  # an unbuffered file may take less at once
                left = left[super().write(left) :]
            self._digest.update(part)
            self._size += len(part)
        return len(whole)

    def entry(self) -> FileEntry:
        """What a manifest says of the file, also once it is closed."""
        return FileEntry(self._size, self._digest.hexdigest())


class FolderFileSystem(FileSystemBase):
    """The files of a folder for torch.distributed.checkpoint, by names, below the folder's descriptor. `written` has those that
    were written through here."""

    def __init__(self, folder: RunFiles) -> None:
        self.folder = folder
        self.written: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: Name, mode: str) -> Generator[io.IOBase, None, None]:
        """The file `path`, which is not there yet, to write; torch's writer brings it to disk."""
        name = os.fspath(path)
        with SummedFile(self.folder.open_at(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)) as file:
            yield file
        self.written[name] = file.entry()
        failpoint("shard")

    def concat_path(self, path: Name, suffix: str) -> Name:
        """The name of a file: a folder's own path is not in it."""
        return suffix

    def init_path(self, path: Name) -> Name:
        """The path as it is given."""
        return path

    def rename(self, path: Name, new_path: Name) -> None:
        """Give a file another name."""
        self.folder.rename(os.fspath(path), os.fspath(new_path))

    def mkdir(self, path: Name) -> None:
        """Nothing: the folder is there."""

    def exists(self, path: Name) -> bool:
        """Whether there is a file of that name."""
        return os.fspath(path) in self.folder.names()

    def rm_file(self, path: Name) -> None:
        """Remove a file."""
        os.unlink(path, dir_fd=self.folder.descriptor)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Name) -> bool:
        """False: a path is no descriptor."""
        return False
