"""Collectives of a training step: what they carry, over which axis of the layout, and the bytes that one rank sends in them.

Bytes are those that leave a rank on a ring, as training counts them (training/distributed/traffic.py): of an all-reduce over N
ranks 2 (N - 1) / N of the data, of an all-gather N - 1 times a rank's part, of a reduce-scatter all parts but one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8cfg.config.recipe import Recipe
from fp8cfg.report.memory.layout import Part, shard_degree

NUMBER = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Collective:
    """So many collectives of one kind, `how`, that carry `what` over the ranks of `axis`, and the `bytes` that a rank sends in all
    of them."""

    axis: str
    what: str
    how: str
    count: int
    bytes: int

    def times(self, n: int) -> Collective:
        """The same, so often."""
        return replace(self, count=self.count * n, bytes=self.bytes * n)


class Axis(NamedTuple):
    """The `ranks` that take part, and their name."""

    name: str
    ranks: int

    def all_reduce(self, what: str, data: int, count: int = 1) -> Iterator[Collective]:
        """Sums or maxima of `data` bytes, so many."""
        yield from self._sent(what, "all-reduce", 2 * (self.ranks - 1) * data // self.ranks, count)

    def all_reduce_amaxes(self, numbers: int, count: int = 1) -> Iterator[Collective]:
        """Maxima of so many amaxes in each of `count` messages; none of no amaxes."""
        yield from self.all_reduce("amaxes", NUMBER * numbers, count * bool(numbers))

    def all_gather(self, what: str, part: int, count: int = 1) -> Iterator[Collective]:
        """Gathers of parts of `part` bytes each, so many."""
        yield from self._sent(what, "all-gather", (self.ranks - 1) * part, count)

    def all_gather_in(self, what: str, part: int, count: int) -> Iterator[Collective]:
        """Gathers of parts of `part` bytes in all of so many messages."""
        if self.ranks > 1 and count:
            yield Collective(self.name, what, "all-gather", count, (self.ranks - 1) * part)

    def reduce_scatter(self, what: str, part: int, count: int = 1) -> Iterator[Collective]:
        """Sums of which every rank keeps `part` bytes, so many."""
        yield from self._sent(what, "reduce-scatter", (self.ranks - 1) * part, count)

    def all_to_all(self, what: str, others: int, count: int = 1) -> Iterator[Collective]:
        """Exchanges in which this rank has `others` bytes for other ranks, in all of them."""
        if self.ranks > 1 and count:
            yield Collective(self.name, what, "all-to-all", count, others)

    def send(self, what: str, data: int, count: int = 1) -> Iterator[Collective]:
        """Messages to one other rank."""
        yield from self._sent(what, "send", data, count)

    def _sent(self, what: str, how: str, each: int, count: int) -> Iterator[Collective]:
        if self.ranks > 1 and count:
            yield Collective(self.name, what, how, count, each * count)


def same_parameters(part: Part) -> Axis:
    """The ranks with the same parameters as `part`, or of these the ranks that split them."""
    axes = {"data": part.data // part.groups, "context": part.context}
    return Axis(
        " x ".join(axis for axis, ranks in axes.items() if ranks > 1) or "data", part.shards
    )


def over_shards(recipe: Recipe, part: Part) -> Axis:
    """The ranks of these that have other shards of FSDP2's, and this one."""
    return same_parameters(part)._replace(ranks=shard_degree(recipe, part))


def together(every: Iterable[Collective]) -> list[Collective]:
    """One of each axis, what it carries, and kind, in the order in which they come."""
    found: dict[tuple[str, str, str], Collective] = {}
    for one in every:
        key = one.axis, one.what, one.how
        before = found.get(key, replace(one, count=0, bytes=0))
        found[key] = replace(one, count=before.count + one.count, bytes=before.bytes + one.bytes)
    return list(found.values())
