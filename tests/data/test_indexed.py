from __future__ import annotations

import os
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8cfg.data import DataError
from fp8cfg.data.indexed import read_indexed, write_indexed

DOCUMENTS = [[1, 2, 3], [], [40_000, 5], [6, 7, 8, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexed")


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write_indexed(tmp_path / "corpus", DOCUMENTS, vocab_size=50_000)


def by_hand(idx: bytes, raw: bytes) -> list[list[int]]:
    """The sequences as a slow reader that checks nothing sees them; any wrong number raises something."""
    _, _, code, n, _ = struct.unpack_from("<9sQBQQ", idx)
    kind = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[code]
    lengths = struct.unpack_from(f"<{n}i", idx, 34)
    pointers = struct.unpack_from(f"<{n}q", idx, 34 + 4 * n)
    return [
        list(struct.unpack_from(f"<{count}{kind}", raw, at))
        for count, at in zip(lengths, pointers, strict=True)
    ]


def sequences(path: Path) -> list[list[int]]:
    indexed = read_indexed(path)
    return [indexed.sequence(i).tolist() for i in range(len(indexed.lengths))]


def test_what_is_written_is_read(pair: Path) -> None:
    indexed = read_indexed(pair)
    assert sequences(pair) == DOCUMENTS
    assert indexed.stream().tolist() == [*chain(*DOCUMENTS)]
    assert indexed.documents.tolist() == [0, 1, 2, 3, 4]
    assert indexed.tokens.dtype == np.uint16
    assert sequences(f"{pair}.idx") == sequences(f"{pair}.bin") == DOCUMENTS


def test_tokens_are_read_as_they_are_asked_for(pair: Path) -> None:
    stream = read_indexed(pair).stream()
    with open(f"{pair}.bin", "r+b") as file:
        file.write(struct.pack("<H", 77))
    assert stream[0] == 77


def test_a_file_that_is_cut_short_while_it_is_read_is_one_line(pair: Path) -> None:
    """Mapped, it was a SIGBUS."""
    stream = read_indexed(pair).stream()
    positions = np.array([[7, 8, 0], [1, 2, 4]])
    assert stream[positions].tolist() == [[8, 9, 1], [2, 3, 5]]
    os.truncate(f"{pair}.bin", 6)
    assert stream[:3].tolist() == [1, 2, 3]
    with pytest.raises(
        DataError,
        match=r"corpus\.bin: has 6 bytes now, less than 18; it was truncated during the run$",
    ):
        stream[positions]


def test_a_row_in_a_file_is_cut_and_indexed_as_an_array(pair: Path) -> None:
    row, whole = read_indexed(pair).stream(), np.array([*chain(*DOCUMENTS)])
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b, c, d = rng.integers(-12, 12, 4).tolist()
        part, same = row[a:b][c:d], whole[a:b][c:d]
        assert len(part) == len(same) and part.tolist() == same.tolist()
        if len(same):
            at = rng.integers(0, len(same), (2, 3))
            assert np.array_equal(part[at], same[at])
    assert row[np.array([], dtype=int)].shape == (0,)
    for index in (slice(0, 9, 2), np.array([9]), np.array([-1])):
        with pytest.raises(IndexError):
            row[index]


def test_the_bytes_are_those_of_megatron(tmp_path: Path) -> None:
    """Written out from the layout of Megatron's indexed_dataset.py, for two documents of uint16."""
    prefix = write_indexed(tmp_path / "m", [[1, 2], [3]], vocab_size=100)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<2i2q3q", 2, 1, 0, 4, 0, 1, 2)
    assert Path(f"{prefix}.idx").read_bytes() == expected
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<3H", 1, 2, 3)


def test_a_large_vocabulary_is_stored_as_int32(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "m", [[70_000]], vocab_size=128_256)
    assert read_indexed(prefix).tokens.dtype == np.int32 and sequences(prefix) == [[70_000]]
    kinds = [
        read_indexed(write_indexed(tmp_path / str(v), [[1]], v)).tokens.dtype
        for v in (65_499, 65_500)
    ]
    assert kinds == [np.uint16, np.int32]


def test_multimodal_modes_are_passed_over(pair: Path) -> None:
    with open(f"{pair}.idx", "ab") as file:
        file.write(bytes(len(DOCUMENTS)))
    assert sequences(pair) == DOCUMENTS


def test_an_index_longer_than_its_counts_is_refused(pair: Path) -> None:
    whole = Path(f"{pair}.idx").read_bytes()
    for extra in (1, len(DOCUMENTS) + 1, 12):
        Path(f"{pair}.idx").write_bytes(whole + bytes(extra))
        with pytest.raises(
            DataError, match=f"make {len(whole)} bytes, the file has {len(whole) + extra}"
        ):
            read_indexed(pair)


def test_sequences_out_of_order_are_no_stream(pair: Path) -> None:
    patch(pair, 34 + 4 * 4, struct.pack("<4q", 8, 0, 0, 10))
    patch(pair, 34, struct.pack("<4i", 4, 0, 4, 4))
    indexed = read_indexed(pair)
    assert indexed.sequence(3).tolist() == [6, 7, 8, 9]
    with pytest.raises(DataError, match="sequence 1 does not begin where the one before it ends"):
        indexed.stream()


def patch(prefix: Path, at: int, data: bytes) -> None:
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(at)
        file.write(data)


HUGE = struct.pack("<Q", 2**64 - 1)
LENGTHS, POINTERS, ENTRIES = 34, 34 + 16, 34 + 48


@pytest.mark.parametrize(
    ("at", "data", "says"),
    [
        (0, b"X", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x09", "dtype code 9 is unknown"),
        (17, b"\x07", "floating point"),
        (18, HUGE, "the file has"),
        (26, HUGE, "the file has"),
        # 12 n wraps to 0 modulo 2**64 here: arithmetic on 64 bits would believe it.
        (18, struct.pack("<QQ", 2**62, 11), "the file has"),
        (LENGTHS, struct.pack("<i", -1), "sequence 0 has a negative length"),
        (LENGTHS + 12, struct.pack("<i", 5), "sequence 3 ends beyond"),
        (LENGTHS, struct.pack("<i", 2**31 - 1), "sequence 0 ends beyond"),
        (POINTERS, struct.pack("<q", -2), "sequence 0 begins before"),
        (POINTERS, struct.pack("<q", 3), "multiple of 2"),
        (POINTERS, struct.pack("<q", 2**63 - 2), "sequence 0 ends beyond"),
        (ENTRIES, struct.pack("<q", 1), "documents go from sequence 1"),
        (ENTRIES + 32, struct.pack("<q", 5), "to 5; it must be 0 to 4"),
        (ENTRIES + 8, struct.pack("<q", 3), "document 1 ends before"),
        (ENTRIES + 8, struct.pack("<q", -(2**63)), "document 0 ends before"),
    ],
)
def test_each_lie_of_an_index_is_named(pair: Path, at: int, data: bytes, says: str) -> None:
    patch(pair, at, data)
    with pytest.raises(DataError, match=says) as caught:
        read_indexed(pair)
    assert "\n" not in str(caught.value) and "corpus.idx" in str(caught.value)


def test_cut_empty_and_absent_files(pair: Path) -> None:
    idx, raw = Path(f"{pair}.idx"), Path(f"{pair}.bin")
    whole = raw.read_bytes()
    raw.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="no whole number of uint16"):
        read_indexed(pair)
    raw.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"sequence 3 ends beyond the \.bin of 16 bytes"):
        read_indexed(pair)
    raw.write_bytes(b"")
    with pytest.raises(DataError, match=r"corpus\.bin: the file is empty"):
        read_indexed(pair)
    raw.write_bytes(whole)
    idx.write_bytes(idx.read_bytes()[:33])
    with pytest.raises(DataError, match="less than a header"):
        read_indexed(pair)
    with pytest.raises(DataError, match=r"no such file.*did you mean .*corpus\.idx"):
        read_indexed(f"{pair}s")
    with pytest.raises(DataError, match=r"a folder; .*there is: corpus"):
        read_indexed(pair.parent)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(pair: Path) -> None:
    os.unlink(f"{pair}.bin")
    os.mkfifo(f"{pair}.bin")
    with pytest.raises(DataError, match="not a regular file"):
        read_indexed(pair)


def test_the_writer_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    for documents, says in (
        ([[1], [100]], "document 1"),
        ([[1], [-1]], "document 1"),
        ([[], []], "no token"),
    ):
        with pytest.raises(DataError, match=says):
            write_indexed(tmp_path / "x", documents, vocab_size=100)
    assert list(tmp_path.iterdir()) == []


def corrupt(data: bytes, draw: st.DataObject) -> bytes:
    """One of: bytes replaced, a header or table word replaced by a telling number, cut, or lengthened."""
    how = draw.draw(st.sampled_from(["bytes", "word", "cut", "grow"]))
    if how == "cut":
        return data[: draw.draw(st.integers(0, len(data)))]
    if how == "grow":
        return data + draw.draw(st.binary(max_size=20))
    size = draw.draw(st.sampled_from([4, 8]))
    word = draw.draw(st.sampled_from([0, 1, 2, -1, -2, 3, 2**31 - 1, -(2**31), 10, 18])).to_bytes(
        size, "little", signed=True
    )
    new = draw.draw(st.binary(min_size=1, max_size=8)) if how == "bytes" else word
    at = draw.draw(st.integers(0, max(0, len(data) - 1)))
    return (data[:at] + new + data[at + len(new) :])[: max(len(data), 1)]


@settings(deadline=None, max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), code=st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_a_corrupt_pair_is_refused_or_read_as_it_stands(
    folder: Path, data: st.DataObject, code: int
) -> None:
    prefix = folder / "fuzz"
    dtype = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    raw = np.arange(sum(lengths)).astype(dtype).tobytes()
    ends = np.cumsum(lengths) * np.dtype(dtype).itemsize
    idx = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(lengths) + 1)
    idx += np.array(lengths, "<i4").tobytes() + np.array([0, *ends[:-1]], "<i8").tobytes()
    idx += np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    for _ in range(data.draw(st.integers(0, 3))):
        if data.draw(st.integers(0, 3)):
            idx = corrupt(idx, data)
        else:
            raw = corrupt(raw, data)
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(raw)
    try:
        indexed = read_indexed(prefix)
        read = [indexed.sequence(i).tolist() for i in range(len(indexed.lengths))]
    except DataError as error:
        assert "\n" not in str(error)
        return
    expected = by_hand(idx, raw)
    assert read == expected
    try:
        assert indexed.stream().tolist() == [*chain(*expected)]
    except DataError as error:
        assert "no single stream" in str(error)
