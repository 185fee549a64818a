"""Communication of a step: all that one rank sends, once scales are set and moments are there, by axis, matter and collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fsdp_sharding import by_fsdp2
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import (
    PER_TENSOR,
    SCALED,
    fp8_weights,
    gathers_params,
    resolved,
    sharding,
)
from fp8cfg.report.communication import gradients, passes, shared_amaxes, state
from fp8cfg.report.communication.collectives import (
    NUMBER,
    Axis,
    Collective,
    over_shards,
    same_parameters,
    together,
)
from fp8cfg.report.memory.layout import Part, keeps_weights, microbatches, split_dimension
from fp8cfg.report.memory.peak import linears_of
from fp8cfg.report.memory.shards import (
    BLOCKS,
    owner_of,
    stored_gradients,
    summed_with,
    trained_shapes,
)
from fp8cfg.scalings import SCALINGS


def of_step(recipe: Recipe, part: Part, backend: str, rank: int | None = None) -> list[Collective]:
    """What a rank of `part`, number `rank` of those with the same parameters, by default one that sends most, sends in one
    optimizer step where `backend` multiplies; not what it sends to start, to save or to evaluate, nor what a run asks beside its
    steps: whether somebody wants to stop and, where amaxes are not shared, which tensors were infinite, a number each.
    """
    linears, count = linears_of(recipe, part), microbatches(recipe, part)
    samples = recipe.trainer.micro_batch_size
    kept = keeps_weights(recipe, part, backend) or gathers_params(recipe.precision, backend)
    in_passes = (
        *passes.of_pass(recipe, part, samples),
        *passes.numbers(recipe, part, linears, samples, kept),
    )
    return together(
        [
            *state.data_axis(recipe, part, linears, backend, count, rank),
            *gradients.shared_gradients(recipe, part, backend, rank),
            *(one.times(count) for one in in_passes),
            *_numbers(recipe, part, linears, backend),
            *_amaxes(recipe, part, linears, backend, rank),
            *_of_gradients(recipe, part, linears, backend),
            *_written(recipe, part, linears, backend, rank),
        ]
    )


def _numbers(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str
) -> Iterator[Collective]:
    """Once a step: the norm of gradients, the amaxes of delayed scaling, the mean loss."""
    shard, stages = (
        sharding(recipe.precision, part.shards),
        recipe.trainer.strategy.pipeline_model_parallel_size,
    )
    sharded = by_fsdp2(recipe, part.shards, backend)
    if shard == "zero2" or sharded:  # a norm of each parameter, or of its part
        for each in _kinds(recipe, part) if part.tensor > 1 else (len(_counted(recipe, part)),):
            over = over_shards(recipe, part) if sharded else same_parameters(part)
            yield from over.all_reduce("losses and norms", NUMBER * each)
    yield from Axis("tensor", part.tensor).all_reduce("losses and norms", NUMBER)
    yield from Axis("pipeline", stages).all_reduce("losses and norms", 2 * NUMBER)
    fp8 = recipe.fp8
    if fp8.enabled and SCALINGS[fp8.scaling].history and fp8.reduce_amax:
        layers = sum(3 for linear in linears if linear.fp8)
        yield from _over(recipe, part, data=not fp8.tp_only_amax_red).all_reduce_amaxes(layers)
    if keeps_weights(recipe, part, backend) and not fp8_weights(recipe.precision):
        for linear in linears:
            yield from Axis("tensor", part.tensor).all_reduce_amaxes(
                shared_amaxes.of_operand(fp8, linear, "weight") * linear.fp8
            )
    yield from _over(recipe, part, data=True, stages=stages).all_reduce("losses and norms", NUMBER)


def _amaxes(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str, rank: int | None
) -> Iterator[Collective]:
    """The amaxes of weight and moments of each parameter that this rank steps, for scales of whole tensors, where others have parts
    of it."""
    moments, sharded = resolved(recipe.precision), by_fsdp2(recipe, part.shards, backend)
    if not {moments["exp_avg"], moments["exp_avg_sq"]} & {*SCALED} - {*BLOCKS}:
        return
    owner = (
        {}
        if sharded or sharding(recipe.precision, part.shards) == "none"
        else owner_of(recipe, part, linears)[0]
    )
    stepped = Counter(owner.get(name, 0) for name in trained_shapes(recipe, part))
    each = 3 * NUMBER * (stepped[rank] if owner and rank is not None else max(stepped.values()))
    yield from Axis("tensor", part.tensor).all_reduce("amaxes", each)
    if sharded:
        yield from over_shards(recipe, part).all_reduce("amaxes", each)


def _of_gradients(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str
) -> Iterator[Collective]:
    """The amaxes of gradients that are stored with a scale of the whole tensor, where others have parts of it: of a layer as it is
    stored, in the last pass or in each, or of all in the step."""
    sharded, columns = by_fsdp2(recipe, part.shards, backend), resolved(recipe.precision)
    stored = stored_gradients(recipe, part, linears, sharded)
    layers = Counter(summed_with(name) for name, codec in stored.items() if codec in PER_TENSOR)
    each = recipe.storage.accumulate == "stored"
    early = sharded or part.shards == 1 or columns["comm"] == columns["weight_grad"]
    if not each and (not early or recipe.trainer.strategy.pipeline_model_parallel_size > 1):
        layers = Counter({"": layers.total()})
    for axis in (Axis("tensor", part.tensor), *([over_shards(recipe, part)] if sharded else [])):
        for count in layers.values():
            yield from axis.all_reduce_amaxes(count, microbatches(recipe, part) if each else 1)


def _written(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str, rank: int | None
) -> Iterator[Collective]:
    """The amaxes of each FP8 weight that this rank writes after a step, where its scales are of that moment and others have parts
    of it."""
    shard, untouched = (
        sharding(recipe.precision, part.shards),
        recipe.lora.enabled or SCALINGS[recipe.fp8.scaling].history,
    )
    if untouched or not fp8_weights(recipe.precision) or by_fsdp2(recipe, part.shards, backend):
        return
    owner = owner_of(recipe, part, linears)[0] if shard != "none" else {}
    written: dict[int, list[int]] = {}
    for linear in linears:
        if linear.fp8 and (amaxes := shared_amaxes.of_written_weight(recipe.fp8, linear)):
            written.setdefault(owner.get(f"{linear.name}.weight", 0), []).append(amaxes)
    mine = (
        max(written.values(), key=len, default=[])
        if rank is None or not owner
        else written.get(rank, [])
    )
    for amaxes in mine:
        yield from Axis("tensor", part.tensor).all_reduce_amaxes(amaxes)


def _kinds(recipe: Recipe, part: Part) -> tuple[int, int]:
    """How many of the parameters that are counted tensor parallelism splits, and how many it does not."""
    names = _counted(recipe, part)
    split = sum(split_dimension(recipe, name) is not None for name in names)
    return split, len(names) - split


def _counted(recipe: Recipe, part: Part) -> set[str]:
    """The trained parameters of which a rank of `part` has norms: all but an embedding that another stage counts."""
    return {*trained_shapes(recipe, part)} - ({"embedding.weight"} if not part.embedding else set())


def _over(recipe: Recipe, part: Part, data: bool, stages: int = 1) -> Axis:
    """All ranks, of one stage or of all, or those with the same layers and samples."""
    ranks = part.tensor * part.context * (part.data if data else 1) * stages
    names = {
        "data": part.data if data else 1,
        "context": part.context,
        "tensor": part.tensor,
        "pipeline": stages,
    }
    return Axis(" x ".join(name for name, n in names.items() if n > 1), ranks)
