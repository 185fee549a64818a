"""State shards: the bytes of masters, moments, gradients and weights that storage.shard leaves on one of several ranks.

FSDP2 cuts each tensor by its rows, as many on every rank but the last ones; our own ZeRO gives whole tensors to owners. Neither
divides evenly, so that the bytes are those of a rank: by default of the one that has most, which is what a GPU must hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fsdp_sharding import by_fsdp2
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import Columns, columns_of, sharding
from fp8cfg.report import chart
from fp8cfg.report.memory.layout import Part, local_shapes
from fp8cfg.report.memory.operands import CODEC
from fp8cfg.report.memory.owners import owners

KINDS = {"weights": ("weight",), "masters": ("master_weight",), "gradients": ("weight_grad",), "moments": ("exp_avg", "exp_avg_sq")}
"""The storage columns of each kind."""
BLOCKS, BLOCK = ("fp8_block", "fp8_expand"), 128
"""The codecs of blocks of flat elements, and how many these have (numerics/codecs.py)."""
SPLIT = {"none": (), "zero1": ("masters", "moments"), "zero2": ("masters", "moments", "gradients"), "fsdp": tuple(KINDS)}
"""The kinds that each storage.shard splits between owners, and fsdp by rows."""


def shard_bytes(recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str, rank: int | None = None) -> dict[str, int]:
    """Bytes of the kinds that are split, on number `rank` of the part.shards ranks with the same parameters, by default on the one
    that has most of them. `linears` are the linear layers of `part`, and `backend` multiplies. Without adapters, whose few
    parameters are all that is trained beside them."""
    shard, shapes, moments = sharding(recipe.precision, part.shards), local_shapes(recipe, part), chart.row(recipe)
    columns = parameter_columns(recipe, linears, shapes)
    if not SPLIT[shard]:
        return {}
    if by_fsdp2(recipe, part.shards, backend):  # under zero1 and zero2 float32 masters, into which gradients are summed
        kinds = SPLIT["fsdp" if shard == "fsdp" else "zero2"]
        columns = {name: one if shard == "fsdp" else {**one, "master_weight": "fp32"} for name, one in columns.items()}
        elements = {name: shard_rows(shape[0], part.shards, rank or 0) * prod(shape[1:]) for name, shape in shapes.items()}
    else:
        (owner, loads), kinds = owner_of(recipe, part, linears), SPLIT[shard]
        rank = max(loads, key=lambda one: loads[one]) if rank is None else rank
        elements = {name: prod(shape) for name, shape in shapes.items() if owner[name] == rank}
    by_rows = by_fsdp2(recipe, part.shards, backend)
    plain = {**moments, **{k: "fp32" for k in KINDS["moments"] if moments[k] in BLOCKS}}
    for name in elements:  # FSDP2 leaves moments in float32 where shards are no whole blocks
        own = plain if by_rows and not whole_blocks(shapes[name], part.shards) else moments
        columns[name] = {**columns[name], **{k: own[k] for k in KINDS["moments"]}}
    return {kind: int(sum(count * sum(CODEC[columns[name][k]] for k in KINDS[kind]) for name, count in elements.items()))
            for kind in kinds}


def whole_blocks(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether each shard of a tensor of `shape` is whole blocks of a storage codec, and as many as the others
    (optim/low_bit/shards.py)."""
    return shape[0] % ranks == 0 and (shape[0] // ranks * prod(shape[1:])) % BLOCK == 0


def parameter_columns(recipe: Recipe, linears: list[PlannedLinear], names: Iterable[str]) -> dict[str, Columns]:
    """The storage columns of each parameter by name."""
    p, runs = recipe.precision, {f"{linear.name}.weight": linear.fp8 for linear in linears}
    kinds = {fp8: columns_of(p, fp8 is not None, bool(fp8)) for fp8 in (None, False, True)}
    return {name: kinds[runs.get(name)] for name in names}


def shard_rows(rows: int, ranks: int, rank: int = 0) -> int:
    """The rows of a tensor that FSDP2 leaves on `rank`: it is cut into chunks of one size (torch.chunk)."""
    chunk = -(-rows // ranks)
    return min(max(rows - rank * chunk, 0), chunk)


def owner_of(recipe: Recipe, part: Part, linears: list[PlannedLinear]) -> tuple[dict[str, int], dict[int, int]]:
    """Under ZeRO the rank that owns each parameter, and the bytes of state that each owner keeps."""
    shapes = local_shapes(recipe, part)
    columns = parameter_columns(recipe, linears, shapes)
    kept = [k for kind in SPLIT[sharding(recipe.precision, part.shards)] for k in KINDS[kind]]
    sizes = [round(prod(shape) * sum(CODEC[columns[name][k]] for k in kept)) for name, shape in shapes.items()]
    chosen, loads = owners(sizes, part.shards), dict[int, int]()
    for owner, count in zip(chosen, sizes, strict=True):
        loads[owner] = loads.get(owner, 0) + count
    return dict(zip(shapes, chosen, strict=True)), loads
