"""Corpus names: stdlib, tiny, text, jsonl, parquet, dataset and tokens, as a recipe's data.name has them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fp8cfg.data.corpus import Corpus, fingerprint, from_documents
from fp8cfg.data.errors import DataError, require
from fp8cfg.data.indexed import read_indexed, required_prefix
from fp8cfg.data.rows import TABLES, kind_of, table_documents, table_files
from fp8cfg.data.sources import (
    Documents,
    refuse_too_much,
    stdlib_documents,
    text_documents,
    text_files,
    tiny_documents,
)
from fp8cfg.data.table_files import SUFFIXES
from fp8cfg.data.tokenizer import BYTES, Tokenizer, refuse_vocabulary

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
