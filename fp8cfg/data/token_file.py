"""Token ids in a file that are read as needed.

The file is not memory-mapped. If another process truncates a mapped file, an access ends the run
with SIGBUS, and no earlier check of the size can prevent it. A short read only raises DataError.
"""

from __future__ import annotations

import os
import stat
import weakref
from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np

from fp8cfg.data.files import DataError


class _DescriptorOwner:
    """Owner of a file descriptor. All slices of a file share it, and the last one closes it."""

    def __init__(self, descriptor: int) -> None:
        weakref.finalize(self, os.close, descriptor)


class TokenFile:
    """Token ids in a file, used like an array [n].

    Slices return a TokenFile and read nothing. Arrays of indices read these tokens.
    """

    def __init__(
        self, path: Path, dtype: np.dtype, descriptor: int, start: int, stop: int, owner: object
    ) -> None:
        """Creates a view of a file.

        Args:
            path: Path for errors.
            dtype: Type of the ids.
            descriptor: Open file.
            start: First token of the view.
            stop: End of the view.
            owner: Owner of the descriptor. It lives as long as this view.
        """
        self.path = path
        self.dtype = dtype
        self._descriptor = descriptor
        self._start = start
        self._stop = stop
        self._owner = owner

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Opens a file as bytes (uint8).

        Raises:
            DataError: The file cannot be read, is empty, or is not a regular file.
        """
        try:
            # O_NONBLOCK: opening a pipe would wait for its writer.
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        owner = _DescriptorOwner(descriptor)  # closes it after an error below, too
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: not a regular file")
        if status.st_size == 0:
            raise DataError(f"{path}: the file is empty")
        return cls(path, np.dtype("<u1"), descriptor, 0, status.st_size, owner)

    def view(self, dtype: np.dtype) -> TokenFile:
        """Returns the whole file as tokens of `dtype`. Not for slices."""
        num_tokens = len(self) // dtype.itemsize
        return TokenFile(self.path, dtype, self._descriptor, 0, num_tokens, self._owner)

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: slice) -> TokenFile: ...

    @overload
    def __getitem__(self, index: np.ndarray | int) -> np.ndarray: ...

    def __getitem__(self, index: slice | np.ndarray | int) -> TokenFile | np.ndarray:
        """Returns a view for a slice, or the tokens at the indices.

        Args:
            index: A slice with step 1, or integers in [0, n) of any shape.

        Raises:
            DataError: The file cannot be read, or was truncated.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError("a token file supports slices with step 1 only")
            start, stop = self._start + start, self._start + max(start, stop)
            return TokenFile(self.path, self.dtype, self._descriptor, start, stop, self._owner)
        positions = np.asarray(index)
        flat = positions.reshape(-1)
        if flat.size and (flat.min() < 0 or flat.max() >= len(self)):
            raise IndexError(f"tokens {flat.min()} to {flat.max()} of {len(self)}")
        tokens = np.empty(flat.size, dtype=self.dtype)
        # Consecutive indices become one read. A batch of windows has one run per window.
        run_starts = (np.flatnonzero(np.diff(flat) != 1) + 1).tolist()
        for start, stop in pairwise([0, *run_starts, flat.size]):
            if start < stop:
                tokens[start:stop] = self._read(int(flat[start]), stop - start)
        return tokens.reshape(positions.shape)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Reads all tokens into memory, for np.asarray."""
        return self._read(0, len(self)).astype(dtype or self.dtype, copy=False)

    def astype(self, dtype: np.dtype, copy: bool = True) -> np.ndarray:
        """Reads all tokens as an array of `dtype`. See numpy.ndarray.astype."""
        return np.asarray(self).astype(dtype, copy=copy)

    def tolist(self) -> list[int]:
        """Reads all tokens as Python integers."""
        return [int(token) for token in np.asarray(self)]

    def _read(self, first: int, count: int) -> np.ndarray:
        """Reads `count` consecutive tokens."""
        size = count * self.dtype.itemsize
        offset = (self._start + first) * self.dtype.itemsize
        data = bytearray()
        while len(data) < size:
            # pread has no shared position, so threads can use it. Linux reads up to 2 GiB at once.
            try:
                piece = os.pread(
                    self._descriptor, min(size - len(data), 1 << 30), offset + len(data)
                )
            except OSError as error:
                raise DataError(f"{self.path}: cannot be read ({error.strerror})") from error
            if not piece:
                file_size = os.fstat(self._descriptor).st_size
                raise DataError(
                    f"{self.path}: has {file_size} bytes now, less than {offset + size}; it was"
                    " truncated during the run"
                )
            data += piece
        return np.frombuffer(data, dtype=self.dtype)


Tokens = np.ndarray | TokenFile
"""Token ids [n], in memory or in a file."""
