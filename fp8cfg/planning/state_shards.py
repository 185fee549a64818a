"""State shards: bytes of weights, masters, moments and gradients on one rank with storage.shard.

FSDP2 splits each tensor by rows into equal chunks, except for the last ones. ZeRO assigns whole
tensors to owners. Neither divides evenly. The default is the rank with the most bytes, because all
GPUs have equal memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.parallel.sharding import balance_over_ranks, shards_columns
from fp8cfg.planning import remarks
from fp8cfg.planning.gemm_memory import ELEMENT_BYTES, STORAGE_BLOCK, stored_bytes
from fp8cfg.planning.layer_plan import adapted_projections, transformer_config
from fp8cfg.planning.layout import Part, local_shapes, microbatches, shard_degree, split_dimension
from fp8cfg.schema.fp8 import per_row
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.storage import SCALED, Columns, StateDtypes

# Storage columns of each kind of state.
STATE_KINDS = {
    "weights": ("weight",),
    "masters": ("master_weight",),
    "gradients": ("weight_grad",),
    "moments": ("exp_avg", "exp_avg_sq"),
}
# Storage dtypes with a scale for each block of flat elements (numerics/codecs.py).
BLOCK_DTYPES = ("fp8_block", "fp8_expand")
# Sharded kinds for each storage.shard.
SHARDED_KINDS = {
    "none": (),
    "zero1": ("masters", "moments"),
    "zero2": ("masters", "moments", "gradients"),
    "fsdp": tuple(STATE_KINDS),
}


def state_bytes(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], backend: str, rank: int | None = None
) -> dict[str, int]:
    """Returns bytes of masters, gradients and moments on a rank, with their scales.

    With storage.shard=fsdp the result has weights too.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        linears: Its linear layers.
        backend: Name of the backend of the FP8 layers.
        rank: Number among the `part.shards` ranks with the same parameters. Defaults to the rank
            with the most bytes of sharded state.
    """
    shard = part.shard
    is_fsdp2 = by_fsdp2(recipe, part.state, part.shards, backend)
    shapes = trained_shapes(recipe, part)
    columns = _state_columns(recipe, part, linears, shapes, is_fsdp2)
    all_elements = {name: prod(shape) for name, shape in shapes.items()}
    sharded = all_elements
    sharded_kinds = SHARDED_KINDS[shard]
    if is_fsdp2:
        # FSDP2 shards gradients under zero1 too.
        sharded_kinds = SHARDED_KINDS["zero2"]
        if shard == "fsdp":
            sharded_kinds = SHARDED_KINDS["fsdp"]
        ranks = shard_degree(recipe, part)
        fsdp_rank = (rank or 0) % ranks  # rank 0 has the most
        sharded = {
            name: shard_elements(part.state, name, shape, ranks, fsdp_rank)
            for name, shape in shapes.items()
        }
    elif sharded_kinds:
        owner, loads = zero_owners(recipe, part, linears)
        if rank is None:
            rank = max(loads, key=lambda candidate: loads[candidate])
        sharded = {name: count for name, count in all_elements.items() if owner[name] == rank}

    moments = remarks.chart_row(recipe, part.state)
    float32_moments = dict(moments)
    for column in STATE_KINDS["moments"]:
        if moments[column] in BLOCK_DTYPES:
            float32_moments[column] = "fp32"
    kinds = {}
    for kind, kind_columns in STATE_KINDS.items():
        if kind == "weights" and kind not in sharded_kinds:
            continue
        kinds[kind] = 0
        elements = all_elements
        if kind in sharded_kinds:
            elements = sharded
        for name, count in elements.items():
            dtypes = columns[name]
            if kind == "moments":
                # If a shard would cut a block of scales, its moments stay in float32.
                dtypes = float32_moments
                if keeps_blocks(recipe, part, name, shapes[name], is_fsdp2):
                    dtypes = moments
            for column in kind_columns:
                kinds[kind] += stored_bytes(dtypes[column], count)
    return kinds


def _state_columns(
    recipe: Recipe,
    part: Part,
    linears: Sequence[PlannedLinear],
    shapes: dict[str, tuple[int, ...]],
    is_fsdp2: bool,
) -> dict[str, dict[str, str]]:
    """Returns the storage dtypes of each parameter after sharding."""
    quantized = quantized_gradients(recipe, part, linears, is_fsdp2)
    is_fsdp = part.shard == "fsdp"
    columns: dict[str, dict[str, str]] = {}
    for name, parameter in parameter_columns(part.state, linears, shapes).items():
        columns[name] = dict(parameter)
        if is_fsdp2 or parameter["weight_grad"] in SCALED:
            # FSDP2's gradient shards are float32. So are gradients with blocks across shards.
            columns[name]["weight_grad"] = quantized.get(name, "fp32")
        if is_fsdp2 and not is_fsdp:
            columns[name]["master_weight"] = "fp32"  # zero1, zero2: the shards are the masters
    return columns


def row_scale_bytes(recipe: Recipe, part: Part, linears: Iterable[PlannedLinear]) -> int:
    """Returns bytes of the scales of FP8 weights with fp8.granularity=row.

    Each row has a float32 scale for fprop, each column one for dgrad.
    """
    if not per_row(recipe.fp8):
        return 0
    shapes = local_shapes(recipe, part)
    scales = 0
    for linear in linears:
        if linear.fp8:
            scales += sum(shapes.get(f"{linear.name}.weight", ()))
    return 4 * scales


def quantized_gradients(
    recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], is_fsdp: bool = True
) -> dict[str, str]:
    """Returns the storage dtypes of quantized gradients by parameter.

    Float32 gradients are left out, for example if a shard would cut blocks of scales.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        linears: Its linear layers.
        is_fsdp: Whether FSDP2 shards the gradients.
    """
    shapes = trained_shapes(recipe, part)
    dtypes = {}
    for name, columns in parameter_columns(part.state, linears, shapes).items():
        dtype = columns["weight_grad"]
        if dtype not in SCALED:
            continue
        if dtype not in BLOCK_DTYPES or keeps_blocks(recipe, part, name, shapes[name], is_fsdp):
            dtypes[name] = dtype
    return dtypes


def unquantized_gradient_bytes(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear]) -> int:
    """Returns additional bytes of FSDP2's gradient shards before they are quantized."""
    # With zero2 and fsdp, gradients of several microbatches accumulate in float32 shards and are
    # quantized after the last one. Otherwise only one layer's shards are float32 at a time.
    shard = part.shard
    if recipe.storage.accumulate != "wide" or shard not in ("zero2", "fsdp"):
        return 0
    if microbatches(recipe, part) == 1:
        return 0
    shapes = trained_shapes(recipe, part)
    additional = 0
    for name, dtype in quantized_gradients(recipe, part, linears).items():
        count = shard_elements(part.state, name, shapes[name], shard_degree(recipe, part))
        additional += 4 * count - stored_bytes(dtype, count)
    return additional


def fsdp_group(name: str) -> str:
    """Returns the FSDP2 group of a parameter: its layer "layers.N", or "" for the root group.

    FSDP2 gathers the weights of a group together and reduces its gradients together.
    """
    if not name.startswith("layers."):
        return ""
    return ".".join(name.split(".")[:2])


def whole_blocks(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether shards by rows are equal and consist of whole blocks (optim/low_bit/shards.py)."""
    if ranks == 1:
        return True
    if shape[0] % ranks:
        return False
    shard_size = shape[0] // ranks * prod(shape[1:])
    return shard_size % STORAGE_BLOCK == 0


def keeps_blocks(
    recipe: Recipe, part: Part, name: str, shape: tuple[int, ...], is_fsdp: bool
) -> bool:
    """Whether a rank's shard of a parameter consists of whole blocks.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        name: Name of the parameter.
        shape: Its shape after tensor parallelism.
        is_fsdp: Whether FSDP2 cuts it by rows.
    """
    if is_fsdp and not whole_blocks(shape, shard_degree(recipe, part)):
        return False
    return tensor_parallel_blocks(recipe, part, name, shape)


def tensor_parallel_blocks(recipe: Recipe, part: Part, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor-parallel shard consists of whole blocks of the full tensor."""
    # Blocks run over flat elements of the full tensor. A shard is one contiguous run per row, or a
    # single run. Gate and up of a gated linear_fc1 are two runs.
    if part.tensor == 1:
        return True
    dimension = split_dimension(recipe, name)
    if dimension is None:
        return True
    run = prod(shape[dimension:])
    is_gated = transformer_config(recipe).fc1_size > recipe.model.ffn_hidden_size
    if is_gated and name.split(".")[-2] == "linear_fc1":
        run //= 2
    return run % STORAGE_BLOCK == 0


def trained_shapes(recipe: Recipe, part: Part) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a rank's trained parameters before storage.shard.

    With LoRA these are the adapters, otherwise all parameters of `part`.
    """
    if not recipe.lora.enabled:
        return local_shapes(recipe, part)
    rank = recipe.lora.rank
    shapes: dict[str, tuple[int, ...]] = {}
    for projection in adapted_projections(recipe):
        prefix = f"{projection.module}.lora.{projection.name}"
        shapes[f"{prefix}.lora_A"] = (rank, projection.in_features)
        shapes[f"{prefix}.lora_B"] = (projection.out_features, rank)
    return local_shapes(recipe, part, full_shapes=shapes)


def parameter_columns(
    state: StateDtypes, linears: Sequence[PlannedLinear], names: Iterable[str]
) -> dict[str, Columns]:
    """Returns the storage dtypes of each parameter."""
    runs_fp8 = {f"{linear.name}.weight": linear.fp8 for linear in linears}
    return {name: state.of_parameter(name in runs_fp8, runs_fp8.get(name, False)) for name in names}


def shard_elements(
    state: StateDtypes, name: str, shape: Sequence[int], ranks: int, rank: int = 0
) -> int:
    """Returns the elements of a rank's FSDP2 shard. Rank 0 has the most."""
    # LoRA's A matrices with fewer rows than ranks are sharded by columns.
    if shards_columns(state, name, shape, ranks):
        return prod(shape) // ranks
    return shard_rows(shape[0], ranks, rank) * prod(shape[1:])


def shard_rows(rows: int, ranks: int, rank: int = 0) -> int:
    """Returns the rows of a rank's FSDP2 shard."""
    # FSDP2 splits like torch.chunk: the last ranks may have fewer rows, or none.
    chunk = -(-rows // ranks)
    remaining = max(rows - rank * chunk, 0)
    return min(remaining, chunk)


def zero_owners(
    recipe: Recipe, part: Part, linears: list[PlannedLinear]
) -> tuple[dict[str, int], dict[int, int]]:
    """Returns the owner of each parameter under ZeRO, and the bytes of state of each owner."""
    shapes = trained_shapes(recipe, part)
    columns = parameter_columns(part.state, linears, shapes)
    sharded_columns: list[str] = []
    for kind in SHARDED_KINDS[part.shard]:
        sharded_columns += STATE_KINDS[kind]
    sizes = []
    for name, shape in shapes.items():
        element_bytes = sum(ELEMENT_BYTES[columns[name][column]] for column in sharded_columns)
        sizes.append(round(prod(shape) * element_bytes))
    ranks = balance_over_ranks(sizes, part.shards)
    loads: dict[int, int] = {}
    for rank, size in zip(ranks, sizes, strict=True):
        loads[rank] = loads.get(rank, 0) + size
    return dict(zip(shapes, ranks, strict=True)), loads


def rank_loads(sizes: Mapping[str, float], owners: Mapping[str, int], ranks: int) -> list[float]:
    """Sums the sizes of tensors by the rank that owns them under ZeRO.

    Args:
        sizes: Bytes or elements by parameter.
        owners: Owner of each parameter.
        ranks: Number of ranks.
    """
    loads = [0.0] * ranks
    for name, size in sizes.items():
        loads[owners[name]] += size
    return loads
