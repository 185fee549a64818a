"""Conversations as samples: one in each row, cut at seq_length, padded behind, with a loss of the assistant's tokens alone.

Padding stands behind and attention is causal: no token of a conversation sees it, and no loss is taken of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fp8cfg.data.chat import Encoded, encode_row
from fp8cfg.data.errors import DataError
from fp8cfg.data.order import permute
from fp8cfg.data.rows import kind_of, table_rows
from fp8cfg.data.samples import IGNORED, Rows, epochs
from fp8cfg.data.sources import MAX_TEXT_BYTES
from fp8cfg.data.tokenizer import Tokenizer, refuse_vocabulary


@dataclass(frozen=True, eq=False)
class Conversations:
    """The tokens of all conversations, one after the other.

    tokens, learned: int32 and bool [n], whether a loss is taken of a token. starts: where each conversation begins, int64 [c + 1].
    """

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray
    seq_length: int
    pad: int
    description: str

    @property
    def masked(self) -> bool:
        return True

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256(f"{self.pad} {len(self)}\n".encode())
        for part, dtype in (
            (self.tokens, "<i4"),
            (self.learned, "u1"),
            (self.starts - self.starts[0], "<i8"),
        ):
            digest.update(part.astype(dtype, copy=False).tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def drawn(self, cursor: np.ndarray, seed: int) -> np.ndarray:
        places = np.empty(len(cursor), dtype=np.int64)
        for epoch, here, index in epochs(cursor, len(self)):
            places[here] = permute(index, len(self), seed, epoch)
        return places

    def spread(self, count: int) -> np.ndarray:
        return np.arange(count) * len(self) // count

    def read(self, places: np.ndarray) -> Rows:
        tokens = np.full((len(places), self.seq_length), self.pad, dtype=np.int64)
        targets = np.full_like(tokens, IGNORED)
        for row, place in enumerate(places.tolist()):
            start, stop = (int(at - self.starts[0]) for at in self.starts[place : place + 2])
            ids, length = self.tokens[start:stop], stop - start - 1
            tokens[row, :length] = ids[:-1]
            targets[row, :length] = np.where(self.learned[start + 1 : stop], ids[1:], IGNORED)
        return tokens, targets

    def split(self, validation_fraction: float) -> tuple[Conversations, Conversations]:
        """The first conversations to train on, the last, `validation_fraction` of them, to validate; at least one of each."""
        if len(self) < 2:
            raise DataError(
                f"{self.description}: one conversation is too few to train and validate on; two are"
                " the least"
            )
        held_out = min(max(1, round(len(self) * validation_fraction)), len(self) - 1)
        return self._part(0, len(self) - held_out), self._part(len(self) - held_out, len(self))

    def _part(self, first: int, last: int) -> Conversations:
        starts = self.starts[first : last + 1]
        inside = slice(int(starts[0]), int(starts[-1]))
        return replace(
            self, tokens=self.tokens[inside], learned=self.learned[inside], starts=starts
        )


def load_conversations(
    path: str, tokenizer: Tokenizer, seq_length: int, vocab_size: int | None = None
) -> Conversations:
    """The conversations at `path`, a JSONL or Parquet file, a folder of these, or a saved dataset.

    One that is longer than seq_length + 1 tokens is cut there; one of whose tokens none is left to learn is left out; the
    description says how many. DataError as `encode_row`, and where no conversation is left.
    """
    if vocab_size is not None:
        refuse_vocabulary(tokenizer, vocab_size)
    rows, size = table_rows(kind_of(path), path)
    if size > MAX_TEXT_BYTES:
        raise DataError(
            f"{path}: {size / 2**30:.1f} GiB of conversations, more than the"
            f" {MAX_TEXT_BYTES / 2**30:.1f} GiB that are held in memory; give a part of them"
        )
    encoded = (encode_row(place, row, tokenizer) for place, row in rows)
    kept, cut, without = _fitting(encoded, seq_length + 1)
    if not kept:
        raise DataError(
            f"{path}: no conversation in which the assistant's words begin within"
            f" seq_length={seq_length} tokens"
        )
    lengths = np.array([len(ids) for ids, _ in kept], dtype=np.int64)
    said = [f"{len(kept)} conversations of {path}"]
    said += [f"{cut} longer than seq_length={seq_length} were cut"] if cut else []
    said += (
        [f"{without} without a word of the assistant within it were left out"] if without else []
    )
    return Conversations(
        np.concatenate([ids for ids, _ in kept]).astype(np.int32),
        np.concatenate([learned for _, learned in kept]),
        np.append(0, np.cumsum(lengths)),
        seq_length,
        tokenizer.pad,
        ", ".join(said),
    )


def _fitting(conversations: Iterator[Encoded], most: int) -> tuple[list[Encoded], int, int]:
    """Conversations of at most so many tokens; how many were cut, and how many left out because nothing is learned in them."""
    kept, cut, without = list[Encoded](), 0, 0
    for ids, learned in conversations:
        cut += len(ids) > most
        ids, learned = ids[:most], learned[:most]
        if learned[1:].any():  # the first token has none before it that would predict it
            kept.append((ids, learned))
        else:
            without += 1
    return kept, cut, without
