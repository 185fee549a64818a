from __future__ import annotations

import re
import runpy
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8cfg.data import BYTE_VOCAB, EOS, Corpus, DataError, load_corpus, split
from fp8cfg.data import corpus as corpus_module
from fp8cfg.data.corpus import fingerprint, from_documents

ROOT = Path(__file__).resolve().parents[2]


def of_length(length: int) -> Corpus:
    return Corpus("made", np.arange(length), length + 1, "", "made here")


def test_documents_are_joined_with_the_end_token() -> None:
    corpus = from_documents("two", [b"ab", b"\xff"], "two documents")
    assert corpus.tokens.tolist() == [97, 98, EOS, 255, EOS] and corpus.tokens.dtype == np.uint16
    assert corpus.vocab_size == BYTE_VOCAB == 272 and EOS < BYTE_VOCAB and BYTE_VOCAB % 16 == 0
    with pytest.raises(ValueError, match="read-only"):
        corpus.tokens[0] = 1
    with pytest.raises(DataError, match="no text"):
        from_documents("none", [b""], "")


def test_the_fingerprint_tells_corpora_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    base = np.arange(1000, dtype=np.uint16)
    changed = [
        np.append(base, base[:1]),
        base[:-1],
        base.astype(np.int32),
        base[::-1],
        np.where(base == 999, 0, base),
        base.view(np.int16),
    ]
    prints = {fingerprint(tokens) for tokens in [base, *changed]}
    assert len(prints) == 7 and fingerprint(base.astype(">u2").astype("<u2")) in prints
    # Blocks: the first and the last token of a corpus are always among those that are read.
    monkeypatch.setattr(corpus_module, "_BLOCK", 8)
    monkeypatch.setattr(corpus_module, "_BLOCKS", 4)
    for at in (0, 999):
        other = base.copy()
        other[at] = 12_345
        assert fingerprint(other) != fingerprint(base)


def test_a_split_is_one_cut_and_loses_nothing() -> None:
    train, validation = split(of_length(1000), 0.05, 16)
    assert len(validation.tokens) == 50
    assert np.concatenate([train.tokens, validation.tokens]).tolist() == list(range(1000))
    assert train.sha256 == fingerprint(train.tokens) != validation.sha256
    assert "validation part, tokens 950 to 1000" in validation.description


@settings(deadline=None)
@given(length=st.integers(1, 5000), seq_length=st.integers(1, 600), fraction=st.floats(0, 1))
def test_a_split_gives_a_window_to_both_or_names_the_cure(
    length: int, seq_length: int, fraction: float
) -> None:
    corpus = of_length(length)
    try:
        parts = split(corpus, fraction, seq_length)
    except DataError as error:
        if cure := re.search(r"use data\.validation_fraction=(\S+) or", str(error)):
            fraction, old = float(cure[1]), fraction
            assert fraction < 0.5 or old >= 0.5, "what a recipe takes"
        elif cure := re.search(
            r"model\.seq_length=(\d+) or less(?: with data\.validation_fraction=(\S+)|$)",
            str(error),
        ):
            seq_length, fraction = int(cure[1]), float(cure[2] or fraction)
            assert seq_length >= 2, "what a recipe takes"
        else:
            assert not 0 < fraction < 1 or length < 7
            return
        parts = split(corpus, fraction, seq_length)
    assert all(len(part.tokens) >= seq_length + 1 for part in parts)


@pytest.mark.parametrize(
    ("length", "fraction", "cure"),
    [
        (4, 0.05, "use more text"),
        (
            28,
            0.05,
            "use more text, or model.seq_length=10 or less with data.validation_fraction=0.4",
        ),
        (130, 0.05, "use more text or model.seq_length=5 or less"),
        (60, 0.1, "use more text or model.seq_length=5 or less"),
    ],
)
def test_too_few_tokens_are_told_what_will_do(length: int, fraction: float, cure: str) -> None:
    with pytest.raises(DataError, match=rf"windows of 65: {re.escape(cure)}$"):
        split(of_length(length), fraction, 64)


def test_a_part_of_exactly_one_window_is_enough() -> None:
    for fraction, sizes in ((0.1, [90, 10]), (0.9, [10, 90])):
        assert [len(part.tokens) for part in split(of_length(100), fraction, 9)] == sizes
    with pytest.raises(
        DataError,
        match=r"validation part has 9 tokens.* use data\.validation_fraction=0\.1 or more",
    ):
        split(of_length(100), 0.09, 9)
    with pytest.raises(
        DataError, match=r"training part has 9 tokens.* use data\.validation_fraction=0\.9 or less"
    ):
        split(of_length(100), 0.91, 9)
    # The cure is rounded to the side that works: here the sixth digit is worth three tokens.
    for fraction, cure in ((0.1, 0.333334), (0.9, 0.666666)):
        with pytest.raises(DataError, match=rf"use data\.validation_fraction={cure} or"):
            split(of_length(3_000_000), fraction, 1_000_000)
        split(of_length(3_000_000), cure, 1_000_000)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(DataError, match="between 0 and 1"):
        split(of_length(1000), fraction, 8)


def test_the_shipped_corpus_is_what_its_generator_writes() -> None:
    generated = runpy.run_path(str(ROOT / "tools" / "make_corpus.py"))["make"]()
    assert (ROOT / "fp8cfg" / "data" / "tiny.txt").read_bytes() == generated


def test_the_shipped_corpus_has_something_to_learn() -> None:
    corpus = load_corpus("tiny")
    text = bytes(corpus.tokens[corpus.tokens < EOS].astype(np.uint8))
    assert 150_000 < len(text) < 300_000 and text.isascii()
    assert 500 < np.count_nonzero(corpus.tokens == EOS) < 5_000 and b"\n\n\n" not in text
    letters = np.bincount(np.frombuffer(text, np.uint8)) / len(text)
    nats = -(letters[letters > 0] * np.log(letters[letters > 0])).sum()
    # Letters alone leave about 3 nats a byte; what stands before them explains most of it, yet no line is the whole.
    assert nats > 2.5 and 0.10 < len(zlib.compress(text, 9)) / len(text) < 0.25


def test_the_sums_of_the_shipped_corpus_are_right() -> None:
    text = bytes(load_corpus("tiny").tokens.astype(np.uint8)).decode()
    sums = re.findall(r"^(\d+) ([+x-]) (\d+) = (\d+)$", text, re.MULTILINE)
    does = {"+": int.__add__, "x": int.__mul__, "-": int.__sub__}
    assert len(sums) > 200 and all(does[sign](int(a), int(b)) == int(c) for a, sign, b, c in sums)
    rows = re.findall(r"^turn: (.*) -> (.*)$", text, re.MULTILINE)
    assert len(rows) > 100 and all(row[::-1] == turned for row, turned in rows)


def test_nothing_heavy_is_imported_for_data() -> None:
    code = "import sys, fp8cfg.data; print([m for m in ('torch', 'hydra', 'fiddle', 'pydantic') if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
