"""Corpus: one long array of token ids, each document ended by an end token.

Bytes are the default tokens: no tokenizer to download, nothing that can differ between machines. The vocabulary is the
256 byte values and one end-of-document token, padded to a multiple of 16 because FP8 matrix products want every
dimension of the output layer divisible by 16.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fp8cfg.data.files import DataError, require
from fp8cfg.data.indexed import prefix_of, read_indexed, required_prefix, write_indexed
from fp8cfg.data.sources import (
    SUFFIXES,
    TABLES,
    Documents,
    kind_of,
    refuse_too_much,
    stdlib_documents,
    table_documents,
    table_files,
    text_documents,
    text_files,
    tiny_documents,
)
from fp8cfg.data.token_file import Tokens
from fp8cfg.data.tokenizer import (
    BYTES,
    Tokenizer,
    padded_vocabulary,
    refuse_vocabulary,
    token_dtype,
)

_BLOCK = 32_768  # tokens
_BLOCKS = 1_024
_AT_ONCE = 1_000  # documents that a tokenizer gets, to use all cores
_BYTES_AT_ONCE = 1 << 22
_LEAST, _BELOW = 2, 0.5
"""The least model.seq_length that a recipe may have, and what its data.validation_fraction is below."""
_LARGE = 0.4
"""A data.validation_fraction that is offered for a short text."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids with what a run has to record about them.

    tokens: 1-D integer array, read-only, or a row in a file.
    vocab_size: every token is meant to be below it; those in a file are checked as they are read.
    sha256: `fingerprint(tokens)`.
    documents: where each document begins in `tokens`, int64 [d], the first at 0; None where nobody knows.
    eos: the token that ends a document; None where nobody knows.
    """

    name: str
    tokens: Tokens
    vocab_size: int
    sha256: str
    description: str
    documents: np.ndarray | None = None
    eos: int | None = None


def encoded(documents: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The tokens of each document, its end token included, read as they are asked for."""
    dtype = token_dtype(tokenizer.size)
    for some in _grouped(documents):
        for ids in tokenizer.encode(some):
            tokens = np.empty(len(ids) + 1, dtype=dtype)
            tokens[:-1], tokens[-1] = ids, tokenizer.eos
            yield tokens


def _grouped(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """As many documents at once as keep a tokenizer busy, which takes some hundred bytes for a token. DataError for one that cannot
    be read, after those before it."""
    some, size, left, wrong = list[bytes](), 0, iter(documents), None
    while wrong is None:
        try:
            document = next(left, None)
        except DataError as e:
            document, wrong = None, e
        if document is not None:
            some.append(document)
            size += len(document)
        if some and (document is None or len(some) == _AT_ONCE or size >= _BYTES_AT_ONCE):
            yield some
            some, size = [], 0
        if document is None:
            break
    if wrong is not None:
        raise wrong


def from_documents(
    name: str, documents: Iterable[bytes], description: str, tokenizer: Tokenizer = BYTES
) -> Corpus:
    """The tokens of all documents, the end token after each; bytes as uint16. DataError when there is not one token."""
    pieces = list(encoded(documents, tokenizer))
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    if lengths.sum() == len(pieces):
        raise DataError(f"{description or name}: empty, there is no text in it")
    tokens = np.concatenate(pieces)
    tokens.flags.writeable = False
    starts = np.cumsum(lengths) - lengths
    return Corpus(
        name,
        tokens,
        padded_vocabulary(tokenizer),
        fingerprint(tokens),
        description,
        starts,
        tokenizer.eos,
    )


def fingerprint(tokens: Tokens) -> str:
    """sha256 (hex) over type, length and values of `tokens`.

    Of more than 33.5 million tokens only 1024 evenly spread blocks of 32768 are read, so that opening a
    corpus of a terabyte in a file takes a moment; it tells corpora apart and is no proof against a small edit in a large one.
    """
    if len(tokens) <= _BLOCK * _BLOCKS:
        starts = np.arange(0, len(tokens), _BLOCK)
    else:
        starts = np.arange(_BLOCKS) * (len(tokens) - _BLOCK) // (_BLOCKS - 1)
    portable = tokens.dtype.newbyteorder("<")
    digest = hashlib.sha256(f"{tokens.dtype.name} {len(tokens)}\n".encode())
    for start in starts.tolist():
        digest.update(tokens[start : start + _BLOCK].astype(portable, copy=False).tobytes())
    return digest.hexdigest()


def split(corpus: Corpus, validation_fraction: float, seq_length: int) -> tuple[Corpus, Corpus]:
    """One cut near the end: the first part to train on, the rest, `validation_fraction` of the tokens, to validate.

    The cut goes to the nearest beginning of a document, so that none is in both parts, where that leaves between half and twice as
    much to validate; a document that is longer than that is cut. Both parts hold at least one window of seq_length + 1 tokens.
    Nothing is adjusted quietly: where they do not, DataError says which value would do.
    """
    length, window = len(corpus.tokens), seq_length + 1
    if not 0 < validation_fraction < 1:
        raise DataError(
            f"validation_fraction={validation_fraction} must lie between 0 and 1, for example 0.05"
        )
    held_out, least = round(length * validation_fraction), math.ceil(window / length * 1e6) / 1e6
    if length < 2 * window or (held_out < window and least >= _BELOW):
        raise DataError(
            f"corpus {corpus.name!r} has {length} tokens, too few to train and validate on windows"
            f" of {window}: use more text{_shorter(length, validation_fraction)}"
        )
    if held_out < window:
        raise DataError(
            _short("validation", held_out, window, f"data.validation_fraction={least:g} or more")
        )
    if length - held_out < window:
        most = math.floor((length - window) / length * 1e6) / 1e6
        raise DataError(
            _short(
                "training", length - held_out, window, f"data.validation_fraction={most:g} or less"
            )
        )
    cut = _border(corpus.documents, length, held_out, window)
    return _part(corpus, "training", 0, cut), _part(corpus, "validation", cut, length)


def _border(documents: np.ndarray | None, length: int, held_out: int, window: int) -> int:
    """Where to cut so that about `held_out` tokens are left: at a document's beginning, or else exactly."""
    cut = length - held_out
    if documents is None or len(documents) == 0:
        return cut
    at = int(np.searchsorted(documents, cut))
    near = [int(start) for start in documents[max(0, at - 1) : at + 1]]
    fits = [
        start
        for start in near
        if held_out / 2 <= length - start <= held_out * 2 and window <= start <= length - window
    ]
    return min(fits, key=lambda start: abs(start - cut), default=cut)


def _shorter(length: int, validation_fraction: float) -> str:
    """The model.seq_length with which `length` tokens can be cut, by `validation_fraction` if that will do; "" if none is."""
    held_out = round(length * validation_fraction)
    if (most := min(held_out, length - held_out) - 1) >= _LEAST:
        return f" or model.seq_length={most} or less"
    most = round(length * _LARGE) - 1
    return (
        f", or model.seq_length={most} or less with data.validation_fraction={_LARGE}"
        if most >= _LEAST
        else ""
    )


def _short(part: str, length: int, window: int, cure: str) -> str:
    return (
        f"the {part} part has {length} tokens, less than one window of seq_length + 1 = {window}:"
        f" use {cure}"
    )


def _part(corpus: Corpus, part: str, start: int, stop: int) -> Corpus:
    tokens = corpus.tokens[start:stop]
    documents = None
    # Only the part from the beginning has the documents under their numbers.
    if corpus.documents is not None and start == 0:
        documents = corpus.documents[corpus.documents < stop]
    description = f"{corpus.description}; {part} part, tokens {start} to {stop}"
    return replace(
        corpus,
        tokens=tokens,
        sha256=fingerprint(tokens),
        description=description,
        documents=documents,
    )


SOURCES = ("stdlib", "tiny", "text", *TABLES, "tokens", "chat")
WITH_PATH = {
    "text": "a text file or a folder of them",
    **TABLES,
    "tokens": "the common name of a Megatron .bin/.idx pair",
    "chat": "a .jsonl file of conversations",
}
"""Sources that read what is at a path, and what that is."""


def documents(
    name: str, path: str | os.PathLike[str] | None = None, text_key: str = "text"
) -> Documents:
    """The texts of the source called `name`; not of tokens, which are no text, nor of chat, whose rows are conversations.

    DataError for an unknown name, a path that is missing or that would be ignored.
    """
    if name not in SOURCES:
        raise _unknown(name)
    if name in WITH_PATH and path is None:
        raise DataError(f"data source {name!r} needs a path: {WITH_PATH[name]}")
    if name not in WITH_PATH and path is not None:
        raise DataError(
            f"data source {name!r} takes no path, and {os.fspath(path)!r} would be ignored: use"
            " 'text'"
        )
    if name in TABLES and path is not None:
        return table_documents(name, os.fspath(path), text_key)
    if name == "text" and path is not None:
        return text_documents(path)
    if name in WITH_PATH:
        raise DataError(
            f"data source {name!r} has no documents of text; text, jsonl, parquet and dataset have"
        )
    return stdlib_documents() if name == "stdlib" else tiny_documents()


def source_files(name: str, path: str) -> list[Path]:
    """The files that text, jsonl or parquet at `path` is read from; none of other sources. DataError where there is none."""
    if name == "text":
        return text_files(Path(path))[0]
    return table_files(name, path)[0] if name in SUFFIXES else []


def require_source(name: str, path: str) -> None:
    """Raise DataError where there is nothing at `path` of the source called `name`; what is there is not read."""
    if name == "tokens":
        required_prefix(path)
    elif name == "chat":
        require_source(kind_of(path), path)
    elif not source_files(name, path):
        require(Path(path))


def load_corpus(
    name: str,
    path: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
    text_key: str = "text",
    tokenizer: Tokenizer = BYTES,
) -> Corpus:
    """The corpus called `name`.

    stdlib, tiny: no path. text, jsonl, parquet, dataset: the texts at `path`, tokenized. tokens: token ids of `path`.bin, read as
    they are asked for. vocab_size: of the model; texts take what their tokenizer needs when it is None, token files cannot do
    without. DataError as `documents`, and for a vocabulary that cannot hold the tokens.
    """
    if name == "tokens" and path is not None:
        return _token_corpus(path, vocab_size, tokenizer)
    found = documents(name, path, text_key)
    if vocab_size is not None:
        refuse_vocabulary(tokenizer, vocab_size)
    refuse_too_much(found, path)
    counted = _Counted(found.texts)
    corpus = from_documents(found.name, counted, found.what, tokenizer)
    description = (
        f"{found.what}, {counted.documents} documents, {counted.bytes / 1e6:.2f} MB{found.remark}"
    )
    return replace(corpus, description=description, vocab_size=vocab_size or corpus.vocab_size)


class _Counted:
    """Texts, counted as they are read."""

    def __init__(self, texts: Iterator[bytes]) -> None:
        self.texts, self.documents, self.bytes = texts, 0, 0

    def __iter__(self) -> Iterator[bytes]:
        for text in self.texts:
            self.documents += 1
            self.bytes += len(text)
            yield text


def _unknown(name: str) -> DataError:
    close = difflib.get_close_matches(str(name), SOURCES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return DataError(f"unknown data source {name!r}: {hint}known are {', '.join(SOURCES)}")


def _token_corpus(
    path: str | os.PathLike[str], vocab_size: int | None, tokenizer: Tokenizer
) -> Corpus:
    if vocab_size is None:
        raise DataError("data source 'tokens' needs vocab_size: token files do not record it")
    if tokenizer is not BYTES:
        refuse_vocabulary(tokenizer, vocab_size)
    indexed = read_indexed(path)
    tokens = indexed.stream()
    if len(tokens) == 0:
        raise DataError(f"{indexed.path}.idx: all sequences are empty")
    firsts = indexed.documents[:-1]
    starts = indexed.starts[firsts[firsts < len(indexed.starts)]] - indexed.starts[0]
    description = (
        f"{indexed.path}.bin, {len(firsts)} documents, {len(tokens)} {tokens.dtype.name} tokens"
    )
    eos = None if tokenizer is BYTES else tokenizer.eos
    return Corpus("tokens", tokens, vocab_size, fingerprint(tokens), description, starts, eos)


@dataclass
class Prepared:
    """What was written."""

    path: Path
    tokens: int = 0
    documents: int = 0


def prepare(
    out: str | os.PathLike[str], name: str, path: str | None, text_key: str, tokenizer: Tokenizer
) -> Prepared:
    """Write `out`.bin and `out`.idx with every document of the source and the end token after each: the row of tokens that training
    on the source itself has, so that `data=tokens` gives the same losses. Documents are read and written one after the other.

    Nothing is there under these names until both are whole. DataError where there is such an index already, and for what cannot be
    read; OSError for what cannot be written.
    """
    made = Prepared(prefix_of(out))
    if os.path.lexists(f"{made.path}.idx"):
        raise DataError(f"{made.path}.idx: exists already; name another, or remove it")
    found = documents(name, path, text_key)
    made.path.parent.mkdir(parents=True, exist_ok=True)
    write_indexed(made.path, _counted(encoded(found.texts, tokenizer), made), tokenizer.size)
    return made


def _counted(documents: Iterator[np.ndarray], made: Prepared) -> Iterator[np.ndarray]:
    for tokens in documents:
        made.tokens += len(tokens)
        made.documents += 1
        yield tokens
