"""Gradient buckets: bytes at the moments of the last backward pass in which whole gradients are copied to be summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from fp8cfg.report.memory.gradient_sums import Bucket, module_of
from fp8cfg.report.memory.shards import summed_with


class Layer(Protocol):
    """One layer: the `bytes` that it keeps for its backward pass, and beyond these those at the moments of that pass, and once the
    gradients of a module are there."""

    bytes: float

    def moments(self) -> Iterator[float]:
        """At each that can be the widest."""

    def summing(self, module: str) -> float:
        """Once the gradients of `module` are there."""


def of_buckets(
    buckets: Sequence[Bucket], numbers: Sequence[int], layers: Sequence[Layer], ahead: float, head: float,
    recomputed: tuple[float, float] | None, back: Callable[[int], float],
) -> Iterator[tuple[float, float]]:
    """Bytes beyond those that were kept, as each of `buckets` is copied, and in the backward pass of each layer beside buckets of
    another dtype; and of gradients that are not there yet, below 0, in the pass of a layer, counted from the last, as `back` says.
    `layers` have these `numbers`; before their backward passes `ahead` is gone, and `head` there with the output layer's gradient.
    Of `recomputed` ones each has kept the first number of bytes, and makes all but the second again."""
    places, beside, before = {f"layers.{n}": i for i, n in enumerate(numbers)}, 0, len(layers)
    for bucket in buckets:
        at = places.get(summed_with(bucket.last), -1 if "embedding" in bucket.last else len(layers))
        gone = ahead
        for place in range(len(layers) - 1, -1, -1):
            layer = layers[place]
            there = beside - gone + (layer.bytes - recomputed[1] if recomputed else 0)
            if at <= place < before and beside:
                yield there + max(layer.moments()), back(len(layers) - 1 - place)
            if at == place:
                yield there + layer.summing(module_of(bucket.last).split(".")[-1]) + bucket.bytes, -bucket.later
            gone += recomputed[0] if recomputed else layer.bytes
        if at < 0 or at == len(layers):
            yield beside + bucket.bytes + (-gone if at < 0 else head), -bucket.later
        beside, before = beside + bucket.beside, at
