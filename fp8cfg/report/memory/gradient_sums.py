"""Gradient sums: bytes of what ranks that have whole gradients, or owners of them, send one another to add them up where FSDP2 does
not: after the backward pass, in messages (training/distributed/allreduce_steps.py). Owners hand weights round after the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

from fp8cfg.backends import backend_registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fsdp_sharding import by_fsdp2
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import PER_TENSOR, SCALED, others, resolved, sharding
from fp8cfg.report.memory.layout import Part, local_shapes, microbatches, shard_degree
from fp8cfg.report.memory.operands import CODEC
from fp8cfg.report.memory.shards import (
    owner_of,
    parameter_columns,
    shard_rows,
    stored_gradients,
    summed_with,
    trained_shapes,
)

MESSAGE = 32 * 1024 * 1024
"""Elements of a message, at most (training/distributed/shards.py)."""
PIECE = 1 << 16
"""Elements that a CPU looks up, decodes and adds up at a time (numerics/codecs.py, CHUNK)."""

WAITING, TOGETHER = 1 << 26, 4
"""Elements and tensors of gradients, at most, that wait there in float32 until they are stored together (optim/low_bit)."""


def after_backward(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], device: str, backend: str
) -> int:
    """The most that gradients take after the last backward pass to be summed, or weights to be handed round after the step."""
    tied = _tied(recipe, part, backend)
    if part.shards == 1 or by_fsdp2(recipe, part.shards, backend):
        return tied
    shapes, shard = trained_shapes(recipe, part), sharding(recipe.precision, part.shards)
    columns, widest = parameter_columns(recipe, linears, shapes), 0
    owner = owner_of(recipe, part, linears)[0] if shard != "none" else {}
    stored = stores_early(recipe, part, linears)
    for comm in {each["comm"] for each in columns.values()}:
        there = {
            name: columns[name]["weight_grad"] for name in shapes if columns[name]["comm"] == comm
        }
        sizes = {name: prod(shapes[name]) for name in there}
        copied = sum(
            sizes[name]
            for name, codec in there.items()
            if codec != comm or (codec in SCALED and not stored)
        )
        widest = max(
            widest, _summed(part, comm, sizes, copied, owner if shard == "zero2" else {}, device)
        )
    handed = _most(
        (owner[name], int(prod(shapes[name]) * CODEC[columns[name]["weight"]])) for name in owner
    )
    return max(tied, widest, (1 + part.shards) * min(handed, MESSAGE // part.shards))


def stores_early(recipe: Recipe, part: Part, linears: list[PlannedLinear]) -> bool:
    """Whether gradients that are stored with scales are so before ranks sum them (training/distributed/gradient_sync.py)."""
    every = parameter_columns(recipe, linears, trained_shapes(recipe, part)).values()
    return all(
        each["comm"] == each["weight_grad"] or each["weight_grad"] not in SCALED for each in every
    )


def waiting(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], backend: str) -> int:
    """Bytes of float32 gradients that wait until several, each with one scale, are stored together: of a layer where other ranks
    have parts, else on a GPU."""
    alone = (
        backend_registry.capabilities(backend).own_state or recipe.storage.accumulate == "stored"
    )
    if (
        alone
        or resolved(recipe.precision)["weight_grad"] not in PER_TENSOR
        or microbatches(recipe, part) > 1
    ):
        return 0
    if part.tensor == 1:
        largest = sorted((p.in_features * p.out_features for p in linears), reverse=True)
        return 4 * min(WAITING, sum(largest[:TOGETHER]))
    shapes, layers = trained_shapes(recipe, part), Counter[str]()
    for name in stored_gradients(recipe, part, linears):
        layers[summed_with(name)] += 4 * prod(shapes[name])
    return max(layers.values(), default=0)


def _summed(
    part: Part, comm: str, sizes: dict[str, int], copied: int, owner: dict[str, int], device: str
) -> int:
    """Bytes of messages in `comm` that sum gradients of these `sizes`, of which so many elements are `copied` into that before:
    what is sent and received in one, and the float32 sums of all; of an `owner` those of its own.
    """
    each, total = CODEC[comm], sum(sizes.values())
    message = min(MESSAGE, total)
    if comm not in SCALED and not owner:
        return int(each * (message + min(message, copied)))
    own = (
        _most((owner[name], count) for name, count in sizes.items())
        if owner
        else -(-total // part.shards)
    )
    received = min(part.shards * own, MESSAGE)
    decoded = 3 * min(own, PIECE) if device == "cpu" else 2 * min(own, max(sizes.values()))
    return int(each * (copied + message + received) + 4 * (own + decoded))


def _tied(recipe: Recipe, part: Part, backend: str) -> int:
    """Bytes of the gradient of a tied embedding that comes from the other stage that has it."""
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    if (
        stages == 1
        or not recipe.model.share_embeddings_and_output_weights
        or not (part.embedding or part.output)
    ):
        return 0
    rows, width = local_shapes(recipe, part)["embedding.weight"]
    if by_fsdp2(recipe, part.shards, backend):
        return shard_rows(rows, shard_degree(recipe, part)) * width * 4
    return int(rows * width * CODEC[others(recipe.precision)["weight_grad"]])


def _most(sizes: Iterable[tuple[int, int]]) -> int:
    """The largest load of an owner, of tensors each with its owner and size; 0 of none."""
    loads: dict[int, int] = {}
    for owner, count in sizes:
        loads[owner] = loads.get(owner, 0) + count
    return max(loads.values(), default=0)
