"""Preparation of token files: the texts of a source, tokenized once and written as Megatron's .bin/.idx."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp8cfg.data.corpus import documents, encoded
from fp8cfg.data.errors import DataError
from fp8cfg.data.indexed import prefix_of, write_indexed
from fp8cfg.data.tokenizer import Tokenizer


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
