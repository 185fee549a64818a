"""Single pass memory: gradients of a step of one microbatch, which come as its activations go.

    loss        none of them is there, and all activations are
    layers      the output layer's, and those of the layers whose backward pass has ended
    embedding   all, and no activations any more

Where FSDP2 splits gradients report/memory/sharded_pass.py has the moments, and these come as one shard of each does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fsdp_sharding import by_fsdp2
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import SCALED, fp8_layers_alone, others, resolved
from fp8cfg.report.memory.layout import Part, microbatches, shard_degree
from fp8cfg.report.memory.operands import CODEC, stored_bytes
from fp8cfg.report.memory.sharded_pass import ShardedPass
from fp8cfg.report.memory.shards import (
    parameter_columns,
    stored_gradients,
    summed_with,
    trained_shapes,
)


class SinglePass:
    """Bytes at the moments of the backward pass beyond what stays from step to step and activations, where all gradients are taken
    to stay: of those that are not there yet, below 0. Groups are numbered as in ShardedPass."""

    adds_up = False

    def __init__(self, recipe: Recipe, part: Part, linears: Sequence[PlannedLinear]) -> None:
        p, shapes, found = recipe.precision, trained_shapes(recipe, part), Counter[str]()
        columns, stored = (
            parameter_columns(recipe, linears, shapes),
            stored_gradients(recipe, part, linears, by_rows=False),
        )
        codecs = {
            name: (
                each["weight_grad"]
                if each["weight_grad"] not in SCALED
                else stored.get(name, "fp32")
            )
            for name, each in columns.items()
        }
        sizes = {name: stored_bytes(codecs[name], prod(shape)) for name, shape in shapes.items()}
        for name, count in sizes.items():
            found[summed_with(name)] += count
        kinds = [resolved(p), others(p)] if fp8_layers_alone(p) else [resolved(p)]
        self.fresh = max(CODEC[each["weight_grad"]] for each in kinds)
        """Bytes an element of the gradient of a linear layer, which is not there before the backward pass of its group."""
        head = [
            n
            for name, n in sizes.items()
            if part.output and name in ("output_layer.weight", "embedding.weight")
        ]
        self.groups = [found[f"layers.{layer}"] for layer in reversed(part.layers)] + [
            found[""] - max(head, default=0)
        ]
        """Of each layer, the last first, and of all others but the output layer."""
        self.start = self.received = -float(found.total())
        """At the backward pass of the output layer, and before it."""

    def back(self, number: int) -> float:
        """In the backward pass of that group."""
        return -float(sum(self.groups[number:]))

    def summing(self, number: int) -> float:
        """At the end of that group's backward pass."""
        return self.back(number + 1)


class OneShardPass(ShardedPass):
    """The same where every rank has one shard of each gradient, which is as large as the gradient, once it is summed."""

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        part: Part,
        linears: list[PlannedLinear],
        backend: str,
        each: float,
    ) -> None:
        super().__init__(recipe, device, part, linears, backend, each)
        stored, found = stored_gradients(recipe, part, linears), Counter[str]()
        for name, shape in trained_shapes(recipe, part).items():
            found[summed_with(name)] += stored_bytes(stored.get(name, "fp32"), prod(shape))
        self.coming = [found[f"layers.{layer}"] for layer in reversed(part.layers)] + [found[""]]
        self.start -= found.total()
        self.received -= found.total()

    def back(self, number: int) -> float:
        """In the backward pass of that group."""
        return super().back(number) - sum(self.coming[number:])

    def summing(self, number: int) -> float:
        """At most from the end of that group's backward pass to the end of its reduction."""
        return super().summing(number) - sum(self.coming[number:])


def single_pass(
    recipe: Recipe, device: str, part: Part, linears: list[PlannedLinear], backend: str, each: float
) -> SinglePass | OneShardPass | None:
    """The gradients of a step of `part`, a whole model, on `device`, where `backend` multiplies and a gradient is made in `each`
    bytes an element; None where a step has several microbatches, or ranks have shards of gradients.
    """
    if recipe.trainer.strategy.pipeline_model_parallel_size > 1 or microbatches(recipe, part) > 1:
        return None
    if not by_fsdp2(recipe, part.shards, backend):
        return SinglePass(recipe, part, linears)
    return (
        OneShardPass(recipe, device, part, linears, backend, each)
        if shard_degree(recipe, part) == 1
        else None
    )
