"""Samples: what a run draws its batches from, each addressed by an index; and windows of a token array, the plain kind.

An epoch visits every sample once, in an order that is a function of seed, epoch and index (order.py). Evaluation takes samples that
lie evenly over all of them, always the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from fp8cfg.data.corpus import fingerprint
from fp8cfg.data.errors import DataError
from fp8cfg.data.order import offset, permute
from fp8cfg.data.token_file import Tokens

IGNORED = -100
"""A target that no loss is taken of: the ignore_index of torch's cross entropy."""
Rows = tuple[np.ndarray, ...]
"""Tokens and targets, int64 [n, seq_length] each; of some samples also the number of the document of each token, int32, from 0."""


class Drawn(Protocol):
    """A source of training samples. A place is what a kind finds a sample by: a row of integers."""

    @property
    def seq_length(self) -> int:
        """Tokens of a sample."""

    @property
    def masked(self) -> bool:
        """Whether some targets are IGNORED, so that samples differ in how many tokens of loss they have."""

    @property
    def sha256(self) -> str:
        """A fingerprint of all of it."""

    def drawn(self, cursor: np.ndarray, seed: int) -> np.ndarray:
        """The places of the samples with these numbers since the start of a run, [n, ...]."""

    def read(self, places: np.ndarray) -> Rows:
        """The samples at these places. DataError for a token outside of the vocabulary."""


class Samples(Drawn, Protocol):
    """A source of samples that has a length."""

    def __len__(self) -> int:
        """Samples of an epoch, and of an evaluation of everything."""

    def spread(self, count: int) -> np.ndarray:
        """The places of `count` samples, not more than there are, that lie evenly over all of them."""


def epochs(cursor: np.ndarray, count: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """The epochs, each of `count` samples, that the numbers `cursor` fall into: number, where in `cursor`, and the index inside."""
    number, index = np.divmod(cursor, count)
    return [(epoch, here := number == epoch, index[here]) for epoch in np.unique(number).tolist()]


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of one token array.

    The row is read as a ring, cut into windows from another place in each epoch: borders move, every window still has its full
    length, and no window of an epoch overlaps another by more than the one token that is a target here and an input there.

    eod: the token after which no loss is taken, for what follows it begins another document; None takes all of them.
    end: the token that ends a document, where samples are to say of which document each token is; None where they are not.
    """

    tokens: Tokens
    seq_length: int
    vocab_size: int
    eod: int | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        positive(seq_length=self.seq_length, vocab_size=self.vocab_size)
        if len(self.tokens) < self.seq_length + 1:
            raise DataError(
                f"{len(self.tokens)} tokens are less than one window of seq_length + 1 ="
                f" {self.seq_length + 1}: use more text or a smaller model.seq_length"
            )

    @property
    def masked(self) -> bool:
        return self.eod is not None

    @cached_property
    def sha256(self) -> str:
        return fingerprint(self.tokens)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_length

    def drawn(self, cursor: np.ndarray, seed: int) -> np.ndarray:
        starts = np.empty(len(cursor), dtype=np.int64)
        for epoch, here, index in epochs(cursor, len(self)):
            order = permute(index, len(self), seed, epoch)
            starts[here] = offset(len(self.tokens), seed, epoch) + order * self.seq_length
        return starts

    def spread(self, count: int) -> np.ndarray:
        return np.arange(count) * len(self) // count * self.seq_length

    def read(self, places: np.ndarray) -> Rows:
        positions = (places[:, None] + np.arange(self.seq_length + 1)) % len(self.tokens)
        window = self.tokens[positions].astype(np.int64)
        if window.min() < 0 or window.max() >= self.vocab_size:
            bad = ((window < 0) | (window >= self.vocab_size)).argmax()
            raise DataError(
                f"token {window.flat[bad]} at index {positions.flat[bad]} of this part of the"
                f" corpus is not in range(vocab_size={self.vocab_size}): the corpus was made with"
                " another vocabulary"
            )
        return rows_of(window, self.eod, self.end)


def rows_of(window: np.ndarray, eod: int | None, end: int | None) -> Rows:
    """The samples of windows, int64 [n, seq_length + 1]; `eod` and `end` as of Windows."""
    tokens, targets = window[:, :-1], window[:, 1:]
    masked = targets if eod is None else np.where(tokens == eod, IGNORED, targets)
    return (tokens, masked) if end is None else (tokens, masked, _documents(tokens == end))


def _documents(ends: np.ndarray) -> np.ndarray:
    """The number of the document of each token, int32; what `ends` one is the last of it."""
    numbers: np.ndarray = np.cumsum(ends, axis=1, dtype=np.int32) - ends
    return numbers


def positive(**values: int) -> None:
    """Raise DataError for a value below 1."""
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{name}={value} must be at least 1")
