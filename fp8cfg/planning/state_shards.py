"""State shards: the bytes of masters, moments, gradients and weights that storage.shard leaves on one of several ranks.

FSDP2 cuts each tensor by its rows, as many on every rank but the last ones; our own ZeRO gives whole tensors to owners. Neither
divides evenly, so that the bytes are those of a rank: by default of the one that has most, which is what a GPU must hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.parallel.sharding import balance_over_ranks, shards_columns
from fp8cfg.planning import remarks
from fp8cfg.planning.layer_plan import adapted_projections, transformer_config
from fp8cfg.planning.layout import Part, local_shapes, microbatches, shard_degree, split_dimension
from fp8cfg.planning.linear_memory import CODEC, CODEC_BLOCK, stored_bytes
from fp8cfg.schema.fp8 import per_row
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.storage import SCALED, Columns, StateDtypes

KINDS = {
    "weights": ("weight",),
    "masters": ("master_weight",),
    "gradients": ("weight_grad",),
    "moments": ("exp_avg", "exp_avg_sq"),
}
"""The storage columns of each kind."""
BLOCKS = ("fp8_block", "fp8_expand")
"""The codecs of blocks of flat elements (numerics/codecs.py)."""
SPLIT = {
    "none": (),
    "zero1": ("masters", "moments"),
    "zero2": ("masters", "moments", "gradients"),
    "fsdp": tuple(KINDS),
}
"""The kinds that each storage.shard splits between owners, and fsdp by rows."""


def state_bytes(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str, rank: int | None = None
) -> dict[str, int]:
    """Bytes of masters, gradients and moments, with the scales of their codecs, and under fsdp of weights, on number `rank` of the
    part.shards ranks with the same parameters, by default on the one that has most of what is split. `linears` are the linear
    layers of `part`, and `backend` multiplies."""
    shard, shapes, moments = (
        part.shard,
        trained_shapes(recipe, part),
        remarks.chart_row(recipe, part.state),
    )
    columns, split = parameter_columns(part.state, linears, shapes), SPLIT[shard]
    by_rows = by_fsdp2(recipe, part.state, part.shards, backend)
    stored = stored_gradients(recipe, part, linears, by_rows)
    columns = {
        name: (
            {**one, "weight_grad": stored.get(name, "fp32")}
            if by_rows or one["weight_grad"] in SCALED
            else one
        )
        for name, one in columns.items()
    }
    whole = own = {name: prod(shape) for name, shape in shapes.items()}
    if by_rows:
        split = SPLIT["fsdp" if shard == "fsdp" else "zero2"]
        masters = {} if shard == "fsdp" else {"master_weight": "fp32"}
        columns = {name: {**one, **masters} for name, one in columns.items()}
        ranks = shard_degree(recipe, part)
        own = {
            name: shard_elements(part.state, name, shape, ranks, (rank or 0) % ranks)
            for name, shape in shapes.items()
        }
    elif split:
        owner, loads = owner_of(recipe, part, linears)
        rank = max(loads, key=lambda one: loads[one]) if rank is None else rank
        own = {name: count for name, count in whole.items() if owner[name] == rank}
    plain = {**moments, **{k: "fp32" for k in KINDS["moments"] if moments[k] in BLOCKS}}
    uncut = {
        name for name, shape in shapes.items() if keeps_blocks(recipe, part, name, shape, by_rows)
    }
    found = {}
    for kind in KINDS if "weights" in split else [kind for kind in KINDS if kind != "weights"]:
        found[kind] = 0
        for name, count in (own if kind in split else whole).items():
            # Moments are float32 where parts are no whole blocks.
            codecs = columns[name] if kind != "moments" else moments if name in uncut else plain
            for k in KINDS[kind]:
                found[kind] += stored_bytes(codecs[k], count)
    return found


def row_scales(recipe: Recipe, part: Part, linears: Iterable[PlannedLinear]) -> int:
    """Bytes of the scales of weights that are held in FP8 by rows, for products along either dimension: a float32 for each row and
    each column."""
    if not per_row(recipe.fp8):
        return 0
    shapes = local_shapes(recipe, part)
    return sum(4 * sum(shapes.get(f"{linear.name}.weight", ())) for linear in linears if linear.fp8)


def stored_gradients(
    recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], by_rows: bool = True
) -> dict[str, str]:
    """By name the codecs in which gradients, of shards or of whole tensors, are stored with scales: not of those whose blocks would
    be cut. These are float32."""
    shapes = trained_shapes(recipe, part)
    codecs = {
        name: columns["weight_grad"]
        for name, columns in parameter_columns(part.state, linears, shapes).items()
    }
    return {
        name: codec
        for name, codec in codecs.items()
        if codec in SCALED
        and (codec not in BLOCKS or keeps_blocks(recipe, part, name, shapes[name], by_rows))
    }


def until_stored(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear]) -> int:
    """Bytes that shards of gradients take more in float32 until FSDP2 has summed those that they are stored with, where each
    microbatch's are added to those before; else that is a layer's sum alone."""
    added = recipe.storage.accumulate == "wide" and part.shard in (
        "zero2",
        "fsdp",
    )
    if not added or microbatches(recipe, part) == 1:
        return 0
    shapes, more = trained_shapes(recipe, part), 0
    for name, codec in stored_gradients(recipe, part, linears).items():
        count = shard_elements(part.state, name, shapes[name], shard_degree(recipe, part))
        more += 4 * count - stored_bytes(codec, count)
    return more


def summed_with(name: str) -> str:
    """The layer of the parameter `name`, or nothing for those in none: gathered and summed together."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""


def whole_blocks(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether each shard of a tensor of `shape` is whole blocks of a storage codec, and as many as the others, or all of it
    (optim/low_bit/shards.py)."""
    return ranks == 1 or (
        shape[0] % ranks == 0 and (shape[0] // ranks * prod(shape[1:])) % CODEC_BLOCK == 0
    )


def keeps_blocks(
    recipe: Recipe, part: Part, name: str, shape: tuple[int, ...], by_rows: bool
) -> bool:
    """Whether what a rank has of the parameter `name`, of that `shape` in `part`, is whole blocks, also where FSDP2 cuts it."""
    return (not by_rows or whole_blocks(shape, shard_degree(recipe, part))) and blocks_of_columns(
        recipe, part, name, shape
    )


def blocks_of_columns(recipe: Recipe, part: Part, name: str, shape: tuple[int, ...]) -> bool:
    """Whether tensor parallelism leaves whole blocks in each run of a rank's part of the parameter `name`, of that `shape`."""
    if part.tensor == 1 or (split := split_dimension(recipe, name)) is None:
        return True
    gated = (
        name.split(".")[-2] == "linear_fc1"
        and transformer_config(recipe).fc1_size > recipe.model.ffn_hidden_size
    )
    return prod(shape[split:]) // (2 if gated else 1) % CODEC_BLOCK == 0


def trained_shapes(recipe: Recipe, part: Part) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by name that a rank of `part` trains, before storage.shard splits it: of all, or of adapters."""
    if not recipe.lora.enabled:
        return local_shapes(recipe, part)
    rank = recipe.lora.rank
    whole = {
        f"{p.module}.lora.{p.name}.lora_{matrix}": shape
        for p in adapted_projections(recipe)
        for matrix, shape in (("A", (rank, p.in_features)), ("B", (p.out_features, rank)))
    }
    return local_shapes(recipe, part, of=whole)


def parameter_columns(
    state: StateDtypes, linears: Sequence[PlannedLinear], names: Iterable[str]
) -> dict[str, Columns]:
    """The storage columns of each parameter by name."""
    runs_fp8 = {f"{linear.name}.weight": linear.fp8 for linear in linears}
    return {name: state.of_parameter(name in runs_fp8, runs_fp8.get(name, False)) for name in names}


def shard_elements(
    state: StateDtypes, name: str, shape: Sequence[int], ranks: int, rank: int = 0
) -> int:
    """The elements of the parameter `name` that FSDP2 leaves on `rank`; rank 0 has as many as it gives with its padding."""
    if shards_columns(state, name, shape, ranks):
        return prod(shape) // ranks
    return shard_rows(shape[0], ranks, rank) * prod(shape[1:])


def shard_rows(rows: int, ranks: int, rank: int = 0) -> int:
    """The rows of a tensor that FSDP2 leaves on `rank`: it is cut into chunks of one size (torch.chunk)."""
    chunk = -(-rows // ranks)
    return min(max(rows - rank * chunk, 0), chunk)


def owner_of(
    recipe: Recipe, part: Part, linears: list[PlannedLinear]
) -> tuple[dict[str, int], dict[int, int]]:
    """Under ZeRO the rank that owns each parameter, and the bytes of state that each owner keeps."""
    shapes = trained_shapes(recipe, part)
    columns = parameter_columns(part.state, linears, shapes)
    kept = [k for kind in SPLIT[part.shard] for k in KINDS[kind]]
    sizes = [
        round(prod(shape) * sum(CODEC[columns[name][k]] for k in kept))
        for name, shape in shapes.items()
    ]
    chosen, loads = balance_over_ranks(sizes, part.shards), dict[int, int]()
    for owner, count in zip(chosen, sizes, strict=True):
        loads[owner] = loads.get(owner, 0) + count
    return dict(zip(shapes, chosen, strict=True)), loads
