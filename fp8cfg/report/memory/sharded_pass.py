"""Sharded pass memory: whole weights and gradients that a backward pass has where FSDP2 shards them, as torch 2.13 frees them.

Layers are groups that go back one after the other, and embedding, last norm and output layer are a group that is summed at the end:

    weights    zero1 and zero2: of all groups, until one is back in the last pass of a step. fsdp: of that at the end, of the layer
               that goes back, and of the next one, which is gathered meanwhile
    gradients  of all groups where microbatches are added up before they are summed; else of the output layer and of the layer that
               goes back
    sums       once a layer is back and its weights are gone, its gradients are copied to be sent, and freed but for the last
               parameter's, which goes after the sum (foreach_reduce); the copy is kept until the next sum. gloo makes one more

Groups of ranks keep sums of each pass until it ends, beside the shards that they are cast to or added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import fp8_weights, gathered, gathers_params, resolved, sharding
from fp8cfg.report.memory.layout import Part, local_shapes, microbatches, summed_at_the_end
from fp8cfg.report.memory.operands import CODEC, held_beside
from fp8cfg.report.memory.shards import parameter_columns, trained_shapes


class _Group(NamedTuple):
    """Bytes of gathered weights, and the elements of gradients: of all, of the last parameter."""

    weights: float
    elements: int
    last: int


class ShardedPass:
    """Bytes more than what stays from step to step, than activations, and under zero1 than the gradients of all groups, which are
    there where `adds_up`. A gradient is made in `each` bytes an element. Groups are counted in the order in which they go back, the
    last of them that of what is in no layer."""

    def __init__(
        self, recipe: Recipe, device: str, part: Part, linears: Sequence[PlannedLinear], backend: str, each: float
    ) -> None:
        p, passes = recipe.precision, microbatches(recipe, part)
        shard, comm = sharding(p, part.shards), CODEC[resolved(p)["comm"]]
        self.fsdp, self.adds_up, self.each = shard == "fsdp", summed_at_the_end(recipe, part), each
        self.fresh = 0.0 if self.adds_up else each
        """Bytes of an element of a gradient that is not there before its group goes back."""
        self.copy = comm if self.fsdp else each
        self.sent = 0.0 if comm == self.copy else comm  # beside the copy (training/distributed/fsdp.py)
        self.inside = (self.sent or self.copy) if device == "cpu" else 0.0
        self.shards, self.stay = part.shards, shard == "zero2" and passes > 1
        self.in_groups = part.groups > 1 and (self.copy < 4 or recipe.storage.accumulate == "stored")
        pipeline = recipe.trainer.strategy.pipeline_model_parallel_size > 1
        self.let_go = not (pipeline or (shard == "zero2" and passes > 2))
        several = part.shards > 1  # one rank alone gathers nothing ahead
        self.ahead = several and len(part.layers) > part.chunks
        self.groups = _groups(recipe, part, linears, backend)
        shapes = trained_shapes(recipe, part) if part.output else {}
        vocabulary = (prod(shape) for name, shape in shapes.items() if name in ("output_layer.weight", "embedding.weight"))
        self.head = self.fresh * max(vocabulary, default=0)  # of the output layer, until the end
        self.pipeline, self.start = pipeline, 0.0
        if self.fsdp:  # the last layer's are gathered beside the output layer
            self.start = self.groups[-1].weights + several * (not pipeline) * self.groups[0].weights

    def back(self, number: int) -> float:
        """While that group goes back."""
        layer = number < len(self.groups) - 1
        weights = self.groups[-1].weights + layer * (self.groups[number].weights + self._next(number)) if self.fsdp else 0
        kept = self.copy * self.groups[number - 1].elements if number else 0
        return weights - self._gone(number, number) + self._summed(number) + self.head + kept

    def summing(self, number: int) -> float:
        """At most from the end of that group's backward pass to the end of its sum."""
        group, last = self.groups[number], number == len(self.groups) - 1
        share, copy = group.elements / self.shards, self.copy * group.elements
        outer = self.groups[-1].weights * (self.pipeline or not last)  # which stages let go after all passes
        weights = outer + self._next(number) if self.fsdp else 0
        there = weights - self._gone(number + 1, number) + self._summed(number)
        there += self.fresh * group.elements + (0 if last else self.head)
        freed = self.each * (group.elements - (group.last if self.shards > 1 else 0))
        during = self.sent * (group.elements + share) + self.inside * group.elements
        return there + max(copy, copy - freed + self.copy * share + max(during, 4 * share if self.copy < 4 else 0))

    def _next(self, number: int) -> float:
        """Bytes of the next layer's weights, which are gathered while one goes back."""
        return self.groups[number + 1].weights if self.ahead and number + 2 < len(self.groups) else 0

    def _gone(self, number: int, summed: int) -> float:
        """Bytes of weights under zero1 and zero2 that are let go before that group goes back; the first of two passes has them, and
        no shards of gradients but of so many groups."""
        if self.fsdp or not self.let_go:
            return 0
        weights = sum(group.weights for group in self.groups[:number])
        return min(weights, 4 * self._elements(summed, None) / self.shards) if self.stay else weights

    def _summed(self, number: int) -> float:
        """Bytes that the sums of groups before that one leave, less those of the gradients that they free."""
        count = self._elements(0, number) / self.shards
        return count * (self.copy * self.in_groups + (4 - self.each * self.shards) * self.adds_up)

    def _elements(self, first: int, end: int | None) -> int:
        return sum(group.elements for group in self.groups[first:end])


def _groups(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], backend: str) -> list[_Group]:
    """The layers of `part`, the last first, and what is in none."""
    p, fsdp = recipe.precision, sharding(recipe.precision, part.shards) == "fsdp"
    beside = held_beside(recipe) if gathers_params(p, backend) or not fsdp else 0
    in_fp8 = gathered(p, backend) == "fp8" if fsdp else fp8_weights(p)
    trained = trained_shapes(recipe, part)
    held = {f"{q.name}.weight": CODEC["fp8"] + beside for q in linears if in_fp8 and q.fp8}
    shapes = {**local_shapes(recipe, part), **trained} if fsdp else trained
    plain = {name: columns["weight"] for name, columns in parameter_columns(recipe, [*linears], shapes).items()} if not fsdp else {}
    found: dict[str, _Group] = {}
    for name, shape in shapes.items():
        group = name.split(".")[1] if name.startswith("layers.") else ""
        weights, elements, last = found.get(group, (0.0, 0, 0))
        count = prod(shape)
        own = count if name in trained else 0
        found[group] = _Group(weights + count * held.get(name, CODEC[plain.get(name, p.compute)]), elements + own, own or last)
    outer = found.pop("", _Group(0, 0, 0))
    return [found.get(str(layer), _Group(0, 0, 0)) for layer in reversed(part.layers)] + [outer]
