"""Communication of gradients and weights: what ranks with the same parameters, or parts of them, send of these in a step."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fp8 import weights_2d
from fp8cfg.config.fsdp_sharding import by_fsdp2
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import SCALED, fp8_weights, gathered, low_bit, others, resolved, sharding
from fp8cfg.report.communication.collectives import NUMBER, Axis, Collective
from fp8cfg.report.communication.fp8_shards import amaxes_of_cut_tiles, gathered_bytes
from fp8cfg.report.memory.layout import Part, local_shapes, split_dimension
from fp8cfg.report.memory.operands import CODEC, held_beside
from fp8cfg.report.memory.shards import owner_of, parameter_columns, shard_rows
from fp8cfg.scalings import SCALINGS

MODULES = ("input_layernorm", "linear_qkv", "q_layernorm", "k_layernorm", "linear_proj", "post_self_attn_layernorm",
           "pre_mlp_layernorm", "linear_fc1", "linear_fc2", "post_mlp_layernorm")
"""The modules of a Transformer layer, in their order."""
FIRST, LATER = 1 << 20, 25 << 20
"""Bytes after which a bucket of gradients is full: of the first one, and of others (training/distributed/overlapped_sums.py)."""
MESSAGE = 32 * 1024 * 1024
"""Elements of a message, at most (training/distributed/shards.py)."""


def data_axis(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str, passes: int, rank: int | None = None
) -> Iterator[Collective]:
    """Gradients and weights over the ranks with the same parameters, of which this is number `rank`, by default one that sends
    most, in a step of so many `passes`."""
    if by_fsdp2(recipe, part.shards, backend):
        yield from _fully_sharded(recipe, part, linears, backend, passes)
    elif sharding(recipe.precision, part.shards) == "zero2":
        yield from _summed_on_owners(recipe, part, linears, rank)
        yield from _handed_round(recipe, part, linears)
    else:
        if not low_bit(recipe.precision) and not {*SCALED} & {*_sums(recipe, part, linears)}:
            yield from _summed_in_backward(recipe, part, linears)
        else:
            yield from _summed(recipe, part, linears, rank)
        if sharding(recipe.precision, part.shards) == "zero1":
            yield from _handed_round(recipe, part, linears)


def shared_gradients(recipe: Recipe, part: Part, backend: str, rank: int | None = None) -> Iterator[Collective]:
    """The gradients of parameters that all ranks which share matrices have, of their own tokens or heads, in one float32 sum; and
    of a tied embedding over the stages that have it."""
    heads = ("q_layernorm", "k_layernorm")
    sharded = by_fsdp2(recipe, part.shards, backend)
    cut = part.shards if sharded else 1
    own = [prod((shard_rows(shape[0], cut, (rank or 0) % cut), *shape[1:]))
           for name, shape in local_shapes(recipe, part).items()
           if split_dimension(recipe, name) is None and (part.sequence_parallel or name.split(".")[-2] in heads)]
    yield from Axis("tensor", part.tensor).all_reduce("gradients", NUMBER * sum(own), count=bool(own))
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    if stages > 1 and recipe.model.share_embeddings_and_output_weights and (part.embedding or part.output):
        rows, width = local_shapes(recipe, part)["embedding.weight"]
        each = NUMBER if sharded else CODEC[others(recipe.precision)["weight_grad"]]
        yield from Axis("pipeline", stages).send("gradients", int(shard_rows(rows, cut, (rank or 0) % cut) * width * each))


def name_of(part: Part) -> str:
    """The axes over which `part` has the same parameters elsewhere."""
    axes = {"data": part.data // part.groups, "context": part.context}
    return " x ".join(axis for axis, ranks in axes.items() if ranks > 1) or "data"


def _sums(recipe: Recipe, part: Part, linears: list[PlannedLinear]) -> dict[str, dict[str, int]]:
    """Elements of each trained parameter, by the codec in which its gradient is sent and its name."""
    shapes, found = local_shapes(recipe, part), dict[str, dict[str, int]]()
    for name, columns in parameter_columns(recipe, linears, shapes).items():
        found.setdefault(columns["comm"], {})[name] = prod(shapes[name])
    return found


def _summed(recipe: Recipe, part: Part, linears: list[PlannedLinear], rank: int | None) -> Iterator[Collective]:
    """Sums on every rank: an all-reduce; of FP8 in two hops, as training/distributed/quantized_allreduce.py has it."""
    axis = Axis(name_of(part), part.shards)
    for comm, elements in _sums(recipe, part, linears).items():
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


def _summed_in_backward(recipe: Recipe, part: Part, linears: list[PlannedLinear]) -> Iterator[Collective]:
    """Sums on every rank in buckets, which start in the backward pass (training/distributed/overlapped_sums.py)."""
    axis, shapes = Axis(name_of(part), part.shards), local_shapes(recipe, part)
    columns = parameter_columns(recipe, linears, shapes)
    full, filling = list[int](), dict[str, int]()
    for name in sorted(shapes, key=_in_model, reverse=True):
        comm = columns[name]["comm"]
        filling[comm] = filling.get(comm, 0) + int(prod(shapes[name]) * CODEC[comm])
        if filling[comm] >= (LATER if full else FIRST):
            full.append(filling.pop(comm))
    for bucket in (*full, *filling.values()):
        yield from axis.all_reduce("gradients", bucket)


def _in_model(name: str) -> tuple[int, int]:
    """The place of a parameter in the order of the modules."""
    first, *rest = name.split(".")
    if first != "layers":
        around = ("embedding", "position_embedding", "final_layernorm", "output_layer")
        return -1 if "embedding" in first else 1 << 30, around.index(first)
    return int(rest[0]), MODULES.index(rest[-2])


def _summed_on_owners(recipe: Recipe, part: Part, linears: list[PlannedLinear], rank: int | None) -> Iterator[Collective]:
    """Sums on the owner of each tensor alone."""
    axis, (owner, _) = Axis(name_of(part), part.shards), owner_of(recipe, part, linears)
    for comm, elements in _sums(recipe, part, linears).items():
        loads = _loads(elements, owner)
        own = min(loads.get(one, 0) for one in range(axis.ranks)) if rank is None else loads.get(rank, 0)
        others = int((sum(loads.values()) - own) * CODEC[comm])
        yield from axis.all_to_all("gradients", others, _rounds(loads, axis.ranks))
        if comm in SCALED:
            yield from axis.all_gather("scales", NUMBER * len(elements))


def _handed_round(recipe: Recipe, part: Part, linears: list[PlannedLinear]) -> Iterator[Collective]:
    """Weights from their owners to all, as they are stored, in messages as long as the longest of a rank; then the amaxes of FP8
    weights, which owners recorded."""
    axis, (owner, _) = Axis(name_of(part), part.shards), owner_of(recipe, part, linears)
    shapes = local_shapes(recipe, part)
    columns = parameter_columns(recipe, linears, shapes)
    held = fp8_weights(recipe.precision)
    fp8 = {name for p in linears if held and p.fp8 and (name := f"{p.name}.weight") in shapes}
    stored = {name: int(prod(shape) * CODEC[columns[name]["weight"]] + (_beside(recipe, shape) if name in fp8 else 0))
              for name, shape in shapes.items()}
    loads = _loads(stored, owner)
    yield from axis.all_gather_in("weights", max(loads.values()), _rounds(loads, axis.ranks))
    if fp8 and SCALINGS[recipe.fp8.scaling].history:
        yield from axis.all_reduce("amaxes", NUMBER * len(fp8))


def _beside(recipe: Recipe, shape: tuple[int, ...]) -> float:
    """Bytes of the scales of a weight held in FP8, and of its other matrix where it has one."""
    tile = SCALINGS[recipe.fp8.scaling].tile(1, recipe.fp8.granularity, square=weights_2d(recipe.fp8))
    if tile is None or tile[0] == tile[1]:
        return NUMBER * prod(-(-n // side) for n, side in zip(shape, tile, strict=True)) if tile else NUMBER
    return held_beside(recipe) * prod(shape)


def _loads(sizes: dict[str, int], owner: dict[str, int]) -> dict[int, int]:
    loads: dict[int, int] = {}
    for name, count in sizes.items():
        loads[owner[name]] = loads.get(owner[name], 0) + count
    return loads


def _rounds(loads: dict[int, int], ranks: int) -> int:
    """Messages in which each rank sends, or gets, a part of what is its own."""
    return -(-max(loads.values()) // max(MESSAGE // ranks, 1))


def _fully_sharded(recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str, passes: int) -> Iterator[Collective]:
    """FSDP2: weights are gathered a layer at a time, embedding, last norm and output layer together, and gradients summed so: under
    zero1 once a step, under zero2 and fsdp in each backward pass; under fsdp layers are gathered in each pass, twice, and what is
    in no layer in each forward pass, in stages once a step. Groups of ranks (HSDP) sum their parts once a step, of fewer bits than
    float32 as often as they are summed."""
    axis, apart = Axis(name_of(part), part.shards), Axis("replicate", part.groups)
    p, shard = recipe.precision, sharding(recipe.precision, part.shards)
    weight, sent, sums = CODEC[p.compute], CODEC[resolved(p)["comm"]], 1 if shard == "zero1" else passes
    over_groups = 1 if resolved(p)["comm"] == "fp32" else sums
    # FSDP2 leaves sums in the dtype of gradients where precision.compute is what is sent (training/distributed/fsdp.py).
    summed = max(sent, CODEC[resolved(p)["weight_grad"]]) if shard != "fsdp" and resolved(p)["comm"] == p.compute else sent
    rest = passes if recipe.trainer.strategy.pipeline_model_parallel_size == 1 else 1
    held = gathered(p, backend) == "fp8" if shard == "fsdp" else fp8_weights(p)
    shapes = local_shapes(recipe, part)
    in_fp8 = {name: shape for linear in linears if held and linear.fp8 and (shape := shapes.get(name := f"{linear.name}.weight"))}
    groups: dict[str, list[tuple[int, float]]] = {}  # elements of a shard, and bytes that it is gathered in
    for name, shape in shapes.items():
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        n = shard_rows(shape[0], part.shards) * prod(shape[1:])
        groups.setdefault(layer, []).append((n, gathered_bytes(p.fp8, shape, part.shards) if name in in_fp8 else n * weight))
    for layer, shards in groups.items():
        weights = int(sum(each for _, each in shards))
        part_bytes = int(sum(n for n, _ in shards) * sent)
        yield from axis.all_gather("weights", weights, (2 * passes if layer else rest) if shard == "fsdp" else 1)
        yield from axis.reduce_scatter("gradients", part_bytes, sums)
        yield from apart.all_reduce("gradients", int(sum(n for n, _ in shards) * summed), over_groups)
    numbers = sum(amaxes_of_cut_tiles(p.fp8, shape, part.shards) for shape in in_fp8.values())
    yield from axis.all_reduce("amaxes", NUMBER * numbers, bool(numbers))
    whole = len(in_fp8) if p.fp8.granularity == "tensor" and not SCALINGS[p.fp8.scaling].block else 0
    yield from Axis("tensor", part.tensor).all_reduce("amaxes", NUMBER * whole, bool(whole))
