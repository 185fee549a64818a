"""Megatron .bin/.idx writer: one sequence per document, as Megatron's `preprocess_data.py` writes by default."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fp8cfg.data.errors import DataError
from fp8cfg.data.indexed import DTYPES, HEADER, MAGIC, VERSION, prefix_of

_LONGEST = 2**31 - 1  # a length is an int32


def write_indexed(
    path: str | os.PathLike[str], documents: Iterable[np.ndarray | list[int]], vocab_size: int
) -> Path:
    """Writes `path`.bin and `path`.idx and returns the prefix; documents are read one at a time.

    Tokens are stored as uint16 for a vocabulary below 65500 and as int32 above, which is Megatron's rule. Both files
    get their names only when complete. DataError for a token outside of the vocabulary, or without any token.
    """
    prefix = prefix_of(path)
    code = 8 if vocab_size < 65_500 else 4
    waiting = {ending: Path(f"{prefix}{ending}.tmp") for ending in (".bin", ".idx")}
    try:
        lengths = _write_tokens(waiting[".bin"], documents, vocab_size, np.dtype(DTYPES[code]))
        _write_index(waiting[".idx"], lengths, code)
        for ending, file in waiting.items():
            os.replace(file, f"{prefix}{ending}")
    finally:
        for file in waiting.values():
            file.unlink(missing_ok=True)
    return prefix


def _write_tokens(
    path: Path, documents: Iterable[np.ndarray | list[int]], vocab_size: int, dtype: np.dtype
) -> np.ndarray:
    lengths = []
    with path.open("wb") as file:
        for number, document in enumerate(documents):
            tokens = np.asarray(document, dtype=np.int64)
            if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
                raise DataError(
                    f"document {number}: tokens from {tokens.min()} to {tokens.max()} do not fit"
                    f" vocab_size={vocab_size}"
                )
            if tokens.size > _LONGEST:
                raise DataError(
                    f"document {number}: {tokens.size} tokens; the format holds {_LONGEST} a"
                    " document"
                )
            file.write(tokens.astype(dtype).tobytes())
            lengths.append(tokens.size)
    if sum(lengths) == 0:
        raise DataError(f"{path}: no token to write")
    return np.array(lengths, dtype=np.int64)


def _write_index(path: Path, lengths: np.ndarray, code: int) -> None:
    count = len(lengths)
    ends = np.cumsum(lengths) * np.dtype(DTYPES[code]).itemsize
    pointers = np.concatenate([[0], ends[:-1]])
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(pointers.astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
