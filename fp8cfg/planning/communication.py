"""Communication of a step: all that one rank sends, once scales are set and moments are there, by axis, matter and collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning import collectives
from fp8cfg.planning import collectives as passes
from fp8cfg.planning.collectives import (
    NUMBER,
    Axis,
    Collective,
    amaxes_of_cut_tiles,
    gathered_bytes,
    of_written_weight,
    over_shards,
    same_parameters,
    together,
)
from fp8cfg.planning.fsdp_memory import MESSAGE
from fp8cfg.planning.layout import (
    Part,
    keeps_weights,
    local_shapes,
    microbatches,
    shard_degree,
    split_dimension,
)
from fp8cfg.planning.linear_memory import CODEC, held_beside
from fp8cfg.planning.peak_memory import linears_of
from fp8cfg.planning.state_shards import (
    BLOCKS,
    owner_of,
    parameter_columns,
    shard_elements,
    shard_rows,
    stored_gradients,
    summed_with,
    trained_shapes,
)
from fp8cfg.schema.fp8 import per_row, weights_2d
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2, gathered_plain
from fp8cfg.schema.scalings import SCALE_BYTES, SCALINGS
from fp8cfg.schema.storage import (
    PER_TENSOR,
    SCALED,
    fp8_weights,
    gathered,
    gathers_params,
    others,
    resolved,
    sharding,
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


def sent_elements(
    recipe: Recipe, part: Part, linears: list[PlannedLinear]
) -> dict[str, dict[str, int]]:
    """Elements of each trained parameter, by the codec in which its gradient is sent and its name."""
    shapes, found = trained_shapes(recipe, part), dict[str, dict[str, int]]()
    for name, columns in parameter_columns(recipe, linears, shapes).items():
        found.setdefault(columns["comm"], {})[name] = prod(shapes[name])
    return found


def summed(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], rank: int | None
) -> Iterator[Collective]:
    """Sums on every rank: an all-reduce; of FP8 in two hops, as training/distributed/quantized_allreduce.py has it."""
    axis = same_parameters(part)
    for comm, elements in sent_elements(recipe, part, linears).items():
        for start in range(0, total := sum(elements.values()), MESSAGE):
            count = min(MESSAGE, total - start)
            if comm not in SCALED:
                yield from axis.all_reduce("gradients", int(count * CODEC[comm]))
                continue
            share = -(-count // axis.ranks)
            own = max(0, min(share, count - (axis.ranks - 1 if rank is None else rank) * share))
            yield from axis.all_to_all("gradients", count - own)
            yield from axis.all_gather("gradients", share)
        if comm in SCALED:
            yield from axis.all_gather("scales", NUMBER * len(elements))
            yield from axis.all_reduce("scales", NUMBER * len(elements))


def shared_gradients(
    recipe: Recipe, part: Part, backend: str, rank: int | None = None
) -> Iterator[Collective]:
    """The gradients of parameters that all ranks which share matrices have, of their own tokens or heads, in one float32 sum; and
    of a tied embedding over the stages that have it."""
    heads = ("q_layernorm", "k_layernorm")
    sharded = by_fsdp2(recipe, part.shards, backend)
    ranks = shard_degree(recipe, part) if sharded else 1
    own = [
        prod((shard_rows(shape[0], ranks, (rank or 0) % ranks), *shape[1:]))
        for name, shape in local_shapes(recipe, part).items()
        if split_dimension(recipe, name) is None
        and (part.sequence_parallel or name.split(".")[-2] in heads)
    ]
    yield from Axis("tensor", part.tensor).all_reduce(
        "gradients", NUMBER * sum(own), count=bool(own)
    )
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    if (
        stages > 1
        and recipe.model.share_embeddings_and_output_weights
        and (part.embedding or part.output)
    ):
        rows, width = local_shapes(recipe, part)["embedding.weight"]
        each = NUMBER if sharded else CODEC[others(recipe.precision)["weight_grad"]]
        yield from Axis("pipeline", stages).send(
            "gradients", int(shard_rows(rows, ranks, (rank or 0) % ranks) * width * each)
        )


def summed_on_owners(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], rank: int | None
) -> Iterator[Collective]:
    """Sums on the owner of each tensor alone."""
    axis, (owner, _) = same_parameters(part), owner_of(recipe, part, linears)
    for comm, elements in sent_elements(recipe, part, linears).items():
        loads = _loads(elements, owner)
        own = (
            min(loads.get(one, 0) for one in range(axis.ranks))
            if rank is None
            else loads.get(rank, 0)
        )
        others = int((sum(loads.values()) - own) * CODEC[comm])
        yield from axis.all_to_all("gradients", others, _rounds(loads, axis.ranks))
        if comm in SCALED:
            yield from axis.all_gather("scales", NUMBER * len(elements))


def handed_round(recipe: Recipe, part: Part, linears: list[PlannedLinear]) -> Iterator[Collective]:
    """Weights from their owners to all, as they are stored, in messages as long as the longest of a rank; the scales of those in a
    codec; then the amaxes of FP8 weights, which owners recorded."""
    axis, (owner, _) = same_parameters(part), owner_of(recipe, part, linears)
    shapes = trained_shapes(recipe, part)
    columns = parameter_columns(recipe, linears, shapes)
    held = fp8_weights(recipe.precision)
    fp8 = {name for p in linears if held and p.fp8 and (name := f"{p.name}.weight") in shapes}
    stored = {
        name: int(
            prod(shape) * CODEC[columns[name]["weight"]]
            + (_beside(recipe, shape) if name in fp8 else 0)
        )
        for name, shape in shapes.items()
    }
    scales = {
        name: NUMBER for name in shapes if name not in fp8 and columns[name]["weight"] in SCALED
    }  # one for all of a weight
    for what, loads in (("weights", _loads(stored, owner)), ("scales", _loads(scales, owner))):
        if loads:
            yield from axis.all_gather_in(what, max(loads.values()), _rounds(loads, axis.ranks))
    if fp8 and SCALINGS[recipe.fp8.scaling].history:
        yield from axis.all_reduce("amaxes", NUMBER * len(fp8))


def _beside(recipe: Recipe, shape: tuple[int, ...]) -> float:
    """Bytes of the scales of a weight held in FP8, and of its other matrix where it has one."""
    fp8, scaling = recipe.fp8, SCALINGS[recipe.fp8.scaling]
    tile = scaling.tile(1, fp8.granularity, square=weights_2d(fp8))
    whole = NUMBER if tile is None or scaling.two_levels else 0
    if tile is None or tile[0] == tile[1]:
        tiles = prod(-(-n // side) for n, side in zip(shape, tile, strict=True)) if tile else 0
        return whole + SCALE_BYTES[scaling.scale] * tiles
    return whole + held_beside(recipe) * prod(shape) + (NUMBER * sum(shape) if per_row(fp8) else 0)


def _loads(sizes: dict[str, int], owner: dict[str, int]) -> dict[int, int]:
    loads: dict[int, int] = {}
    for name, count in sizes.items():
        loads[owner[name]] = loads.get(owner[name], 0) + count
    return loads


def _rounds(loads: dict[int, int], ranks: int) -> int:
    """Messages in which each rank sends, or gets, a part of what is its own."""
    return -(-max(loads.values()) // max(MESSAGE // ranks, 1))


def data_axis(
    recipe: Recipe,
    part: Part,
    linears: list[PlannedLinear],
    backend: str,
    passes: int,
    rank: int | None = None,
) -> Iterator[Collective]:
    """Gradients and weights over the ranks with the same parameters, of which this is number `rank`, by default one that sends
    most, in a step of so many `passes`."""
    if by_fsdp2(recipe, part.shards, backend):
        yield from fully_sharded(recipe, part, linears, backend, passes)
    elif sharding(recipe.precision, part.shards) == "zero2":
        yield from summed_on_owners(recipe, part, linears, rank)
        yield from handed_round(recipe, part, linears)
    else:
        yield from summed(recipe, part, linears, rank)
        if sharding(recipe.precision, part.shards) == "zero1":
            yield from handed_round(recipe, part, linears)


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
            *data_axis(recipe, part, linears, backend, count, rank),
            *shared_gradients(recipe, part, backend, rank),
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
                collectives.of_operand(fp8, linear, "weight") * linear.fp8
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
        if linear.fp8 and (amaxes := collectives.of_written_weight(recipe.fp8, linear)):
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
