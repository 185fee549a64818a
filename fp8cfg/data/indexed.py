"""Reader and writer of Megatron's token files: ids in `name.bin`, their index in `name.idx`.

    idx: "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype code | u64 sequences n | u64 document entries d
         | i32 lengths [n] | i64 byte pointers [n] | i64 document indices [d]
         | i8 modes [n], multimodal only
    bin: tokens of all sequences in order. All numbers are little-endian.

Source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py`. The files may be damaged or
malicious, so each number is checked against the file sizes before use.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp8cfg.data.files import DataError, require
from fp8cfg.data.token_file import TokenFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)  # codes for float64 and float32: valid in Megatron, but not for tokens


@dataclass(frozen=True, eq=False)
class Indexed:
    """A checked pair of files.

    Attributes:
        path: Prefix of the files.
        tokens: All tokens of the .bin file. They are read as needed.
        starts: First token of each sequence, int64 [n].
        lengths: Tokens per sequence, int32 [n].
        documents: Document k has the sequences documents[k] to documents[k + 1], int64 [d].
    """

    path: Path
    tokens: TokenFile
    starts: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray

    def sequence(self, index: int) -> TokenFile:
        """Returns the tokens of one sequence, without reading them."""
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])]

    def stream(self) -> TokenFile:
        """Returns the tokens of all sequences in order.

        Raises:
            DataError: The sequences are not contiguous in the file.
        """
        # The format allows gaps and overlaps between sequences.
        gaps = self.starts[1:] != self.starts[:-1] + self.lengths[:-1]
        if gaps.any():
            raise DataError(
                f"{self.path}.idx: sequence {int(gaps.argmax()) + 1} does not begin where the one"
                " before it ends, so the tokens are no single stream; write the files again with"
                " Megatron's builder"
            )
        return self.tokens[int(self.starts[0]) : int(self.starts[-1]) + int(self.lengths[-1])]


def read_indexed(path: str | os.PathLike[str]) -> Indexed:
    """Opens and checks a pair of token files.

    The whole index is checked. Token ids are checked later, as batches are read.

    Args:
        path: Prefix of the files, or the path of one of them.

    Raises:
        DataError: A file is missing or damaged, or the files do not belong together.
    """
    prefix = required_prefix(path)
    file = f"{prefix}.idx"
    table, raw = (TokenFile.open(Path(f"{prefix}{ending}")) for ending in (".idx", ".bin"))
    dtype, sequences, entries = _header(table)
    idx = np.asarray(table)  # the whole index: the header matches the size of the file
    lengths, pointers, documents = _tables(idx, sequences, entries)
    _check_sequences(file, lengths, pointers, dtype.itemsize, len(raw))
    _check_documents(file, documents, sequences)
    if len(raw) % dtype.itemsize:
        raise DataError(
            f"{prefix}.bin: {len(raw)} bytes are no whole number of {dtype.name} tokens; it was cut"
            " short"
        )
    return Indexed(prefix, raw.view(dtype), pointers // dtype.itemsize, lengths, documents)


def prefix_of(path: str | os.PathLike[str]) -> Path:
    """Returns the common prefix of the files. `path` may end in .bin or .idx."""
    text = os.fspath(path)
    return Path(text[:-4] if text.endswith((".bin", ".idx")) else text)


def required_prefix(path: str | os.PathLike[str]) -> Path:
    """Returns the common prefix of the files, which must exist.

    Args:
        path: Prefix of the files, or the path of one of them.

    Raises:
        DataError: A file is missing. The message suggests a similar name.
    """
    prefix = prefix_of(path)
    if os.path.isdir(prefix):
        names = " ".join(sorted(file.stem for file in prefix.glob("*.idx"))) or "none"
        raise DataError(
            f"{prefix}: a folder; add the common name of a .bin/.idx pair in it (there is: {names})"
        )
    for ending in (".idx", ".bin"):
        require(Path(f"{prefix}{ending}"), _pairs_beside(prefix, ending))
    return prefix


def _pairs_beside(prefix: Path, ending: str) -> list[str]:
    """Returns names of other pairs in the folder, for a suggestion."""
    return sorted(
        f"{file.stem}{ending}" for file in prefix.parent.glob("*.idx") if file.stem != prefix.name
    )


def _header(idx: TokenFile) -> tuple[np.dtype, int, int]:
    """Returns dtype, number of sequences and number of document entries. Raises DataError."""
    path = idx.path
    if len(idx) < HEADER.size:
        raise DataError(
            f"{path}: {len(idx)} bytes are less than a header of {HEADER.size}; it was cut short"
        )
    magic, version, code, sequences, entries = HEADER.unpack(
        np.asarray(idx[: HEADER.size]).tobytes()
    )
    if magic != MAGIC:
        raise DataError(
            f"{path}: not a Megatron index (begins with {magic!r} instead of {MAGIC!r})"
        )
    if version != VERSION:
        raise DataError(f"{path}: index version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        problem = "is unknown"
        if code in _FLOATS:
            problem = "means floating point, and tokens are integers"
        raise DataError(f"{path}: dtype code {code} {problem}; known are {sorted(DTYPES)}")
    # Python's integers do not overflow, so a wrong count cannot match the size of the file.
    size = HEADER.size + 12 * sequences + 8 * entries
    if len(idx) not in (size, size + sequences):
        raise DataError(
            f"{path}: {sequences} sequences and {entries} document entries make {size} bytes, the"
            f" file has {len(idx)}"
        )
    if sequences == 0 or entries == 0:
        raise DataError(f"{path}: the index lists no sequence or no document")
    return np.dtype(DTYPES[code]), sequences, entries


def _tables(
    idx: np.ndarray, sequences: int, entries: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns lengths, byte pointers and document indices."""
    start = HEADER.size
    lengths = np.frombuffer(idx, dtype="<i4", count=sequences, offset=start)
    pointers = np.frombuffer(idx, dtype="<i8", count=sequences, offset=start + 4 * sequences)
    documents = np.frombuffer(idx, dtype="<i8", count=entries, offset=start + 12 * sequences)
    return lengths, pointers, documents


def _check_sequences(
    file: str, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, size: int
) -> None:
    """Raises DataError if a sequence is not inside the .bin file of `size` bytes."""
    _refuse(file, lengths < 0, "sequence {} has a negative length")
    _refuse(file, pointers < 0, "sequence {} begins before the .bin")
    _refuse(
        file,
        pointers % itemsize != 0,
        f"sequence {{}} does not begin at a multiple of {itemsize} bytes",
    )
    # pointers + lengths could overflow int64, since both come from the file. This form cannot.
    is_beyond_end = pointers > size - lengths.astype(np.int64) * itemsize
    _refuse(
        file,
        is_beyond_end,
        f"sequence {{}} ends beyond the .bin of {size} bytes; the two files are no pair",
    )


def _check_documents(file: str, documents: np.ndarray, sequences: int) -> None:
    """Raises DataError unless the documents cover all sequences in order."""
    if documents[0] != 0 or documents[-1] != sequences:
        raise DataError(
            f"{file}: documents go from sequence {documents[0]} to {documents[-1]}; it must be 0 to"
            f" {sequences}"
        )
    _refuse(file, documents[1:] < documents[:-1], "document {} ends before it begins")


def _refuse(file: str, is_bad: np.ndarray, problem: str) -> None:
    """Raises DataError with the first index at which `is_bad` is true."""
    if is_bad.any():
        raise DataError(f"{file}: {problem.format(int(is_bad.argmax()))}")


_LONGEST = 2**31 - 1  # a length is an int32


def write_indexed(
    path: str | os.PathLike[str], documents: Iterable[np.ndarray | list[int]], vocab_size: int
) -> Path:
    """Writes documents as token files, one sequence per document.

    Ids are uint16 for a vocabulary below 65500, and int32 otherwise, as in Megatron. The files get
    their names when both are complete.

    Args:
        path: Prefix of the files.
        documents: Token ids of each document. They are read one at a time.
        vocab_size: Upper bound of the ids.

    Returns:
        The prefix.

    Raises:
        DataError: A token is outside the vocabulary, there is no token, or another process writes
            these files.
    """
    prefix = prefix_of(path)
    code = 8 if vocab_size < 65_500 else 4
    waiting = {ending: Path(f"{prefix}{ending}.tmp") for ending in (".bin", ".idx")}
    # Two processes in one file would mix their tokens, and the result would pass all checks.
    try:
        waiting[".bin"].touch(exist_ok=False)
    except FileExistsError:
        raise DataError(
            f"{waiting['.bin']}: exists already; another process writes it, or was killed: wait, or"
            " remove it"
        ) from None
    try:
        lengths = _write_tokens(waiting[".bin"], documents, vocab_size, np.dtype(DTYPES[code]))
        _write_index(waiting[".idx"], lengths, code)
        # The .idx comes last: a reader that finds it also finds the whole .bin.
        for ending, file in waiting.items():
            os.replace(file, f"{prefix}{ending}")
    finally:
        for file in waiting.values():
            file.unlink(missing_ok=True)
    return prefix


def _write_tokens(
    path: Path, documents: Iterable[np.ndarray | list[int]], vocab_size: int, dtype: np.dtype
) -> np.ndarray:
    """Writes the .bin file and returns the length of each document, int64 [n]."""
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
        raise DataError(f"{path.with_suffix('')}: no token to write")
    return np.array(lengths, dtype=np.int64)


def _write_index(path: Path, lengths: np.ndarray, code: int) -> None:
    """Writes the .idx file for documents of these lengths. `code` is the dtype."""
    count = len(lengths)
    ends = np.cumsum(lengths) * np.dtype(DTYPES[code]).itemsize
    pointers = np.concatenate([[0], ends[:-1]])
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(pointers.astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
