"""Folder descriptor: a folder that stays the same one where it is renamed, and what is in it, opened through no link.

Whoever made a run folder is not trusted: a link in it could lead a writer to any file of the reader. Paths are walked by openat,
one part after the other, and a pipe is not waited for. A descriptor also stays with its folder where that is renamed, and makes
nothing where that was deleted. Needs openat and its kin, which Linux and macOS have.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Self

from fp8cfg.config.errors import Fp8cfgError

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
