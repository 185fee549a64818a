"""Communication of FSDP2: weights gathered, and gradients summed, a layer at a time."""

from __future__ import annotations

from collections.abc import Iterator

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fsdp_sharding import gathered_plain
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import PER_TENSOR, fp8_weights, gathered, others, resolved, sharding
from fp8cfg.report.communication.collectives import Axis, Collective, over_shards, same_parameters
from fp8cfg.report.communication.fp8_shards import amaxes_of_cut_tiles, gathered_bytes
from fp8cfg.report.communication.shared_amaxes import of_written_weight
from fp8cfg.report.memory.layout import Part, local_shapes, shard_degree, split_dimension
from fp8cfg.report.memory.operands import CODEC
from fp8cfg.report.memory.shards import (
    parameter_columns,
    shard_elements,
    summed_with,
    trained_shapes,
)


def fully_sharded(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str, passes: int
) -> Iterator[Collective]:
    """FSDP2: weights are gathered a layer at a time, embedding, last norm and output layer together, and gradients summed so: under
    zero1 once a step, under zero2 and fsdp in each backward pass; under fsdp layers are gathered in each pass, twice, and what is
    in no layer in each forward pass, in stages once a step. Groups of ranks (HSDP) sum their parts once a step, of fewer bits than
    float32 as often as they are added up; under none each rank is one. Weights beside adapters have no gradients, and are gathered
    under fsdp alone."""
    p, shard = recipe.precision, sharding(recipe.precision, part.shards)
    axis, ranks = over_shards(recipe, part), shard_degree(recipe, part)
    apart = same_parameters(part) if shard == "none" else Axis("replicate", part.groups)
    weight, sent, sums = (
        CODEC[gathered_plain(p)],
        CODEC[resolved(p)["comm"]],
        passes if shard in ("zero2", "fsdp") else 1,
    )
    # Sums, as training/distributed/fsdp.py keeps them.
    in_groups = sent if shard in ("none", "fsdp") else CODEC[others(p)["weight_grad"]]
    over_groups = 1 if in_groups == CODEC["fp32"] and p.storage.accumulate == "wide" else sums
    rest = passes if recipe.trainer.strategy.pipeline_model_parallel_size == 1 else 1
    held = gathered(p, backend) == "fp8" if shard == "fsdp" else fp8_weights(p)
    trained = trained_shapes(recipe, part)
    shapes = {**local_shapes(recipe, part), **trained} if shard == "fsdp" else trained
    in_fp8 = {
        name: shape
        for linear in linears
        if held and linear.fp8 and (shape := shapes.get(name := f"{linear.name}.weight"))
    }
    stored = parameter_columns(recipe, linears, shapes)
    by_columns = {name for name in in_fp8 if part.tensor > 1 and split_dimension(recipe, name) == 1}
    groups: dict[
        str, list[tuple[int, float]]
    ] = {}  # elements of a shard that are trained, and bytes that it is gathered in
    for name, shape in shapes.items():
        n = shard_elements(recipe, name, shape, ranks)
        plain = n * (weight if shard == "fsdp" else CODEC[stored[name]["weight"]])
        sent_as = (
            gathered_bytes(p.fp8, shape, ranks, name in by_columns) if name in in_fp8 else plain
        )
        groups.setdefault(summed_with(name), []).append((n if name in trained else 0, sent_as))
    for layer, shards in groups.items():
        weights = int(sum(each for _, each in shards))
        part_bytes = int(sum(n for n, _ in shards) * sent)
        yield from axis.all_gather(
            "weights", weights, (2 * passes if layer else rest) if shard == "fsdp" else 1
        )
        yield from axis.reduce_scatter("gradients", part_bytes, sums * bool(part_bytes))
        yield from apart.all_reduce(
            "gradients", int(sum(n for n, _ in shards) * in_groups), over_groups * bool(part_bytes)
        )
    written = {name: shape for name, shape in in_fp8.items() if name in trained}  # in each step
    of_shards = sum(
        amaxes_of_cut_tiles(p.fp8, shape, ranks, name in by_columns)
        for name, shape in written.items()
    )
    yield from axis.all_reduce_amaxes(of_shards)
    over_parts = sum(
        of_written_weight(p.fp8, linear) for linear in linears if f"{linear.name}.weight" in written
    )
    yield from Axis("tensor", part.tensor).all_reduce_amaxes(over_parts)
    scaled = sum(
        shard != "fsdp" and name not in in_fp8 and stored[name]["weight"] in PER_TENSOR
        for name in trained
    )
    yield from axis.all_reduce_amaxes(scaled)
