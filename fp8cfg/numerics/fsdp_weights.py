"""FP8 all-gather of weights: FSDP2 gathers a float32 shard quantized, and GEMMs read the result.

    after a step    `refresh_shards` computes scales: one all-reduce (MAX) over the shards reduces the
                    amaxes of all weights
    pre-gather      this rank quantizes its rows, once per step, and sends them as bytes. Uneven shards
                    are padded
    post-gather     the bytes become a GatheredWeight [out, in] with its scales (fp8_weights.py)

A layer with FP8 primary weights has the same values, bit for bit. If dgrad reads another matrix than
fprop, both are gathered: as many bytes as bfloat16. A weight may be gathered in a codec instead
(`storage.weight`); each pass decodes it and quantizes it for FP8 GEMMs.

Read from top to bottom:

    shard_in_fp8            makes the weight of a layer a WeightShard, before fully_shard
    refresh_shards          scales of all weights, after each step
    FSDPShard               state of one shard: place, scales, quantized rows
    compute_shard_amaxes            amaxes of a shard; their maximum over the shards sets the scales
    quantize_shard         quantizes a shard with these scales
    WeightShard             the tensor that FSDP2 shards, with its two hooks

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather`
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py). torchao's WeightWithDynamicFloat8CastTensor does
the same for its layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fp8cfg.numerics.amax import (
    AmaxGroup,
    all_reduce_max_or_nan,
    compute_tile_amax,
    record_amax,
    replace_nan,
    running_max,
    sharing_group,
    split_tiles,
    tile_shape,
)
from fp8cfg.numerics.codecs import Codec
from fp8cfg.numerics.formats import cast
from fp8cfg.numerics.fp8_linear import FP8Linear
from fp8cfg.numerics.fp8_weights import FP8Weight, GatheredWeight, pack, quantized_dims
from fp8cfg.numerics.kernels.store import (
    compute_amaxes,
    store_nvfp4_fused,
    store_scaled,
    store_tiles_fused,
)
from fp8cfg.numerics.quantize import count_out_of_range, quantize_tiles
from fp8cfg.numerics.scaling import (
    WEIGHT,
    Scaling,
    TileScales,
    global_scale_from_amax,
    scales_from_amaxes,
    tile_scales_from_amaxes,
)
from fp8cfg.numerics.stored_state import amax_record
from fp8cfg.schema.scalings import SCALE_BYTES, Tile

FIELDS = {1: ("data", "scale_inv"), 0: ("dgrad", "dgrad_scale_inv")}
"""Fields of `FP8Weight` by the dimension that a GEMM contracts: 1 for fprop, 0 for dgrad."""
FLOAT32 = 4
"""Bytes of a float32."""


def shard_in_fp8(layer: FP8Linear, codec: Codec | None = None) -> None:
    """Lets FSDP2 gather the weight of `layer` in FP8, or in `codec`. Call it before fully_shard."""
    weight = layer.parameter
    shard = WeightShard(weight.detach())
    layer._parameters["weight"] = nn.Parameter(shard, requires_grad=weight.requires_grad)
    layer.fsdp_shard = FSDPShard(layer.scaling, codec)


@torch.no_grad()
def refresh_shards(layers: Iterable[FP8Linear]) -> None:
    """Computes the scales of all weights gathered in FP8 or in a codec.

    One all-reduce covers all weights, and a second one the shards of tensor parallelism. All ranks call
    it after each optimizer step, once `update_scales` has moved delayed scales, and after each load.

    Args:
        layers: FP8 layers. All have the same scaling and codec. Layers without shards are ignored.
    """
    sharded = [(layer, layer.fsdp_shard) for layer in layers if layer.fsdp_shard is not None]
    if not sharded:
        return
    first_parameter: Any = sharded[0][0].parameter  # a DTensor
    mesh = first_parameter.device_mesh
    mesh_dim = mesh.ndim - 1  # with HSDP the first dimension replicates
    for layer, shard in sharded:
        shard.place = ShardPlace(
            rows=layer.out_features,
            ranks=mesh.size(mesh_dim),
            rank=mesh.get_local_rank(mesh_dim),
            splits_rows=sharing_group(layer.amax_group, WEIGHT, (1, 0)) is not None,
        )
        shard.scales = ShardScales()
        shard.quantized = None

    codec = sharded[0][1].codec
    scaling = sharded[0][1].scaling
    if codec is not None and not codec.per_tensor:
        return
    layer_amaxes = compute_shard_amaxes(
        [_local_shard(layer) for layer, _ in sharded],
        scaling,
        [shard.place for _, shard in sharded],
        keep_nan=codec is not None,
    )
    amaxes = [amax for amaxes_of_layer in layer_amaxes for amax in amaxes_of_layer]
    if not amaxes:
        return  # no tile has elements on two ranks
    counts = [amax.numel() for amax in amaxes]
    flat = torch.cat([amax.flatten() for amax in amaxes])
    # As integers, as in `all_reduce_max_or_nan`: a maximum of floats may drop NaN.
    group = mesh.get_group(mesh_dim)
    dist.all_reduce(flat.view(torch.int32), dist.ReduceOp.MAX, group=group)

    if codec is not None:
        for (_, shard), scale_inv in zip(sharded, codec.scale_inv(flat).unbind(), strict=True):
            shard.scales = ShardScales(scale_inv)
        return
    flat = _reduce_over_tensor_ranks(sharded, flat, counts)
    if scaling.tile(WEIGHT, 1) is None:
        _set_tensor_scales(sharded, flat)
    else:
        _set_tile_scales(sharded, torch.split(flat, counts))


class FSDPShard:
    """This rank's shard of one weight gathered in FP8 or in a codec.

    Attributes:
        scaling: How the gathered weight is scaled.
        codec: The codec of the gathered weight, None for FP8.
        place: Rows of this rank, set by `refresh_shards`.
        scales: Scales, known to all ranks, set by `refresh_shards`.
        quantized: The quantized shard of this step, if FSDP2 gathers it several times per step.
        gathered_once: Whether FSDP2 gathers it once per step.
    """

    place: ShardPlace
    scales: ShardScales

    def __init__(self, scaling: Scaling, codec: Codec | None) -> None:
        self.scaling = scaling
        if codec is not None:
            # A codec scales whole tensors, as current scaling does.
            self.scaling = Scaling(kind="current")
        self.codec = codec
        self.quantized: FP8Weight | None = None
        self.gathered_once = False

    def quantize(self, shard: Tensor, history: Tensor) -> FP8Weight:
        """Quantizes this rank's rows, once per step.

        Args:
            shard: float32 [rows, in].
            history: The amax record of the layer.
        """
        if self.codec is not None:
            # Not cached: it is gathered once per step.
            scale_inv = self.scales.scale
            data = self.codec.encode(shard, None, scale_inv)[0]
            if scale_inv is None:
                scale_inv = torch.ones((), dtype=torch.float32, device=data.device)
            return FP8Weight(data, scale_inv)
        quantized = self.quantized
        if quantized is None:
            quantized = quantize_shard(shard, self.scaling, self.place, self.scales, history)
        self.quantized = quantized
        if self.gathered_once:
            self.quantized = None
        return quantized


class ShardPlace(NamedTuple):
    """Place of a shard in a weight, as FSDP2 splits it. Only the last shards have fewer rows.

    Attributes:
        rows: Rows of the weight.
        ranks: Number of shards.
        rank: Number of this shard.
        splits_rows: Whether tensor parallelism shards the columns, so that each row is split too.
    """

    rows: int
    ranks: int
    rank: int
    splits_rows: bool = False

    @property
    def first(self) -> int:
        """The first row of the shard."""
        return first_row(self.rows, self.ranks, self.rank)

    def cuts(self, tile: Tile) -> bool:
        """Tells whether ranks share tiles or have different numbers of rows.

        FSDP2 (torch 2.13) gathers only tensors of the padded shard's size. The scales of such tiles
        have another size, so all ranks compute all scales from reduced amaxes.
        """
        if tile[0] == 0 or (self.splits_rows and tile[1] == 0):
            return True
        return self.rows % (tile[0] * self.ranks) != 0


def first_row(rows: int, ranks: int, rank: int) -> int:
    """Returns the first row of a shard of `rows` rows over `ranks` ranks, as FSDP2 splits them."""
    return min(rank * -(-rows // ranks), rows)


class ShardScales(NamedTuple):
    """Scales of a weight, known to all ranks before the all-gather.

    Attributes:
        scale: float32 [], the scale of the weight; under a codec its inverse scale.
        amax: float32 [], the amax of the weight under NVFP4.
        global_scale: float32 [], NVFP4's scale of the weight.
        tiles: Scales [R / r, C / c] of tiles shared by ranks, by the contracted dimension.
    """

    scale: Tensor | None = None
    amax: Tensor | None = None
    global_scale: Tensor | None = None
    tiles: Mapping[int, TileScales] = {}


def _has_tensor_scale(scaling: Scaling) -> bool:
    """Whether a scale covers the whole weight: its only scale, or the global scale of NVFP4."""
    return scaling.tile(WEIGHT, 1) is None or scaling.layout.two_levels


def _tiles(scaling: Scaling) -> Iterator[tuple[int, Tile]]:
    """Yields each contracted dimension with its tile; nothing for one scale per tensor."""
    for dim in quantized_dims(scaling):
        tile = scaling.tile(WEIGHT, dim)
        if tile is not None:
            yield dim, tile


def _shared_tiles(scaling: Scaling, place: ShardPlace) -> Iterator[tuple[int, Tile]]:
    """Yields each contracted dimension whose tiles are shared by ranks, with its tile."""
    for dim, tile in _tiles(scaling):
        if place.cuts(tile):
            yield dim, tile


def split_fields(scaling: Scaling, place: ShardPlace) -> dict[str, int]:
    """Returns the fields of `FP8Weight` that are gathered, with their rows over all ranks."""
    fields = {}
    for dim in quantized_dims(scaling):
        data, _ = FIELDS[dim]
        fields[data] = place.rows
    for dim, tile in _tiles(scaling):
        if not place.cuts(tile):
            _, scale_inv = FIELDS[dim]
            fields[scale_inv] = place.rows // tile[0]
    return fields


def _amax_tiles(scaling: Scaling, place: ShardPlace) -> list[Tile | None]:
    """Returns the tile of each result of `compute_shard_amaxes`, None for the whole weight."""
    tiles: list[Tile | None] = []
    if _has_tensor_scale(scaling):
        tiles.append(None)
    tiles += [tile for _, tile in _shared_tiles(scaling, place)]
    return tiles


def amax_shapes(scaling: Scaling, place: ShardPlace, columns: int) -> list[tuple[int, ...]]:
    """Returns the shapes of the results of `compute_shard_amaxes`."""
    shapes: list[tuple[int, ...]] = []
    for tile in _amax_tiles(scaling, place):
        if tile is None:
            shapes.append(())
        else:
            shapes.append(_grid((place.rows, columns), tile))
    return shapes


def span_tensor_ranks(
    scaling: Scaling, place: ShardPlace, amax_group: AmaxGroup | None
) -> list[bool]:
    """Tells for each result of `compute_shard_amaxes` whether tensor-parallel ranks share its tiles."""
    tiles = _amax_tiles(scaling, place)
    return [sharing_group(amax_group, WEIGHT, tile) is not None for tile in tiles]


def compute_shard_amaxes(
    shards: Sequence[Tensor], scaling: Scaling, places: Sequence[ShardPlace], keep_nan: bool = False
) -> list[list[Tensor]]:
    """Computes the amaxes of shards. Their maximum over the shards of a weight sets its scales.

    Args:
        shards: One shard [rows, in] of each weight.
        scaling: The scaling of all weights.
        places: The places of the shards.
        keep_nan: Whether the amax of a shard is NaN if the shard has one. Always under NVFP4.

    Returns:
        For each shard its amax [], if the scaling needs it, and the amaxes [R / r, C / c] of all
        shared tiles of the weight, 0 for tiles outside the shard.
    """
    results: list[list[Tensor]] = [[] for _ in shards]
    if _has_tensor_scale(scaling):
        keep_nan = keep_nan or scaling.layout.two_levels
        amaxes = compute_amaxes(shards, keep_nan).unbind()
        for result, amax in zip(results, amaxes, strict=True):
            result.append(amax)
    for result, shard, place in zip(results, shards, places, strict=True):
        for _, tile in _shared_tiles(scaling, place):
            result.append(_tile_amaxes(shard, tile, scaling, place))
    return results


def compute_shard_scales(amaxes: list[Tensor], scaling: Scaling, place: ShardPlace) -> ShardScales:
    """Computes scales of tiles from the results of `compute_shard_amaxes`, reduced over all shards."""
    remaining = iter(amaxes)
    amax, global_scale = None, None
    if scaling.layout.two_levels:
        amax = next(remaining)
        global_scale = global_scale_from_amax(amax)
    tiles = {}
    for dim, _ in _shared_tiles(scaling, place):
        tiles[dim] = tile_scales_from_amaxes(
            next(remaining), scaling.forward, scaling, global_scale
        )
    return ShardScales(None, amax, global_scale, tiles)


def quantize_shard(
    shard: Tensor,
    scaling: Scaling,
    place: ShardPlace,
    scales: ShardScales,
    history: Tensor | None = None,
) -> FP8Weight:
    """Quantizes a shard to its rows of the quantized weight.

    Args:
        shard: float32 [rows, in].
        scaling: The scaling.
        place: The place of the shard.
        scales: Scales from `refresh_shards`. Other tiles are in this shard only and are scaled by
            their amax.
        history: Amax record [L, 3]. Row 0 receives infinite amaxes, and overflow is counted. The
            amaxes of shared tiles are in it already.
    """
    record = running_max(history, WEIGHT)
    if scales.scale is not None:
        return store_scaled(shard, scaling, scales.scale, record)
    if not scales.tiles:
        nvfp4_shard = store_nvfp4_fused(shard, scaling, history, amax=scales.amax)
        if nvfp4_shard is not None:
            return nvfp4_shard
    local_dims = [dim for dim, _ in _tiles(scaling) if dim not in scales.tiles]
    fused = store_tiles_fused(shard, scaling, local_dims, history)
    fields: dict[str, Tensor] = {}
    for dim, tile in _tiles(scaling):
        if dim in fused:
            data, scale_inv = fused[dim]
        else:
            data, scale_inv = _quantize_rows(shard, dim, tile, scaling, place, scales, record)
            scale_inv = pack(scale_inv, scaling)
        data_field, scale_field = FIELDS[dim]
        fields[data_field] = data
        fields[scale_field] = scale_inv
    if record is not None and not fused:  # kernels count themselves
        count_out_of_range(shard, WEIGHT, record, None, scaling.forward)
    global_scale_inv = None
    if scales.global_scale is not None:
        global_scale_inv = scales.global_scale.reciprocal()
    return FP8Weight(**fields, global_scale_inv=global_scale_inv)


def _quantize_rows(
    shard: Tensor,
    dim: int,
    tile: Tile,
    scaling: Scaling,
    place: ShardPlace,
    scales: ShardScales,
    record: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns float8 data and float32 inverse scales for a GEMM that contracts `dim`."""
    fmt = scaling.forward
    shared = scales.tiles.get(dim)
    if shared is not None:
        scale = _scale_of_elements(shared.encode, shard, tile, place)
        return cast(shard.float() * scale, fmt), shared.decode
    if not len(shard):  # fewer rows than ranks
        columns = _grid((1, shard.shape[1]), tile)[1]
        scale_inv = torch.zeros(0, columns, dtype=torch.float32, device=shard.device)
        return shard.to(fmt.dtype), scale_inv
    operand = quantize_tiles(
        shard, tile, fmt, scaling, fmt.dtype, scales.global_scale, record=record
    )
    assert operand.scale_inv is not None
    return operand.data, operand.scale_inv


def stored_bytes(scaling: Scaling, rows: int, columns: int) -> int:
    """Returns the bytes of an FP8 weight [rows, columns] and its scales."""
    scale_bytes = 0
    for _, tile in _tiles(scaling):
        tile_rows, tile_columns = _grid((rows, columns), tile)
        scale_bytes += SCALE_BYTES[scaling.layout.scale] * tile_rows * tile_columns
    if _has_tensor_scale(scaling):
        scale_bytes += FLOAT32
    return len(quantized_dims(scaling)) * rows * columns + scale_bytes


def _grid(shape: tuple[int, int], tile: Tile) -> tuple[int, int]:
    """Returns the numbers of tiles along the rows and columns of a matrix."""
    tile_rows, tile_columns = tile_shape(shape, tile)
    return -(-shape[0] // tile_rows), -(-shape[1] // tile_columns)


def _tile_amaxes(shard: Tensor, tile: Tile, scaling: Scaling, place: ShardPlace) -> Tensor:
    """Returns the amaxes [R / r, C / c] of all tiles of the weight, 0 outside the shard."""
    grid = _grid((place.rows, shard.shape[1]), tile)
    amaxes = torch.zeros(grid, dtype=torch.float32, device=shard.device)
    if not len(shard):
        return amaxes
    first_tile, padding = 0, 0
    if tile[0]:
        first_tile, padding = divmod(place.first, tile[0])
    if padding:
        # The first tile begins in the shard of the rank before.
        shard = F.pad(shard, (0, 0, padding, 0))
    tiles = split_tiles(shard, tile)
    amax = compute_tile_amax(tiles, keep_nan=scaling.layout.scale != "float32")
    amaxes[first_tile : first_tile + len(tiles)] = amax[:, 0, :, 0]
    return amaxes


def _scale_of_elements(scales: Tensor, shard: Tensor, tile: Tile, place: ShardPlace) -> Tensor:
    """Expands the scales [R / r, C / c] of a weight to the elements of a shard."""
    _, tile_columns = tile_shape(tuple(shard.shape), tile)
    if tile[0]:
        rows = torch.arange(place.first, place.first + len(shard), device=shard.device)
        scales = scales[rows // tile[0]]
    return scales.repeat_interleave(tile_columns, 1)[:, : shard.shape[1]]


def _local_shard(layer: Any) -> Tensor:
    """Returns the float32 rows [rows, in] of this rank."""
    shard: Tensor = layer.parameter.to_local()._tensor
    return shard


def _reduce_over_tensor_ranks(
    sharded: list[tuple[FP8Linear, FSDPShard]], flat: Tensor, counts: Sequence[int]
) -> Tensor:
    """Reduces the amaxes of tiles that tensor-parallel ranks share, in one all-reduce.

    Args:
        sharded: The layers.
        flat: The results of `compute_shard_amaxes` of all layers, concatenated.
        counts: Number of elements of each result.

    Returns:
        The amaxes in the order of `flat`.
    """
    spans = []
    for layer, shard in sharded:
        spans += span_tensor_ranks(layer.scaling, shard.place, layer.amax_group)
    if not any(spans):
        return flat
    pieces = list(torch.split(flat, list(counts)))
    shared_indices = [index for index, span in enumerate(spans) if span]
    amax_group = sharded[0][0].amax_group
    assert amax_group is not None, "tensor parallelism splits all layers over the same ranks"
    shared = torch.cat([pieces[index] for index in shared_indices])
    reduced = all_reduce_max_or_nan(shared, amax_group.group)
    reduced_pieces = torch.split(reduced, [counts[index] for index in shared_indices])
    for index, piece in zip(shared_indices, reduced_pieces, strict=True):
        pieces[index] = piece
    return torch.cat(pieces)


def _set_tensor_scales(sharded: list[tuple[FP8Linear, FSDPShard]], amaxes: Tensor) -> None:
    """Records the amaxes [layers] and sets one scale per weight. Launches few kernels."""
    layers = [layer for layer, _ in sharded]
    scaling = layers[0].scaling
    records = [amax_record(layer)[0, WEIGHT] for layer in layers]
    torch._foreach_maximum_(records, list(amaxes.unbind()))
    delayed_scales = None
    if scaling.layout.history:
        # A frozen weight is quantized once, with its first scale, also after a load.
        first_scale = amaxes.new_full((), scaling.first_scale)
        scales = []
        for layer in layers:
            assert layer.fp8_scale is not None
            scale = first_scale
            if layer.parameter.requires_grad:
                scale = layer.fp8_scale[WEIGHT]
            scales.append(scale)
        delayed_scales = torch.stack(scales)
    weight_scales = scales_from_amaxes(amaxes, WEIGHT, scaling, delayed_scales)
    for (_, shard), scale in zip(sharded, weight_scales.unbind(), strict=True):
        shard.scales = ShardScales(scale)


def _set_tile_scales(sharded: list[tuple[FP8Linear, FSDPShard]], amaxes: Sequence[Tensor]) -> None:
    """Records the reduced results of `compute_shard_amaxes` and sets the scales of shared tiles."""
    remaining = iter(amaxes)
    for layer, shard in sharded:
        shapes = amax_shapes(layer.scaling, shard.place, layer.in_features)
        layer_amaxes = [next(remaining).view(shape) for shape in shapes]
        shard.scales = compute_shard_scales(layer_amaxes, layer.scaling, shard.place)
        record = amax_record(layer)[0, WEIGHT]
        for amax in layer_amaxes:
            record_amax(record, replace_nan(amax).amax())


_aten = torch.ops.aten
_KEEP = {
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.clone.default,
}
"""Operations with which FSDP2 pads, moves and copies a shard. The result is a shard too."""


class WeightShard(Tensor):
    """A float32 shard [rows, in] of a layer's weight. It is its own master weight."""

    _tensor: Tensor

    @staticmethod
    def __new__(cls, tensor: Tensor) -> WeightShard:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightShard({self._tensor})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_tensor"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], _: None, size: Any, stride: Any
    ) -> WeightShard:
        return WeightShard(inner["_tensor"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain_args, plain_kwargs = tree_map_only(
            WeightShard, lambda shard: shard._tensor, (args, kwargs or {})
        )
        result = func(*plain_args, **plain_kwargs)
        if func is _aten.copy_.default:
            return args[0]
        if func in _KEEP:
            return tree_map_only(Tensor, WeightShard, result)
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: FP8Linear, mp_policy: Any
    ) -> Any:
        """Returns the tensors to gather, and the metadata for `fsdp_post_all_gather`."""
        shard = module.fsdp_shard
        assert shard is not None
        quantized = shard.quantize(self._tensor, amax_record(module))
        fields = split_fields(shard.scaling, shard.place)
        if mesh.size() == 1:
            # With one rank torch 2.13 takes one tensor only. The rank has the rest already.
            fields = {"data": fields["data"]}
        gathered = []
        for name, rows in fields.items():
            padded_rows = -(-rows // mesh.size())
            gathered.append(_padded_bytes(getattr(quantized, name), padded_rows))
        metadata = (quantized, fields, module.weight_grad_dtype, shard.codec)
        return tuple(gathered), metadata

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Returns the gathered weight and the tensors whose memory FSDP2 manages."""
        quantized, fields, dtype, codec = metadata
        gathered = {}
        for output, (name, rows) in zip(outputs, fields.items(), strict=True):
            shard = getattr(quantized, name)
            gathered[name] = output.view(shard.dtype)[:rows]
        weight = quantized._replace(**gathered)
        if out is not None:
            out.set_tensors(weight)
            return None
        return GatheredWeight(weight, dtype, codec), outputs


def _padded_bytes(matrix: Tensor, rows: int) -> Tensor:
    """Pads a matrix to `rows` rows. Float8 becomes bytes: process groups do not know it."""
    if matrix.dtype.itemsize == 1:
        matrix = matrix.view(torch.uint8)
    if len(matrix) < rows:
        matrix = F.pad(matrix, (0, 0, 0, rows - len(matrix)))
    return matrix


@torch.no_grad()
def gather_master(parameter: Any) -> Tensor:
    """Gathers the float32 weight [out, in] of a DTensor. All ranks with a shard call it."""
    from torch.distributed.tensor import DTensor  # takes a second to load

    shard = parameter.to_local()
    # Of plain shards, so that the result is a plain tensor too.
    unwrapped = DTensor.from_local(
        getattr(shard, "_tensor", shard),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return unwrapped.full_tensor()
