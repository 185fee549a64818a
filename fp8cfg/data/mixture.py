"""Mixture of sources: each sample comes from one of them, in exact shares, as Megatron's BlendedDataset deals them out.

Which source gives sample k, and its how-many-th that is, is a function of k alone, so that a run resumes from one integer. Of the
first k samples, source i with the share w_i gives k w_i, up or down by less than one sample: its n-th is due at k = n / w_i, may
come once k > (n - 1) / w_i, and of those that may come the first due goes first (the Pfair schedule of one processor; Baruah,
Cohen, Plaxton and Varvel, "Proportionate progress", 1996). Megatron's rule, the one that lags most, is within one sample for two
sources and not for many.

Each source has its own epochs: a small one with a large share is read several times while a large one is read once.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm

import numpy as np

from fp8cfg.data.errors import DataError
from fp8cfg.data.samples import Rows, Samples

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
