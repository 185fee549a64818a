"""Sharded pass memory: whole weights and gradients that a backward pass has where FSDP2 shards them, as torch 2.13 frees them.

FSDP2 gathers the weights and reduces the gradients of a group of parameters at once (FSDPParamGroup). Each layer is one; embedding,
last norm and output layer are the root's, which is reduced last:

    weights    of all groups, each until its backward pass has ended in the last pass of a step. fsdp: of the root, of the layer
               whose backward pass runs, and of the next one, which is prefetched
    gradients  of all groups where those of several microbatches are reduced at once; else of the output layer, and of the layer
               whose backward pass runs
    reduction  once a layer's backward pass has ended and its weights are freed, its gradients are copied to be sent, and freed but
               for the last parameter's, which goes after the sum (foreach_reduce); the copy is kept until the next reduction. gloo
               makes one more

Where there is one shard (none) nothing is gathered or sent in parts, and torch divides a copy of what is summed. Groups of ranks
keep the sums of a pass until it ends, beside the shards that they are cast to or added to.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import SCALED, fp8_weights, gathered, gathers_params, resolved, sharding
from fp8cfg.report.memory.layout import (
    Part,
    local_shapes,
    microbatches,
    shard_degree,
    summed_at_the_end,
)
from fp8cfg.report.memory.operands import CODEC, held_beside
from fp8cfg.report.memory.shards import parameter_columns, summed_with, trained_shapes


class _Group(NamedTuple):
    """Bytes of a group's gathered weights, and the elements of its gradients: of all, of the last parameter."""

    weights: float
    elements: int
    last: int


class ShardedPass:
    """Bytes beyond what stays from step to step, activations, and the whole gradients of all groups where these `adds_up`. A
    gradient is made in `each` bytes an element. Groups are numbered in the order of their backward passes, the root's last.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        part: Part,
        linears: list[PlannedLinear],
        backend: str,
        each: float,
    ) -> None:
        p, passes = recipe.precision, microbatches(recipe, part)
        shard, comm = sharding(p, part.shards), CODEC[resolved(p)["comm"]]
        zero2, self.fsdp, self.shards, self.each = (
            shard == "zero2",
            shard == "fsdp",
            shard_degree(recipe, part),
            each,
        )
        self.adds_up = summed_at_the_end(recipe, part)
        """Whether all microbatches of a step are added up in whole gradients, and reduced in the last pass."""
        self.fresh = 0.0 if self.adds_up else each
        """Bytes an element of a gradient that is not there before the backward pass of its group."""
        self.copy = comm if shard in ("none", "fsdp") else each
        """Bytes an element of the copy that is reduced, and of the sum."""
        self.cast = 0.0 if comm == self.copy else comm
        """Bytes an element of what is sent in place of the copy, in another dtype (training/distributed/fsdp.py)."""
        self.gloo = (self.cast or self.copy) if device == "cpu" or self.shards == 1 else 0.0
        """Bytes an element of gloo's own copy, or of that which torch divides where there is one shard (torch 2.13)."""
        stores = (
            resolved(p)["weight_grad"] in SCALED and not self.adds_up
        )  # or they are in place of what was added up
        passed_on = self.copy < 4 or recipe.storage.accumulate == "stored" or stores
        self.keeps_sums = (part.groups > 1 or shard == "none") and passed_on
        """Whether sums of a group of ranks stay until the pass ends, beside what is made of them."""
        self.pipeline = recipe.trainer.strategy.pipeline_model_parallel_size > 1
        self.reshards = not (self.fsdp or self.pipeline or (zero2 and passes > 2))
        """Whether a group's weights are freed after its backward pass, in the widest pass of a step under zero1 and zero2."""
        self.two_passes = zero2 and passes > 1
        """Where it reshards: whether it does so in the second of two passes alone, which finds all shards of gradients."""
        self.prefetches = self.shards > 1 and len(part.layers) > part.chunks
        self.groups = _groups(recipe, part, linears, backend)
        shapes = trained_shapes(recipe, part) if part.output else {}
        vocabulary = (
            prod(shape)
            for name, shape in shapes.items()
            if name in ("output_layer.weight", "embedding.weight")
        )
        self.head = self.fresh * max(vocabulary, default=0)
        """Bytes of the output layer's gradient, which is there from the start to the reduction of the root."""
        gathers = (
            not (self.fsdp or self.pipeline) and passes == 1 and self.shards > 1
        )  # in the widest pass
        self.received = self.groups[0].weights if gathers else 0.0
        """Bytes in which the last layer's weights came from the ranks, which are there until the forward pass ends. Under fsdp the
        backward pass begins with as many."""
        self.start = 0.0
        """Bytes at the backward pass of the output layer, beside which the last layer's weights are prefetched."""
        if self.fsdp:
            self.start = (
                self.groups[-1].weights
                + (self.shards > 1 and not self.pipeline) * self.groups[0].weights
            )

    def back(self, number: int) -> float:
        """In the backward pass of that group."""
        layer = number < len(self.groups) - 1
        weights = (
            self.groups[-1].weights
            + layer * (self.groups[number].weights + self._prefetched(number))
            if self.fsdp
            else 0
        )
        copied = self.copy * self.groups[number - 1].elements if number else 0
        return weights - self._resharded(number, number) + self._summed(number) + self.head + copied

    def summing(self, number: int) -> float:
        """At most from the end of that group's backward pass to the end of its reduction."""
        group, root = self.groups[number], number == len(self.groups) - 1
        share, copy = group.elements / self.shards, self.copy * group.elements
        outer = self.groups[-1].weights * (
            self.pipeline or not root
        )  # which stages free after all passes
        weights = outer + self._prefetched(number) if self.fsdp else 0
        there = weights - self._resharded(number + 1, number) + self._summed(number)
        there += self.fresh * group.elements + (0 if root else self.head)
        freed = self.each * (group.elements - (group.last if self.shards > 1 else 0))
        during = self.cast * (group.elements + share) + self.gloo * group.elements
        return there + max(
            copy, copy - freed + self.copy * share + max(during, 4 * share if self.copy < 4 else 0)
        )

    def _prefetched(self, number: int) -> float:
        """Bytes of the weights of the layer after that one, which are gathered meanwhile."""
        return (
            self.groups[number + 1].weights
            if self.prefetches and number + 2 < len(self.groups)
            else 0
        )

    def _resharded(self, number: int, summed: int) -> float:
        """Bytes of the weights of the groups before that one, which are freed. The first of two passes has them, and shards of the
        gradients of so many `summed` groups alone: no more is gone than the other groups' shards take.
        """
        if not self.reshards:
            return 0
        weights = sum(group.weights for group in self.groups[:number])
        return (
            min(weights, 4 * self._elements(summed, None) / self.shards)
            if self.two_passes
            else weights
        )

    def _summed(self, number: int) -> float:
        """Bytes that the sums of the groups before that one leave, less those of the gradients that they free."""
        count = self._elements(0, number) / self.shards
        return count * (self.copy * self.keeps_sums + (4 - self.each * self.shards) * self.adds_up)

    def _elements(self, first: int, end: int | None) -> int:
        return sum(group.elements for group in self.groups[first:end])


def _groups(recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str) -> list[_Group]:
    """The layers of `part`, the last first, and the root."""
    p, fsdp = recipe.precision, sharding(recipe.precision, part.shards) == "fsdp"
    beside = held_beside(recipe) if gathers_params(p, backend) or not fsdp else 0
    in_fp8 = gathered(p, backend) == "fp8" if fsdp else fp8_weights(p)
    trained = trained_shapes(recipe, part)
    held = {f"{q.name}.weight": CODEC["fp8"] + beside for q in linears if in_fp8 and q.fp8}
    shapes = {**local_shapes(recipe, part), **trained} if fsdp else trained
    columns, none = parameter_columns(recipe, linears, shapes), _Group(0, 0, 0)
    found: dict[str, _Group] = {}
    for name, shape in shapes.items():
        weights, elements, last = found.get(summed_with(name), none)
        count = prod(shape)
        own = count if name in trained else 0
        each = held.get(name, CODEC[p.compute if fsdp else columns[name]["weight"]])
        found[summed_with(name)] = _Group(weights + count * each, elements + own, own or last)
    return [found.get(f"layers.{layer}", none) for layer in reversed(part.layers)] + [
        found.get("", none)
    ]
