"""Samples: windows of a token array and mixtures of sources, each addressed by an index.

An epoch has each sample once. The order is a function of seed, epoch and index, so there is no
shuffled list to store. Evaluations use the same evenly spread samples each time.
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

# Four rounds suffice for a large domain. Short corpora have small domains, which need more.
_ROUNDS = 8
_MAX_SAMPLES = 1 << 62


def permute(index: np.ndarray | int, n: int, seed: int, epoch: int) -> np.ndarray:
    """Applies a pseudorandom permutation of range(n), selected by seed and epoch.

    The method is a Feistel network with cycle walking. It needs no memory of size n, and results
    are equal on all platforms.

    Args:
        index: Integers in [0, n), any shape.
        n: Number of samples, at most 2**62.
        seed: Seed of the run.
        epoch: Number of the epoch.

    Returns:
        The permuted indices, int64 of the same shape.
    """
    values = np.asarray(index, dtype=np.int64)
    if not 0 < n <= _MAX_SAMPLES:
        raise DataError(f"n={n}: can order between 1 and 2**62 samples")
    if values.size and (values.min() < 0 or values.max() >= n):
        raise DataError(
            f"sample index {int(values.min())}..{int(values.max())} is outside of range({n})"
        )
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    keys = _keys(seed, epoch)
    out = _feistel(values.reshape(-1).astype(np.uint64), keys, half)
    # Cycle walking. The domain of the network is a power of four, at most 4n. So a value gets below
    # n after at most four passes on average. It always ends: the cycle leads back to the start.
    is_outside = out >= np.uint64(n)
    while is_outside.any():
        out[is_outside] = _feistel(out[is_outside], keys, half)
        is_outside = out >= np.uint64(n)
    return out.astype(np.int64).reshape(values.shape)


def offset(n: int, seed: int, epoch: int) -> int:
    """Returns the position of an epoch's first window, a pseudorandom integer in [0, n).

    Args:
        n: Number of tokens.
        seed: Seed of the run.
        epoch: Number of the epoch.
    """
    return int.from_bytes(_digest("offset", seed, epoch), "little") % n


def _feistel(values: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    """Permutes integers of 2 * half bits, uint64 [m], with one round per key."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    high, low = values >> half, values & mask
    for key in keys:
        high, low = low, high ^ (_mix(low ^ key) & mask)
    joined: np.ndarray = (high << half) | low
    return joined


def _mix(x: np.ndarray) -> np.ndarray:
    """Applies the finalizer of SplitMix64 (Steele, Lea and Flood, 2014) to uint64 values."""
    # Products of uint64 arrays wrap modulo 2**64 without a warning. NumPy scalars would warn.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _keys(seed: int, epoch: int) -> np.ndarray:
    """Returns the round keys of an epoch, uint64 [_ROUNDS]."""
    return np.frombuffer(_digest("order", seed, epoch), dtype="<u8")[:_ROUNDS].astype(np.uint64)


def _digest(purpose: str, seed: int, epoch: int) -> bytes:
    """Hashes seed and epoch to 64 bytes. `purpose` separates independent uses."""
    return hashlib.blake2b(
        f"{purpose} {int(seed)} {int(epoch)}".encode(), digest_size=8 * _ROUNDS
    ).digest()


IGNORED = -100
"""Target without a loss, the default ignore_index of torch's cross entropy."""
Rows = tuple[np.ndarray, ...]
"""Tokens and targets, int64 [n, seq_length] each, and optionally document numbers, int32."""
Origin = dict[str, int | str]
"""Start of a sample: usually its `document`, from 0, and the `offset` of the token in it."""


class SampleSource(Protocol):
    """A source of training samples.

    A place is one or more integers with which the source finds a sample.
    """

    @property
    def seq_length(self) -> int:
        """Tokens per sample."""

    @property
    def masked(self) -> bool:
        """Whether some targets are IGNORED. Then the number of targets differs between samples."""

    @property
    def sha256(self) -> str:
        """Fingerprint of the data."""

    def draw(self, cursor: np.ndarray, seed: int) -> np.ndarray:
        """Returns the places of samples of a run.

        Args:
            cursor: Numbers of the samples since the start of the run, int64 [n].
            seed: Seed of the run.

        Returns:
            Places, int64 [n, ...].
        """

    def read(self, places: np.ndarray) -> Rows:
        """Reads samples.

        Args:
            places: Places, int64 [n, ...].

        Raises:
            DataError: A token is outside the vocabulary.
        """

    def origins(self, places: np.ndarray) -> list[Origin]:
        """Returns the origin of each sample.

        Args:
            places: Places, int64 [n, ...].
        """


class Samples(SampleSource, Protocol):
    """A source of samples with a length."""

    def __len__(self) -> int:
        """Returns the number of samples in an epoch or a full evaluation."""

    def spread(self, count: int) -> np.ndarray:
        """Returns the places of evenly spread samples, for evaluations.

        Args:
            count: Number of samples, at most the length.
        """


def epochs(cursor: np.ndarray, count: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Groups samples by epoch.

    Args:
        cursor: Numbers of the samples since the start of the run, int64 [n].
        count: Samples per epoch.

    Returns:
        For each epoch its number, a mask over `cursor`, bool [n], and the indices in the epoch.
    """
    number, index = np.divmod(cursor, count)
    groups = []
    for epoch in np.unique(number).tolist():
        in_epoch = number == epoch
        groups.append((epoch, in_epoch, index[in_epoch]))
    return groups


@dataclass(frozen=True, eq=False)
class Windows:
    """Samples as windows of a token array.

    The array is a ring. Each epoch starts at another offset, so the borders of windows move. All
    windows have seq_length + 1 tokens. Within an epoch, neighbors share one token: the last target
    of one window is the first input of the next.

    Attributes:
        tokens: Token ids [n].
        seq_length: Tokens per sample.
        vocab_size: Upper bound of the ids.
        eod: End token whose next target is ignored, since it belongs to another document. None
            keeps all targets.
        end: End token by which documents are numbered. None returns no numbers.
        documents: First token of each document, int64 [d]. None if unknown.
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
        """See SampleSource."""
        return self.eod is not None

    @cached_property
    def sha256(self) -> str:
        """See SampleSource."""
        return fingerprint(self.tokens)

    def __len__(self) -> int:
        # A window also needs the token after its last input.
        return (len(self.tokens) - 1) // self.seq_length

    def draw(self, cursor: np.ndarray, seed: int) -> np.ndarray:
        """See SampleSource. A place is the first token of a window, modulo the number of tokens."""
        starts = np.empty(len(cursor), dtype=np.int64)
        for epoch, in_epoch, index in epochs(cursor, len(self)):
            order = permute(index, len(self), seed, epoch)
            starts[in_epoch] = offset(len(self.tokens), seed, epoch) + order * self.seq_length
        return starts

    def spread(self, count: int) -> np.ndarray:
        """See Samples. Windows start at multiples of seq_length, without an epoch's offset."""
        return np.arange(count) * len(self) // count * self.seq_length

    def read(self, places: np.ndarray) -> Rows:
        """See SampleSource."""
        positions = (places[:, None] + np.arange(self.seq_length + 1)) % len(self.tokens)
        # Token files are not checked when they are opened, so each window is checked here.
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
        """See SampleSource. Without known documents, the origin is a token of the corpus."""
        starts = (places % len(self.tokens)).tolist()
        if self.documents is None:
            return [{"token": start} for start in starts]
        origins: list[Origin] = []
        for start in starts:
            document = int(np.searchsorted(self.documents, start, side="right")) - 1
            if document < 0:  # the first document of this part begins in another part
                origins.append({"token": start})
            else:
                offset = start - int(self.documents[document])
                origins.append({"document": document, "offset": offset})
        return origins


def rows_of(window: np.ndarray, eod: int | None, end: int | None) -> Rows:
    """Splits windows into tokens and targets.

    Args:
        window: Token ids, int64 [n, seq_length + 1].
        eod: See Windows.
        end: See Windows.

    Returns:
        Tokens, targets and, with `end`, document numbers.
    """
    tokens, targets = window[:, :-1], window[:, 1:]
    if eod is not None:
        targets = np.where(tokens == eod, IGNORED, targets)
    if end is None:
        return tokens, targets
    return tokens, targets, _documents(tokens == end)


def _documents(ends: np.ndarray) -> np.ndarray:
    """Numbers the documents in each row from 0, int32. `ends` marks last tokens, bool [n, seq]."""
    # Minus `ends`: an end token belongs to the document before it.
    numbers: np.ndarray = np.cumsum(ends, axis=1, dtype=np.int32) - ends
    return numbers


def positive(**values: int) -> None:
    """Raises DataError for a value below 1."""
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{name}={value} must be at least 1")


_PERIOD = 100_000


def shares(weights: Sequence[float]) -> list[int]:
    """Converts weights to integers with the same ratios: 0.7 and 0.3 become 7 and 3.

    Args:
        weights: Weights of the sources.

    Returns:
        Integers with a sum of at most 100,000, the period of the schedule. Other weights are
        rounded to this sum.

    Raises:
        DataError: A weight is rounded to 0.
    """
    # Through str: Fraction(0.7) would be the exact binary value, with a huge denominator.
    exact = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(share.denominator for share in exact))
    parts = [int(share * denominator) for share in exact]
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
    """Interleaves sources evenly.

    Args:
        parts: Samples per period of each source.

    Returns:
        The source of each sample of a period, int64 [sum(parts)].
    """
    # The n-th sample of a source belongs into the n-th of its equal intervals of the period. Among
    # the samples whose interval has begun, the earliest deadline goes first. This always succeeds.
    period = sum(parts)
    order = np.empty(period, dtype=np.int64)
    # Entries are the first slot, the deadline, the source, and n.
    coming = [(0, -(-period // part), source, 1) for source, part in enumerate(parts)]
    heapq.heapify(coming)
    ready: list[tuple[int, int, int]] = []
    for slot in range(period):
        while coming and coming[0][0] <= slot:
            _, due, source, n = heapq.heappop(coming)
            heapq.heappush(ready, (due, source, n))
        _, source, n = heapq.heappop(ready)
        order[slot] = source
        if n < parts[source]:
            first_slot = n * period // parts[source]
            deadline = -(-(n + 1) * period // parts[source])  # rounded up
            heapq.heappush(coming, (first_slot, deadline, source, n + 1))
    return order


@dataclass(frozen=True, eq=False)
class Mixture:
    """Samples of several sources with weights. A place has the source and a place in it."""

    sources: Sequence[Samples]
    weights: Sequence[float]

    @cached_property
    def _schedule(self) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Samples of each source per period, the source of each slot, and the number in it."""
        parts = shares(self.weights)
        order = schedule(parts)
        nth = np.empty_like(order)
        for source, part in enumerate(parts):
            nth[order == source] = np.arange(part)
        return parts, order, nth

    @property
    def seq_length(self) -> int:
        """Tokens per sample, equal for all sources."""
        return self.sources[0].seq_length

    @property
    def masked(self) -> bool:
        """See SampleSource."""
        return any(source.masked for source in self.sources)

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of the sources and their weights."""
        lines = [
            f"{part} {source.sha256}"
            for part, source in zip(self._schedule[0], self.sources, strict=True)
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def __len__(self) -> int:
        """Returns how many samples fit the weights without a repetition."""
        # An upper bound from the ratios, then down to the exact number.
        parts = self._schedule[0]
        lengths = np.array([len(source) for source in self.sources])
        count = len(parts) + min(
            len(source) * sum(parts) // part
            for source, part in zip(self.sources, parts, strict=True)
        )
        while count and any(self._counts(count) > lengths):
            count -= 1
        return count

    def draw(self, cursor: np.ndarray, seed: int) -> np.ndarray:
        """See SampleSource. Each source has epochs independent of the others."""
        numbers, index = self._assign_sources(cursor)
        places = np.stack([numbers, index], axis=1)
        for number, source in enumerate(self.sources):
            is_source = numbers == number
            if is_source.any():
                # Other seeds, so that sources of equal length have different orders.
                source_seed = (number << 64) + seed
                places[is_source, 1] = source.draw(index[is_source], source_seed)
        return places

    def spread(self, count: int) -> np.ndarray:
        """See Samples. Sources keep their weights."""
        numbers, index = self._assign_sources(np.arange(count))
        places = np.stack([numbers, index], axis=1)
        for number, source_count in enumerate(self._counts(count).tolist()):
            if source_count:
                places[numbers == number, 1] = self.sources[number].spread(source_count)
        return places

    def read(self, places: np.ndarray) -> Rows:
        """See SampleSource."""
        # One read per source, scattered to the rows of its samples.
        rows: list[np.ndarray] = []
        for number, source in enumerate(self.sources):
            is_source = places[:, 0] == number
            if not is_source.any():
                continue
            source_rows = source.read(places[is_source, 1])
            if not rows:
                shape = (len(places), self.seq_length)
                rows = [np.empty(shape, dtype=part.dtype) for part in source_rows]
            for full, part in zip(rows, source_rows, strict=True):
                full[is_source] = part
        return tuple(rows)

    def origins(self, places: np.ndarray) -> list[Origin]:
        """See SampleSource. "part" is the number of the source."""
        origins: list[Origin] = []
        for place in places:
            number = int(place[0])
            (origin,) = self.sources[number].origins(place[1:])
            origins.append({"part": number, **origin})
        return origins

    def _assign_sources(self, cursor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each sample, and its number within the source."""
        parts, order, nth = self._schedule
        period, slot = np.divmod(cursor, len(order))
        numbers = order[slot]
        return numbers, period * np.array(parts)[numbers] + nth[slot]

    def _counts(self, count: int) -> np.ndarray:
        """Returns how many of the first `count` samples come from each source."""
        parts, order, _ = self._schedule
        period, slot = divmod(count, len(order))
        remainder = np.bincount(order[:slot], minlength=len(parts))
        counts: np.ndarray = period * np.array(parts) + remainder
        return counts
