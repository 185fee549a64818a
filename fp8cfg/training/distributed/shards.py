"""Shards of flat tensors: the elements that each rank sums or holds, cut into messages of bounded size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

MESSAGE = 32 * 1024 * 1024
"""Elements that the shares of all ranks in one message have together, at most."""


class Segment(NamedTuple):
    """Elements `start` to `stop`, flat, of tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


Share = list[Segment]
"""What one rank has of one message."""


def length(share: Share) -> int:
    """Elements of a share."""
    return sum(segment.stop - segment.start for segment in share)


def even_shares(sizes: Sequence[int], ranks: int) -> Iterator[list[Share]]:
    """For each message the share of every rank, where tensors of `sizes` elements, one behind the other, are dealt out evenly:
    a tensor may be cut anywhere, and only the shares of the last ranks may be smaller."""
    row = _Row(sizes, range(len(sizes)))
    for start in range(0, row.end, MESSAGE):
        stop = min(start + MESSAGE, row.end)
        part = -(-(stop - start) // ranks)
        yield [
            row.cut(min(start + r * part, stop), min(start + (r + 1) * part, stop))
            for r in range(ranks)
        ]


def owned_shares(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> Iterator[list[Share]]:
    """For each message the share of every rank, where tensor i is wholly that of rank `owners[i]`."""
    rows = [
        _Row(sizes, [i for i, owner in enumerate(owners) if owner == rank]) for rank in range(ranks)
    ]
    part = max(MESSAGE // ranks, 1)
    for start in range(0, max((row.end for row in rows), default=0), part):
        yield [row.cut(min(start, row.end), min(start + part, row.end)) for row in rows]


class _Row:
    """Tensors one behind the other."""

    def __init__(self, sizes: Sequence[int], tensors: Sequence[int]) -> None:
        self.tensors = tensors
        self.bounds = [0, *accumulate(sizes[i] for i in tensors)]
        self.end = self.bounds[-1]

    def cut(self, start: int, stop: int) -> Share:
        share = []
        while start < stop:
            at = bisect_right(self.bounds, start) - 1  # past empty tensors
            upto = min(stop, self.bounds[at + 1])
            share.append(Segment(self.tensors[at], start - self.bounds[at], upto - self.bounds[at]))
            start = upto
        return share
