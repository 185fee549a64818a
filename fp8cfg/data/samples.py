"""Samples: what a run draws its batches from, each addressed by an index; and windows of a token array, the plain kind.

An epoch visits every sample once, in an order that is a function of seed, epoch and index (samples.py). Evaluation takes samples that
lie evenly over all of them, always the same ones.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import Protocol

import numpy as np

from fp8cfg.data.corpus import fingerprint
from fp8cfg.data.files import DataError
from fp8cfg.data.token_file import Tokens

# Four rounds make a strong permutation of a large domain; the small ones of short corpora need more to mix.
_ROUNDS = 8
_MOST = 1 << 62


def permute(index: np.ndarray | int, n: int, seed: int, epoch: int) -> np.ndarray:
    """The image of `index` under the permutation of range(n) that `seed` and `epoch` select.

    index: integers in [0, n), any shape. Returns int64 of that shape. The values are equal on every platform.
    """
    values = np.asarray(index, dtype=np.int64)
    if not 0 < n <= _MOST:
        raise DataError(f"n={n}: can order between 1 and 2**62 samples")
    if values.size and (values.min() < 0 or values.max() >= n):
        raise DataError(
            f"sample index {int(values.min())}..{int(values.max())} is outside of range({n})"
        )
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    keys = _keys(seed, epoch)
    out = _feistel(values.reshape(-1).astype(np.uint64), keys, half)
    # The domain is at most four times the range, so a value is expected back within four steps; it comes back at the
    # latest when its cycle closes, because it started inside.
    while (outside := out >= np.uint64(n)).any():
        out[outside] = _feistel(out[outside], keys, half)
    return out.astype(np.int64).reshape(values.shape)


def offset(n: int, seed: int, epoch: int) -> int:
    """The offset in [0, n), selected by `seed` and `epoch`, at which an epoch begins to cut the corpus into windows."""
    return int.from_bytes(_digest("offset", seed, epoch), "little") % n


def _feistel(values: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    joined: np.ndarray = (left << half) | right
    return joined


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014); array arithmetic wraps modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _keys(seed: int, epoch: int) -> np.ndarray:
    return np.frombuffer(_digest("order", seed, epoch), dtype="<u8")[:_ROUNDS].astype(np.uint64)


def _digest(purpose: str, seed: int, epoch: int) -> bytes:
    return hashlib.blake2b(
        f"{purpose} {int(seed)} {int(epoch)}".encode(), digest_size=8 * _ROUNDS
    ).digest()


IGNORED = -100
"""A target that no loss is taken of: the ignore_index of torch's cross entropy."""
Rows = tuple[np.ndarray, ...]
"""Tokens and targets, int64 [n, seq_length] each; of some samples also the number of the document of each token, int32, from 0."""
Origin = dict[str, int | str]
"""Where a sample begins: `document` from 0 and `offset`, its token in that document. Some sources know less, or more."""


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

    def origins(self, places: np.ndarray) -> list[Origin]:
        """Where the samples at these places begin."""


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
    documents: where each document begins in `tokens`, int64 [d]; None where nobody knows.
    """

    tokens: Tokens
    seq_length: int
    vocab_size: int
    eod: int | None = None
    end: int | None = None
    documents: np.ndarray | None = None

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

    def origins(self, places: np.ndarray) -> list[Origin]:
        starts = (places % len(self.tokens)).tolist()
        if self.documents is None:
            return [{"token": start} for start in starts]
        found: list[Origin] = []
        for start in starts:
            document = int(np.searchsorted(self.documents, start, side="right")) - 1
            if document < 0:  # the first document of this part begins in another part
                found.append({"token": start})
            else:
                offset = start - int(self.documents[document])
                found.append({"document": document, "offset": offset})
        return found


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


_PERIOD = 100_000


def shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportions of `weights`, read as they are written: 0.7 and 0.3 are 7 and 3.

    Their sum, after which the schedule begins again, is at most 100,000; weights that would need more are rounded to parts of that.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    whole = lcm(*(share.denominator for share in exact))
    parts = [int(share * whole) for share in exact]
    parts = [part // gcd(*parts) for part in parts]
    if sum(parts) <= _PERIOD:
        return parts
    parts = [round(_PERIOD * share / sum(exact)) for share in exact]
    if not all(parts):
        raise DataError(
            f"weight {weights[parts.index(0)]:g} is less than a 200,000th of all weights; raise it,"
            " or leave it out"
        )
    return parts


def schedule(parts: Sequence[int]) -> np.ndarray:
    """The source of each of sum(parts) samples, source i in parts[i] of them, int64."""
    period, order = sum(parts), np.empty(sum(parts), dtype=np.int64)
    coming = [
        (0, -(-period // part), source, 1) for source, part in enumerate(parts)
    ]  # from slot, due by slot, source, its n-th
    heapq.heapify(coming)
    ready: list[tuple[int, int, int]] = []
    for slot in range(period):
        while coming and coming[0][0] <= slot:
            _, due, source, n = heapq.heappop(coming)
            heapq.heappush(ready, (due, source, n))
        _, source, n = heapq.heappop(ready)
        order[slot] = source
        if n < parts[source]:
            heapq.heappush(
                coming,
                (n * period // parts[source], -(-(n + 1) * period // parts[source]), source, n + 1),
            )
    return order


@dataclass(frozen=True, eq=False)
class Mixture:
    """Samples of several sources, `weights[i]` of source i for each sum of weights. A place is the source and the place in it."""

    sources: Sequence[Samples]
    weights: Sequence[float]

    @cached_property
    def _schedule(self) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The share of each source, the source of each slot of a period, and the how-many-th of its source it is there."""
        parts = shares(self.weights)
        order = schedule(parts)
        nth = np.empty_like(order)
        for source, part in enumerate(parts):
            nth[order == source] = np.arange(part)
        return parts, order, nth

    @property
    def seq_length(self) -> int:
        return self.sources[0].seq_length

    @property
    def masked(self) -> bool:
        return any(source.masked for source in self.sources)

    @cached_property
    def sha256(self) -> str:
        said = [
            f"{part} {source.sha256}"
            for part, source in zip(self._schedule[0], self.sources, strict=True)
        ]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()

    def __len__(self) -> int:
        """As many as can be taken in these shares without taking one twice."""
        parts = self._schedule[0]
        most = min(
            len(source) * sum(parts) // part
            for source, part in zip(self.sources, parts, strict=True)
        ) + len(parts)
        while most and any(self._counts(most) > np.array([len(source) for source in self.sources])):
            most -= 1
        return most

    def drawn(self, cursor: np.ndarray, seed: int) -> np.ndarray:
        which, index = self._dealt(cursor)
        places = np.stack([which, index], axis=1)
        for number, source in enumerate(self.sources):
            here = which == number
            if here.any():  # two sources of equally many samples are not in one order
                places[here, 1] = source.drawn(
                    index[here], seed if number == 0 else (number << 64) + seed
                )
        return places

    def spread(self, count: int) -> np.ndarray:
        which, index = self._dealt(np.arange(count))
        places = np.stack([which, index], axis=1)
        for number, taken in enumerate(self._counts(count).tolist()):
            if taken:
                places[which == number, 1] = self.sources[number].spread(taken)
        return places

    def read(self, places: np.ndarray) -> Rows:
        rows: list[np.ndarray] = []
        for number, source in enumerate(self.sources):
            here = places[:, 0] == number
            if here.any():
                parts = source.read(places[here, 1])
                rows = rows or [
                    np.empty((len(places), self.seq_length), dtype=part.dtype) for part in parts
                ]
                for whole, part in zip(rows, parts, strict=True):
                    whole[here] = part
        return tuple(rows)

    def origins(self, places: np.ndarray) -> list[Origin]:
        found: list[Origin] = []
        for place in places:
            number = int(place[0])
            (origin,) = self.sources[number].origins(place[1:])
            found.append({"part": number, **origin})
        return found

    def _dealt(self, cursor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample, and the how-many-th of that source it is."""
        parts, order, nth = self._schedule
        period, slot = np.divmod(cursor, len(order))
        which = order[slot]
        return which, period * np.array(parts)[which] + nth[slot]

    def _counts(self, count: int) -> np.ndarray:
        """How many of the first `count` samples are of each source."""
        parts, order, _ = self._schedule
        period, slot = divmod(count, len(order))
        found: np.ndarray = period * np.array(parts) + np.bincount(
            order[:slot], minlength=len(parts)
        )
        return found
