"""A row of tokens in a file, read piece by piece as it is asked for.

It is not mapped: a mapped page of a file that somebody cuts short while a job reads it ends the process with SIGBUS, and no
look at the size before can be soon enough. A read that comes back short is an error of one line.
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


class _Held:
    """An open file, closed with the last row of it."""

    def __init__(self, descriptor: int) -> None:
        weakref.finalize(self, os.close, descriptor)


class TokenFile:
    """A row of tokens in a file, for `len`, for one-step slices, which are rows too and read nothing, and for arrays of indices."""

    def __init__(
        self, path: Path, dtype: np.dtype, descriptor: int, start: int, stop: int, held: object
    ) -> None:
        """Tokens `start` to `stop`; `held` keeps the descriptor open."""
        self.path, self.dtype, self._descriptor, self._start, self._stop, self._held = (
            path,
            dtype,
            descriptor,
            start,
            stop,
            held,
        )

    @classmethod
    def opened(cls, path: Path) -> TokenFile:
        """The bytes of the file `path`. Raises DataError where it cannot be read, is empty or no regular file."""
        try:
            descriptor = os.open(
                path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
            )  # a pipe would be waited for
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        held, found = _Held(descriptor), os.fstat(descriptor)
        wrong = (
            "not a regular file"
            if not stat.S_ISREG(found.st_mode)
            else "the file is empty"
            if not found.st_size
            else ""
        )
        if wrong:
            raise DataError(f"{path}: {wrong}")
        return cls(path, np.dtype("<u1"), descriptor, 0, found.st_size, held)

    def view(self, dtype: np.dtype) -> TokenFile:
        """The bytes of a whole file as tokens of `dtype`."""
        return TokenFile(
            self.path, dtype, self._descriptor, 0, len(self) // dtype.itemsize, self._held
        )

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: slice) -> TokenFile: ...

    @overload
    def __getitem__(self, index: np.ndarray | int) -> np.ndarray: ...

    def __getitem__(self, index: slice | np.ndarray | int) -> TokenFile | np.ndarray:
        """A part of the row for a slice, which reads nothing yet; the tokens at `index`, of any shape, else."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError("a row of tokens is cut only in steps of 1")
            start, stop = self._start + start, self._start + max(start, stop)
            return TokenFile(self.path, self.dtype, self._descriptor, start, stop, self._held)
        positions = np.asarray(index)
        flat = positions.reshape(-1)
        if flat.size and (flat.min() < 0 or flat.max() >= len(self)):
            raise IndexError(f"tokens {flat.min()} to {flat.max()} of {len(self)}")
        found = np.empty(flat.size, dtype=self.dtype)
        runs = [
            0,
            *(np.flatnonzero(np.diff(flat) != 1) + 1).tolist(),
            flat.size,
        ]  # of neighbours, each one read
        for first, last in pairwise(runs):
            if first < last:
                found[first:last] = self._read(int(flat[first]), last - first)
        return found.reshape(positions.shape)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """All of the tokens, read into memory."""
        return self._read(0, len(self)).astype(dtype or self.dtype, copy=False)

    def astype(self, dtype: np.dtype, copy: bool = True) -> np.ndarray:
        """As that of an array."""
        return np.asarray(self).astype(dtype, copy=copy)

    def tolist(self) -> list[int]:
        """As that of an array."""
        return [int(token) for token in np.asarray(self)]

    def _read(self, first: int, count: int) -> np.ndarray:
        size, at, data = (
            count * self.dtype.itemsize,
            (self._start + first) * self.dtype.itemsize,
            bytearray(),
        )
        while len(data) < size:
            try:
                piece = os.pread(self._descriptor, min(size - len(data), 1 << 30), at + len(data))
            except OSError as error:
                raise DataError(f"{self.path}: cannot be read ({error.strerror})") from error
            if not piece:
                now = os.fstat(self._descriptor).st_size
                raise DataError(
                    f"{self.path}: has {now} bytes now, less than {at + size}; it was cut short"
                    " while it was read"
                )
            data += piece
        return np.frombuffer(data, dtype=self.dtype)


Tokens = np.ndarray | TokenFile
"""A row of token ids, in memory or in a file."""
