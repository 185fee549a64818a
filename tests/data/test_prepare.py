from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fp8cfg.data import DataError, load_corpus, split
from fp8cfg.data.corpus import prepare
from fp8cfg.data.indexed import read_indexed
from fp8cfg.data.tokenizer import BYTES, load_tokenizer
from tests.support.tiny_tokenizer import write_tokenizer


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": f"document {n}: " + "word " * n}) for n in range(50))
    )
    return str(path)


@pytest.mark.parametrize("tokenized", [False, True])
def test_token_files_are_the_corpus_of_the_source_and_are_cut_alike(
    tokenized: bool, source: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "t"))) if tokenized else BYTES
    made = prepare(tmp_path / "deep" / "out.bin", "jsonl", source, "text", tokenizer)
    corpus, files = (
        load_corpus("jsonl", source, 400, tokenizer=tokenizer),
        load_corpus("tokens", made.path, 400, tokenizer=tokenizer),
    )
    assert files.sha256 == corpus.sha256 and files.documents.tolist() == corpus.documents.tolist()
    assert (made.tokens, made.documents) == (len(corpus.tokens), 50)
    assert [p.sha256 for p in split(files, 0.1, 16)] == [p.sha256 for p in split(corpus, 0.1, 16)]
    index = read_indexed(made.path)
    assert all(index.sequence(n).tolist()[-1] == tokenizer.eos for n in range(50))


def test_a_wide_vocabulary_is_written_as_int32(source: str, tmp_path: Path) -> None:
    class Wide:
        size, eos = 70_000, 69_999
        encode = staticmethod(BYTES.encode)

    made = prepare(tmp_path / "out", "jsonl", source, "text", Wide())
    assert (
        read_indexed(made.path).tokens.dtype == np.int32
        and load_corpus("jsonl", source, tokenizer=Wide()).tokens.dtype == np.int32
    )


def test_what_is_there_is_not_written_over(source: str, tmp_path: Path) -> None:
    prepare(tmp_path / "out", "jsonl", source, "text", BYTES)
    with pytest.raises(DataError, match=r"out.idx: exists already"):
        prepare(tmp_path / "out.idx", "jsonl", source, "text", BYTES)


def test_a_file_of_something_else_is_not_written_over(source: str, tmp_path: Path) -> None:
    weights = tmp_path / "pytorch_model.bin"
    weights.write_text("weights")
    with pytest.raises(DataError, match=r"pytorch_model.bin: exists already"):
        prepare(tmp_path / "pytorch_model", "jsonl", source, "text", BYTES)
    assert weights.read_text() == "weights"


def test_two_processes_do_not_write_the_same_files(source: str, tmp_path: Path) -> None:
    class Meanwhile:
        """A tokenizer during whose work another process begins."""

        size, eos = 257, 256
        is_first = True

        def encode(self, texts: list[bytes]) -> list[np.ndarray]:
            if self.is_first:
                self.is_first = False
                with pytest.raises(
                    DataError, match=r"out.bin.tmp: exists already; another process"
                ):
                    prepare(tmp_path / "out", "tiny", None, "text", BYTES)
            return BYTES.encode(texts)

    made = prepare(tmp_path / "out", "jsonl", source, "text", Meanwhile())
    assert read_indexed(made.path).tokens.tolist() == load_corpus("jsonl", source).tokens.tolist()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "out.bin", "out.idx"]


def test_an_empty_source_is_refused_as_in_a_run(tmp_path: Path) -> None:
    source = tmp_path / "empty.jsonl"
    source.write_text('{"text": ""}\n')
    for refused in (
        lambda: prepare(tmp_path / "out", "jsonl", str(source), "text", BYTES),
        lambda: load_corpus("jsonl", str(source)),
    ):
        with pytest.raises(DataError, match=r"^'text' of .*empty.jsonl: empty, there is no text"):
            refused()
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError])
def test_what_is_interrupted_leaves_nothing(
    error: type[BaseException], source: str, tmp_path: Path
) -> None:
    class Stops:
        size, eos = 257, 256

        def encode(self, texts: list[bytes]) -> list[np.ndarray]:
            return [self.one(n, text) for n, text in enumerate(texts)]

        def one(self, n: int, text: bytes) -> np.ndarray:
            if n == 30:
                raise error
            return BYTES.encode([text])[0]

    with pytest.raises(error):
        prepare(tmp_path / "new" / "out", "jsonl", source, "text", Stops())
    assert list((tmp_path / "new").iterdir()) == []


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    for name in ("tokens", "chat"):
        with pytest.raises(
            DataError,
            match=f"data source '{name}' has no documents of text; use text, jsonl, csv, parquet or dataset",
        ):
            prepare(tmp_path / "out", name, "x", "text", BYTES)
    assert list(tmp_path.iterdir()) == []


def test_the_cut_goes_to_a_document(source: str) -> None:
    corpus = load_corpus("jsonl", source)
    train, held_out = split(corpus, 0.1, 16)
    assert (
        len(train.tokens) in corpus.documents.tolist()
        and held_out.tokens[:10].astype("u1").tobytes() == b"document 4"
    )
    assert abs(len(held_out.tokens) / len(corpus.tokens) - 0.1) < 0.02
    whole = load_corpus("tiny")
    long = split(
        whole.__class__("one", whole.tokens, 272, "", "", np.array([0, len(whole.tokens) - 40])),
        0.1,
        16,
    )
    assert len(long[1].tokens) == round(len(whole.tokens) * 0.1), (
        "where no document begins nearby, a document is cut"
    )
