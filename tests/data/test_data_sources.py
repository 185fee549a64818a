from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from fp8cfg.data import DataError, load_corpus, sources
from fp8cfg.data.indexed import write_indexed


def text_of(tokens: np.ndarray) -> bytes:
    return bytes(tokens[tokens < 256].astype(np.uint8))


def documents(path: Path) -> set[bytes]:
    tokens = load_corpus("text", path).tokens
    return {text_of(part) for part in np.split(tokens, np.flatnonzero(tokens == 256) + 1)} - {b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("first", "utf-8")
    (tmp_path / "texts" / "deep" / "b.MD").write_text("zwölf", "utf-8")
    (tmp_path / "texts" / "__init__.py").write_text("")
    (tmp_path / "texts" / "image.png").write_bytes(b"\x89PNG\0")
    return tmp_path / "texts"


def test_the_standard_library_is_there_without_its_tests() -> None:
    corpus = load_corpus("stdlib")
    text = text_of(corpus.tokens)
    assert corpus.name == "stdlib" and len(corpus.documents) > 300 and 5e6 < len(text) < 20e6
    assert Path(os.__file__).read_bytes() in text and b"class TestCase(" in text
    # the libraries of this environment, and test suites, are not the standard library
    assert b"def pytest_addoption" not in text and b"class BaseTestUUID" not in text
    assert corpus.sha256 == load_corpus("stdlib").sha256


def test_an_interpreter_without_sources_gets_the_shipped_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in (tmp_path, tmp_path / "python311.zip"):
        monkeypatch.setattr(sysconfig, "get_path", lambda _, place=place: str(place))
        corpus = load_corpus("stdlib")
        assert corpus.name == "tiny" and corpus.sha256 == load_corpus("tiny").sha256
        assert (
            f"instead of the standard library, which has no sources in {place}"
            in corpus.description
        )


def test_a_folder_is_one_document_a_text_file(folder: Path) -> None:
    assert documents(folder) == {b"first", "zwölf".encode()}
    assert (
        len(load_corpus("text", folder).documents) == 2
        and "2 documents" in load_corpus("text", folder).description
    )


def test_the_order_is_that_of_names_not_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("early", "late"):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number}")
    corpus, walk = load_corpus("text", tmp_path), os.walk
    monkeypatch.setattr(
        os, "walk", lambda *a, **k: ((f, d, n[::-1]) for f, d, n in list(walk(*a, **k))[::-1])
    )
    assert load_corpus("text", tmp_path).sha256 == corpus.sha256
    # A cut near the end must not hold out one folder of the two.
    tail = text_of(corpus.tokens[-len(corpus.tokens) // 4 :])
    assert b"early" in tail and b"late" in tail


def test_links_and_hidden_folders_are_left_out(folder: Path) -> None:
    outside = folder.parent / "secret"
    outside.mkdir()
    (outside / "key.txt").write_text("secret")
    (folder / "link.txt").symlink_to(outside / "key.txt")
    (folder / "linked").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    (folder / ".git").mkdir()
    (folder / ".git" / "note.txt").write_text("hidden")
    assert documents(folder) == {b"first", "zwölf".encode()}
    assert "3 links not followed" in load_corpus("text", folder).description


def test_a_file_is_one_document_whatever_its_ending(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("plain")
    assert load_corpus("text", tmp_path / "notes").tokens.tolist() == [*b"plain", 256]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"ab\0c", "byte 2 is 0x00"),
        (b"abc\xff", "byte 3 is 0xff"),
        (b"", "empty"),
        (None, "no text file below"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        load_corpus("text", tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_more_than_memory_should_hold_is_refused_before_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_TEXT_BYTES", 5)
    with pytest.raises(DataError, match="use source 'tokens'"):
        load_corpus("text", folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe.txt")
    assert documents(folder) == {b"first", "zwölf".encode()}
    with pytest.raises(DataError, match="not a regular file"):
        load_corpus("text", folder / "pipe.txt")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("text", r"no such file or folder; did you mean .*texts\?"),
        ("nothing/like/this", "the nearest folder that exists is"),
        ("a\0b", "cannot be reached"),
        ("x" * 300, "cannot be reached"),
        ("qqqq", "nothing in .* has a similar name"),
    ],
)
def test_a_missing_path_names_the_nearest(folder: Path, name: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_corpus("text", folder.parent / name)
    with pytest.raises(DataError, match=r"no such file|cannot be reached"):
        load_corpus("tokens", folder.parent / "absent" / name, vocab_size=10)


def test_every_source_has_a_name(folder: Path) -> None:
    prefix = write_indexed(folder / "tokens", [[5, 6], [7]], vocab_size=1000)
    corpora = [load_corpus("stdlib"), load_corpus("tiny"), load_corpus("text", folder)]
    assert [(corpus.name, corpus.vocab_size) for corpus in corpora] == [
        ("stdlib", 272),
        ("tiny", 272),
        ("text", 272),
    ]
    tokens = load_corpus("tokens", prefix, vocab_size=1000)
    assert (
        tokens.tokens.tolist() == [5, 6, 7]
        and tokens.vocab_size == 1000
        and "2 documents" in tokens.description
    )
    assert load_corpus("tiny", vocab_size=32_000).vocab_size == 32_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("stdlb",), "unknown data source 'stdlb': did you mean 'stdlib'"),
        (("text",), "'text' needs a path"),
        (("tokens", None, 100), "'tokens' needs a path"),
        (("tiny", "x"), "takes no path"),
        (("tiny", None, 256), "vocab_size=256 cannot hold"),
        (("tokens", "x"), "needs vocab_size"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(arguments: tuple[object, ...], says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_corpus(*arguments)
