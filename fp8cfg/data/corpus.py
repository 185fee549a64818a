"""Corpus: one long array of token ids, documents joined by an end token.

Bytes are the default tokens: no tokenizer to download, nothing that can differ between machines. The vocabulary is the
256 byte values and one end-of-document token, padded to a multiple of 16 because FP8 matrix products want every
dimension of the output layer divisible by 16.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp8cfg.data.errors import DataError
from fp8cfg.data.token_file import Tokens

EOS = 256
BYTE_VOCAB = 272

_BLOCK = 32_768  # tokens
_BLOCKS = 1_024


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids with what a run has to record about them.

    tokens: 1-D integer array, read-only, or a row in a file.
    vocab_size: every token is meant to be below it; those in a file are checked as they are read.
    sha256: `fingerprint(tokens)`.
    files: how many files the tokens came from.
    """

    name: str
    tokens: Tokens
    vocab_size: int
    sha256: str
    description: str
    files: int


def from_documents(name: str, documents: Sequence[bytes], description: str, files: int) -> Corpus:
    """Bytes as uint16 tokens, `EOS` after each document. DataError when there is not one byte."""
    length = sum(map(len, documents))
    if length == 0:
        raise DataError(f"{name}: there is no text in it")
    tokens = np.full(length + len(documents), EOS, dtype=np.uint16)
    at = 0
    for document in documents:
        tokens[at : at + len(document)] = np.frombuffer(document, dtype=np.uint8)
        at += len(document) + 1
    tokens.flags.writeable = False
    return Corpus(name, tokens, BYTE_VOCAB, fingerprint(tokens), description, files)


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

    Both parts hold at least one window of seq_length + 1 tokens. Nothing is adjusted quietly: where they do not,
    DataError says which value would do.
    """
    length, window = len(corpus.tokens), seq_length + 1
    if not 0 < validation_fraction < 1:
        raise DataError(f"validation_fraction={validation_fraction} must lie between 0 and 1, for example 0.05")
    if length < 2 * window:
        raise DataError(
            f"corpus {corpus.name!r} has {length} tokens, too few to train and validate on windows of {window}: "
            f"use more text or seq_length={max(1, length // 2 - 1)} or less"
        )
    held_out = round(length * validation_fraction)
    if held_out < window:
        least = math.ceil(window / length * 1e6) / 1e6
        raise DataError(_short("validation", held_out, window, f"validation_fraction={least:g} or more"))
    if length - held_out < window:
        most = math.floor((length - window) / length * 1e6) / 1e6
        raise DataError(_short("training", length - held_out, window, f"validation_fraction={most:g} or less"))
    return _part(corpus, "training", 0, length - held_out), _part(corpus, "validation", length - held_out, length)


def _short(part: str, length: int, window: int, cure: str) -> str:
    return f"the {part} part has {length} tokens, less than one window of seq_length + 1 = {window}: use {cure}"


def _part(corpus: Corpus, part: str, start: int, stop: int) -> Corpus:
    tokens = corpus.tokens[start:stop]
    description = f"{corpus.description}; {part} part, tokens {start} to {stop}"
    return replace(corpus, tokens=tokens, sha256=fingerprint(tokens), description=description)
