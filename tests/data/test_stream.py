"""Streams: the windows of the row of all documents, whatever asks for them, and again from a cursor."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8cfg.data import DataError, corpus
from fp8cfg.data.stream import Shards, Stream, StreamBatches
from fp8cfg.data.tokenizer import BYTES

TEXTS = [
    ["one", "", "a longer document, of several windows", "x"],
    ["second shard"],
    ["", "the third has two", "rows"],
]


def write(folder: Path, texts: Sequence[Sequence[str]] = TEXTS) -> Path:
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(texts):
        lines = "\n".join(json.dumps({"text": text}) for text in rows) + "\n\n"
        file = folder / f"{number:03d}.jsonl{'.gz' if number % 2 else ''}"
        file.write_bytes(gzip.compress(lines.encode()) if number % 2 else lines.encode())
    return folder


def stream(
    folder: Path, length: int = 8, held: int = 4, kind: str = "jsonl", **marks: int
) -> Stream:
    return Stream(Shards.found(kind, str(folder), "text"), BYTES, length, held, **marks)


def row(texts: Sequence[Sequence[str]], count: int) -> list[int]:
    """So many tokens of all documents, one epoch after the other, by hand."""
    epoch = [token for shard in texts for text in shard if text for token in [*text.encode(), 256]]
    return (epoch * (count // len(epoch) + 1))[:count]


def windows(of: Stream, count: int, first: int = 0) -> list[list[int]]:
    tokens, targets = of.read(np.arange(first, first + count))[:2]
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    return [[*begin, end[-1]] for begin, end in zip(tokens.tolist(), targets.tolist(), strict=True)]


@pytest.mark.parametrize("at_once", [1 << 22, 10])
def test_samples_are_windows_of_all_documents_in_the_order_of_shards(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_BYTES_AT_ONCE", at_once)
    want = row(TEXTS, 8 * 40 + 1)
    assert windows(stream(write(tmp_path / "s")), 40) == [
        want[8 * n : 8 * n + 9] for n in range(40)
    ]


def test_a_sample_is_found_again_from_its_cursor(tmp_path: Path) -> None:
    whole, want = stream(write(tmp_path / "s")), windows(stream(tmp_path / "s"), 40)
    seen = set()
    for number in range(0, 36, 3):
        cursor = whole.cursor(number)
        seen.add(cursor[:3])
        again = stream(tmp_path / "s")
        again.restart(number, cursor)
        assert (
            windows(again, 4, number) == want[number : number + 4]
            and again.cursor(number) == cursor
        )
    assert (
        len({epoch for epoch, *_ in seen}) > 2
        and len({place for place in seen if place[0] == 0}) > 3
    )


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.lists(st.text(max_size=30), max_size=6), min_size=1, max_size=4),
    length=st.integers(1, 20),
    number=st.integers(0, 30),
)
def test_any_stream_resumes_anywhere(
    texts: list[list[str]], length: int, number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write(tmp_path_factory.mktemp("any"), texts)
    if not any(text for shard in texts for text in shard):
        with pytest.raises(DataError, match="empty, there is no text in it"):
            stream(folder).read(np.arange(1))
        return
    texts = [[text.encode("utf-8", "replace").decode() for text in shard] for shard in texts]
    want = row(texts, length * (number + 3) + 1)
    again = stream(folder, length)
    again.restart(number, stream(folder, length).cursor(number))
    assert windows(again, 3, number) == [
        want[length * n : length * n + length + 1] for n in range(number, number + 3)
    ]


def test_batches_do_not_depend_on_how_they_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "s")
    whole = StreamBatches(stream(tmp_path / "s"), 1, 4)
    for step in range(5):
        tokens = whole.batch(step)[0].tolist()
        for ranks, micro in ((1, 2), (2, 1), (2, 2), (4, 1)):
            parts = [StreamBatches(stream(tmp_path / "s"), 1, 4) for _ in range(ranks)]
            cut = [
                part.batch(step, rank, ranks, m, micro)[0]
                for rank, part in enumerate(parts)
                for m in range(micro)
            ]
            assert [row for part in cut for row in part.tolist()] == tokens
    assert whole.batch(1)[0].tolist() == [w[:-1] for w in windows(stream(tmp_path / "s"), 4, 4)], (
        "asked for again, it is read again"
    )
    resumed = StreamBatches(stream(tmp_path / "s"), 1, 4)
    assert resumed.resume(json.loads(json.dumps(whole.state(3)))) == 3
    assert resumed.batch(3)[0].tolist() == whole.batch(3)[0].tolist() and resumed.state(
        5
    ) == whole.state(5)
    with pytest.raises(
        DataError, match="sample 8 is before the place 12 from which the stream was resumed"
    ):
        resumed.batch(2)


def test_a_few_steps_are_all_that_is_held(tmp_path: Path) -> None:
    held = stream(write(tmp_path / "s"))
    for first, last in pairwise(range(0, 80, 4)):
        held.read(np.arange(first, last))
        assert len(held._windows) == min(last, 5 * 4)
        held.cursor(last)
        assert len(held._windows) == min(last, 5 * 4), "a checkpoint reads nothing"


def test_documents_are_told_apart_and_masked(tmp_path: Path) -> None:
    tokens, targets, documents = stream(write(tmp_path / "s"), 40, eod=256, end=256).read(
        np.arange(2)
    )
    assert ((targets == -100) == (tokens == 256)).all() and documents.dtype == np.int32
    assert (np.diff(documents, axis=1) == (tokens == 256)[:, :-1]).all()


def test_rows_after_the_cursor_may_be_mended_and_those_before_not(tmp_path: Path) -> None:
    write(tmp_path / "s")
    state = StreamBatches(stream(tmp_path / "s"), 1, 2).state(1)
    assert state["stream"]["shard"] == 0 and state["stream"]["row"] == 2
    write(tmp_path / "s", [[*TEXTS[0][:3], "mended"], *TEXTS[1:], ["a shard more"]])
    assert StreamBatches(stream(tmp_path / "s"), 1, 2).resume(state) == 1
    for changed in (
        [TEXTS[0][1:], *TEXTS[1:]],
        [["one", "", "another"], *TEXTS[1:]],
        [["one"], *TEXTS[1:]],
    ):
        with pytest.raises(
            DataError,
            match=r"cannot resume: row 2 of .*000.jsonl has changed since the checkpoint",
        ):
            StreamBatches(stream(write(tmp_path / "s", changed)), 1, 2).resume(state)
    for wrong, says in (
        ({"stream": None}, "has no place in a stream"),
        ({"stream": state["stream"] | {"shard": 7}}, "shard=7 of the checkpoint is not one"),
        ({"seq_length": 16}, "seq_length is 8, the checkpoint has 16"),
    ):
        with pytest.raises(DataError, match=says):
            StreamBatches(stream(tmp_path / "s"), 1, 2).resume(state | wrong)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r"000.jsonl:2: not JSON"),
        ('{"texts": "x"}', r"000.jsonl:2: has no 'text'; did you mean 'texts'"),
        ('{"text": 3}', r"000.jsonl:2: 'text' is int, not text"),
    ],
)
def test_a_row_without_text_is_skipped_unless_it_is_the_first(
    tmp_path: Path, line: str, says: str
) -> None:
    fine = [json.dumps({"text": text}) for text in ("fine for a while", "and a text after it")]
    (tmp_path / "000.jsonl").write_text("\n".join([fine[0], line, fine[1]]))
    (tmp_path / "want.jsonl").write_text("\n".join(fine))
    read, want = stream(tmp_path / "000.jsonl"), stream(tmp_path / "want.jsonl", held=1)
    assert (read.skipped_rows, read.last_skipped) == (0, "")
    assert windows(read, 4) == windows(want, 4)
    assert read.skipped_rows == 1
    assert re.search(says, read.last_skipped) and "\n" not in read.last_skipped
    windows(read, 1, 40)  # the first windows are no longer in memory then
    windows(read, 1)
    assert read.skipped_rows == 1
    resumed = stream(tmp_path / "000.jsonl")
    resumed.restart(3, read.cursor(3))
    assert windows(resumed, 1, 3) == windows(want, 1, 3)
    (tmp_path / "000.jsonl").write_text("\n".join([line, *fine]))
    with pytest.raises(DataError, match=says.replace(":2", ":1")) as caught:
        stream(tmp_path / "000.jsonl").read(np.arange(1))
    assert "\n" not in str(caught.value)


def test_what_is_no_shard_is_refused(tmp_path: Path) -> None:
    for kind, says in (
        ("jsonl", "no .jsonl file below this folder"),
        ("text", "data source 'text' cannot be streamed; use one of jsonl, csv, parquet"),
    ):
        with pytest.raises(DataError, match=says):
            stream(tmp_path, kind=kind)
    write(tmp_path / "s")
    assert [path.name for path in Shards.found("jsonl", f"{tmp_path}/s/00[12]*", "text").paths] == [
        "001.jsonl.gz",
        "002.jsonl",
    ]
    (tmp_path / "s" / "000.jsonl").rename(tmp_path / "moved.jsonl")
    one = Shards.found("jsonl", str(tmp_path / "moved.jsonl"), "text")
    assert (
        one.sha256
        == Shards("jsonl", "", "text", (Path(write(tmp_path / "again")) / "000.jsonl",)).sha256
        != Shards.found("jsonl", str(tmp_path / "s"), "text").sha256
    )


def test_parquet_shards_are_read_from_any_row(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "jsonl")
    (tmp_path / "parquet").mkdir()
    for number, rows in enumerate(TEXTS):
        table = pa.table({"n": list(range(len(rows))), "text": rows})
        parquet.write_table(table, tmp_path / "parquet" / f"{number}.parquet", row_group_size=2)
    want, read = (
        windows(stream(tmp_path / "jsonl"), 30),
        stream(tmp_path / "parquet", kind="parquet"),
    )
    assert windows(read, 30) == want
    for number in range(0, 30, 5):
        again = stream(tmp_path / "parquet", kind="parquet")
        again.restart(number, stream(tmp_path / "parquet", kind="parquet").cursor(number))
        assert windows(again, 1, number) == [want[number]]
    parquet.write_table(pa.table({"body": ["x"]}), tmp_path / "0.parquet")
    with pytest.raises(DataError, match=r"0.parquet, row 0: has no 'text'; it has 'body'"):
        stream(tmp_path / "0.parquet", kind="parquet").read(np.arange(1))
    parquet.write_table(pa.table({"text": ["x", None]}), tmp_path / "0.parquet")
    read = stream(tmp_path / "0.parquet", kind="parquet")
    read.read(np.arange(1))
    assert read.last_skipped.endswith("0.parquet, row 1: 'text' is NoneType, not text")


def test_csv_shards_are_read_from_any_row(tmp_path: Path) -> None:
    write(tmp_path / "jsonl")
    (tmp_path / "csv").mkdir()
    for number, rows in enumerate(TEXTS):
        lines = ["n,text", *(f'{n},"{text}"' for n, text in enumerate(rows)), "a row of one cell"]
        (tmp_path / "csv" / f"{number}.csv").write_text("\n".join(lines))
    want = windows(stream(tmp_path / "jsonl"), 30)
    read = stream(tmp_path / "csv", kind="csv")
    assert windows(read, 30) == want
    assert read.last_skipped.endswith(": doesn't have the 2 cells of the header")
    whole = stream(tmp_path / "csv", kind="csv")
    for number in range(0, 28, 4):
        again = stream(tmp_path / "csv", kind="csv")
        again.restart(number, whole.cursor(number))
        assert windows(again, 1, number) == [want[number]]
