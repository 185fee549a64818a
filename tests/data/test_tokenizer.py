from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fp8cfg.data import DataError, load_corpus
from fp8cfg.data.tokenizer import BYTES, load_tokenizer, padded_vocabulary
from tests.support.tiny_tokenizer import write_tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), pad_token="<|im_end|>")


@pytest.fixture(scope="module")
def theirs(folder: Path):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def test_ids_are_those_of_transformers(folder: Path, theirs) -> None:
    texts = ["def f(x):\n    return x", "zwölf €, <|im_end|> and more", ""]
    ours = load_tokenizer(str(folder))
    assert [ids.tolist() for ids in ours.encode([t.encode() for t in texts])] == [
        theirs.encode(t, add_special_tokens=False) for t in texts
    ]
    assert (ours.eos, ours.pad, ours.size) == (
        theirs.eos_token_id,
        theirs.pad_token_id,
        len(theirs),
    )
    assert (
        ours.decode(theirs.encode(texts[0])) == texts[0] and ours.decode([ours.eos, 10_000]) == ""
    )
    assert ours.variables["bos_token"] == "<|begin|>"


def test_spans_are_the_characters_of_each_token(folder: Path) -> None:
    text = "zwölf = 12"
    for tokenizer in (load_tokenizer(str(folder)), BYTES):
        ids, spans = tokenizer.encode_spans(text)
        assert ids.tolist() == tokenizer.encode([text.encode()])[0].tolist()
        assert spans[0, 0] == 0 and spans[-1, 1] == len(text) and (np.diff(spans[:, 0]) >= 0).all()


def test_the_file_itself_and_its_folder_are_one(folder: Path) -> None:
    assert (
        load_tokenizer(str(folder / "tokenizer.json")).sha256 == load_tokenizer(str(folder)).sha256
    )
    assert load_tokenizer(None) is BYTES and BYTES.sha256 is None


def test_the_digest_is_of_the_special_tokens_too(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    digests = set()
    for eos in ("<|endoftext|>", "<|im_end|>", {"content": "<|im_end|>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        digests.add(load_tokenizer(str(tmp_path)).sha256)
    assert len(digests) == 2


def test_truncation_and_padding_of_the_file_are_left_out(folder: Path, tmp_path: Path) -> None:
    said = json.loads((folder / "tokenizer.json").read_text())
    said["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    assert len(load_tokenizer(str(tmp_path)).encode([b"a b c d e f g h i j k l m n"])[0]) > 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"eos_token": None},
            r'no end token is set; write {"eos_token": "..."} into .*; its special tokens are <\|begin\|>',
        ),
        ({"eos_token": "</s>"}, "does not have the eos_token '</s>' of tokenizer_config.json"),
    ],
)
def test_without_an_end_token_it_is_refused(
    tmp_path: Path, change: dict[str, str | None], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        load_tokenizer(str(write_tokenizer(tmp_path, **change)))


def test_what_is_no_tokenizer_is_refused_in_a_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, says in (
        (tmp_path, "not a tokenizer.json of the tokenizers library"),
        (tmp_path / "tokeniser.json", "did you mean .*tokenizer.json"),
        (tmp_path / "none" / "x", "no such file or folder"),
    ):
        with pytest.raises(DataError, match=says) as caught:
            load_tokenizer(str(path))
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        DataError, match=r"needs the package tokenizers; pip install 'fp8cfg\[data\]'"
    ):
        load_tokenizer(str(folder))


def test_a_corpus_of_tokens_ends_each_document(folder: Path, theirs, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def a(): pass")
    (tmp_path / "b.txt").write_text("one two")
    tokenizer = load_tokenizer(str(folder))
    corpus = load_corpus("text", tmp_path, 416, tokenizer=tokenizer)
    starts = [*corpus.documents.tolist(), len(corpus.tokens)]
    found = {theirs.decode(corpus.tokens[a:b].tolist()) for a, b in pairwise(starts)}
    assert (
        found == {"def a(): pass<|endoftext|>", "one two<|endoftext|>"}
        and corpus.tokens.dtype == np.uint16
    )
    assert corpus.eos == tokenizer.eos and padded_vocabulary(tokenizer) == 400
    with pytest.raises(
        DataError, match=r"vocab_size=384 cannot hold the 400 tokens of .*: use 400 or more"
    ):
        load_corpus("text", tmp_path, 384, tokenizer=tokenizer)
