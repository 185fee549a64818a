"""Corpus names: stdlib, tiny, text and tokens, as a recipe's data.name has them."""

from __future__ import annotations

import difflib
import os
from dataclasses import replace

from fp8cfg.data.corpus import BYTE_VOCAB, EOS, Corpus, fingerprint
from fp8cfg.data.errors import DataError
from fp8cfg.data.indexed import read_indexed
from fp8cfg.data.sources import stdlib_corpus, text_corpus, tiny_corpus

SOURCES = ("stdlib", "tiny", "text", "tokens")
_WITH_PATH = {"text": "a text file or a folder of them", "tokens": "the common name of a Megatron .bin/.idx pair"}


def load_corpus(name: str, path: str | os.PathLike[str] | None = None, vocab_size: int | None = None) -> Corpus:
    """The corpus called `name`.

    stdlib, tiny: bytes, no path. text: bytes of `path`. tokens: token ids of `path`.bin, read as they are asked for.
    vocab_size: of the model; bytes need 257 and take 272 when it is None, token files cannot do without.
    DataError for an unknown name, a path that is missing or that would be ignored, or a vocabulary that cannot hold it.
    """
    if name not in SOURCES:
        raise _unknown(name)
    if name in _WITH_PATH and path is None:
        raise DataError(f"data source {name!r} needs a path: {_WITH_PATH[name]}")
    if name not in _WITH_PATH and path is not None:
        raise DataError(f"data source {name!r} takes no path, and {os.fspath(path)!r} would be ignored: use 'text'")
    if name == "tokens" and path is not None:
        return _token_corpus(path, vocab_size)
    if vocab_size is not None and vocab_size <= EOS:
        raise DataError(f"vocab_size={vocab_size} cannot hold bytes and the end token: use {BYTE_VOCAB} or more")
    if path is not None:
        corpus = text_corpus(path)
    elif name == "stdlib":
        corpus = stdlib_corpus()
    else:
        corpus = tiny_corpus()
    return replace(corpus, vocab_size=BYTE_VOCAB if vocab_size is None else vocab_size)


def _unknown(name: str) -> DataError:
    close = difflib.get_close_matches(str(name), SOURCES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return DataError(f"unknown data source {name!r}: {hint}known are {', '.join(SOURCES)}")


def _token_corpus(path: str | os.PathLike[str], vocab_size: int | None) -> Corpus:
    if vocab_size is None:
        raise DataError("data source 'tokens' needs vocab_size: token files do not record it")
    indexed = read_indexed(path)
    tokens = indexed.stream()
    if len(tokens) == 0:
        raise DataError(f"{indexed.path}.idx: all sequences are empty")
    description = f"{indexed.path}.bin, {len(indexed.documents) - 1} documents, {len(tokens)} {tokens.dtype.name} tokens"
    return Corpus("tokens", tokens, vocab_size, fingerprint(tokens), description, files=2)
