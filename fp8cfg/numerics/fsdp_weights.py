"""FP8 all-gather of weights: a float32 shard that FSDP2 gathers quantized, and the weight that products read once it is gathered.

    after a step    the amaxes of each weight that no rank has alone, a MAX over its shards, in one collective for all layers
    pre-gather      this rank's rows are quantized, once a step, and sent as bytes, padded where ranks have uneven shards
    post-gather     the bytes are the weight [out, in], with its scales

The numbers are those of a layer that holds its weight in float8 (fp8_weights.py), to the bit (fsdp_weights.py). Where dgrad reads
another matrix than fprop both are gathered, as many bytes as bfloat16 would be. A weight may be gathered in a codec instead
(`storage.weight`), which each pass decodes, before it quantizes it for FP8 products.

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` (torch/distributed/fsdp/_fully_shard/_fsdp_param.py); torchao's
WeightWithDynamicFloat8CastTensor is the like of it for its own layers.
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
    split_tiles,
    tile_shape,
)
from fp8cfg.numerics.codecs import Codec
from fp8cfg.numerics.formats import cast
from fp8cfg.numerics.fp8_weights import FP8Weight, decoded, pack
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
"""The fields of `FP8Weight` of the matrix that a product reads which contracts a weight's dimension 1, or 0."""

FLOAT32 = 4


def first_row(rows: int, ranks: int, rank: int) -> int:
    """The row of a whole tensor that the shard of `rank` begins with, as FSDP2 cuts so many rows over `ranks`."""
    return min(rank * -(-rows // ranks), rows)


class ShardPlace(NamedTuple):
    """A shard of a weight of `rows` rows: that of number `rank` of `ranks`, which have as many rows each, but for the last ones.
    With `part_of_rows` it has some columns alone of a weight that tensor parallelism splits by columns.
    """

    rows: int
    ranks: int
    rank: int
    part_of_rows: bool = False

    @property
    def first(self) -> int:
        """The row of the weight that the shard begins with."""
        return first_row(self.rows, self.ranks, self.rank)

    def cuts(self, tile: Tile) -> bool:
        """Whether ranks have parts of one tile, or unlike numbers of rows: FSDP2 then takes nothing but tensors of the padded
        shard's size (torch 2.13), and scales are none."""
        return (
            tile[0] == 0
            or (self.part_of_rows and tile[1] == 0)
            or self.rows % (tile[0] * self.ranks) != 0
        )


class ShardScales(NamedTuple):
    """What all ranks know of the scales of a weight: the one `scale` of all of it, or nvfp4's first level, `whole`, with the `amax`
    [] that it is made of, and, by the dimension that a product contracts, the scales [R / r, C / c] of tiles that are cut.
    """

    scale: Tensor | None = None
    amax: Tensor | None = None
    whole: Tensor | None = None
    tiles: Mapping[int, TileScales] = {}


def axes(scaling: Scaling) -> tuple[int, ...]:
    """The dimensions of a weight for whose contraction there is a matrix."""
    return (1, 0) if scaling.directional(WEIGHT) else (1,)


def _tiles(scaling: Scaling) -> Iterator[tuple[int, Tile]]:
    for axis in axes(scaling):
        if (tile := scaling.tile(WEIGHT, axis)) is not None:
            yield axis, tile


def split_fields(scaling: Scaling, place: ShardPlace) -> dict[str, int]:
    """The fields of the stored weight of which each rank has rows of its own, with the rows of all of them together."""
    found = {FIELDS[axis][0]: place.rows for axis in axes(scaling)}
    return found | {
        FIELDS[axis][1]: place.rows // tile[0]
        for axis, tile in _tiles(scaling)
        if not place.cuts(tile)
    }


def _of_amaxes(scaling: Scaling, place: ShardPlace) -> list[Tile | None]:
    """Of each of what `shard_amaxes` gives the tile, None the whole weight."""
    one: list[Tile | None] = (
        [None] if scaling.tile(WEIGHT, 1) is None or scaling.layout.two_levels else []
    )
    return one + [tile for _, tile in _tiles(scaling) if place.cuts(tile)]


def amax_shapes(scaling: Scaling, place: ShardPlace, columns: int) -> list[tuple[int, ...]]:
    """The shapes of what `shard_amaxes` gives."""
    return [
        _grid((place.rows, columns), tile) if tile else () for tile in _of_amaxes(scaling, place)
    ]


def span_tensor_ranks(scaling: Scaling, place: ShardPlace, parts: AmaxGroup | None) -> list[bool]:
    """Of each of what `shard_amaxes` gives whether tensor-parallel ranks have other `parts` of the same tiles."""
    return [
        parts is not None and parts.group_of(WEIGHT, tile) is not None
        for tile in _of_amaxes(scaling, place)
    ]


def shard_amaxes(
    shards: Sequence[Tensor], scaling: Scaling, places: Sequence[ShardPlace], keep_nan: bool = False
) -> list[list[Tensor]]:
    """Of each shard [rows, in], each of a weight of its own, the amaxes whose maximum over the shards of that weight scales are
    made of; 0 where it has nothing. That of a whole shard is NaN where it has one, with `keep_nan` and for nvfp4's first level.
    """
    one = scaling.tile(WEIGHT, 1) is None or scaling.layout.two_levels
    wholes = (
        [[amax] for amax in compute_amaxes(shards, keep_nan or scaling.layout.two_levels).unbind()]
        if one
        else [[] for _ in shards]
    )
    return [
        whole
        + [_amaxes(shard, tile, scaling, place) for _, tile in _tiles(scaling) if place.cuts(tile)]
        for whole, shard, place in zip(wholes, shards, places, strict=True)
    ]


def shard_scales(amaxes: list[Tensor], scaling: Scaling, place: ShardPlace) -> ShardScales:
    """The scales of the amaxes that `shard_amaxes` gave, once they are those of the whole weight; not the one of a whole tensor."""
    left = iter(amaxes)
    amax = next(left) if scaling.layout.two_levels else None
    whole = None if amax is None else global_scale_from_amax(amax)
    return ShardScales(
        None,
        amax,
        whole,
        {
            axis: tile_scales_from_amaxes(next(left), scaling.forward, scaling, whole)
            for axis, tile in _tiles(scaling)
            if place.cuts(tile)
        },
    )


def quantized_shard(
    shard: Tensor,
    scaling: Scaling,
    place: ShardPlace,
    known: ShardScales,
    history: Tensor | None = None,
) -> FP8Weight:
    """The shard [rows, in] in float8, with the scales of its tiles, and of those that are cut with all of the weight's. An infinite
    amax of the others goes into row 0 of `history`, which has that of the cut ones, and the overflow is counted, if it is given.
    """
    fmt, record = scaling.forward, None if history is None else history[0, WEIGHT]
    if known.scale is not None:
        return store_scaled(shard, scaling, known.scale, record)
    if not known.tiles and (four := store_nvfp4_fused(shard, scaling, history, amax=known.amax)):
        return four
    made = store_tiles_fused(
        shard, scaling, [axis for axis, _ in _tiles(scaling) if axis not in known.tiles], history
    )
    fields: dict[str, Tensor] = {}
    for axis, tile in _tiles(scaling):
        if axis in made:
            fields |= dict(zip(FIELDS[axis], made[axis], strict=True))
            continue
        if (cut := known.tiles.get(axis)) is not None:
            data, decode = (
                cast(shard.float() * _of_rows(cut.encode, shard, tile, place), fmt),
                cut.decode,
            )
        elif len(shard):
            q = quantize_tiles(shard, tile, fmt, scaling, fmt.dtype, known.whole, record=record)
            assert q.scale_inv is not None
            data, decode = q.data, q.scale_inv
        else:
            columns = _grid((1, shard.shape[1]), tile)[1]
            data, decode = (
                shard.to(fmt.dtype),
                torch.zeros(0, columns, dtype=torch.float32, device=shard.device),
            )
        fields |= dict(zip(FIELDS[axis], (data, pack(decode, scaling)), strict=True))
    if record is not None and not made:
        count_out_of_range(shard, WEIGHT, record, None, fmt)
    return FP8Weight(
        **fields, global_scale_inv=None if known.whole is None else known.whole.reciprocal()
    )


def stored_bytes(scaling: Scaling, rows: int, columns: int) -> int:
    """Bytes of a stored weight [rows, columns] and its scales."""
    grids = [_grid((rows, columns), tile) for _, tile in _tiles(scaling)]
    scales = SCALE_BYTES[scaling.layout.scale] * sum(r * c for r, c in grids) if grids else FLOAT32
    return len(axes(scaling)) * rows * columns + scales + FLOAT32 * scaling.layout.two_levels


def _grid(shape: tuple[int, int], tile: Tile) -> tuple[int, int]:
    """The tiles of a matrix of `shape`."""
    r, c = tile_shape(shape, tile)
    return -(-shape[0] // r), -(-shape[1] // c)


def _amaxes(shard: Tensor, tile: Tile, scaling: Scaling, place: ShardPlace) -> Tensor:
    """The amaxes [R / r, C / c] of all tiles of the weight, of which the shard has parts."""
    found = torch.zeros(
        _grid((place.rows, shard.shape[1]), tile), dtype=torch.float32, device=shard.device
    )
    if len(shard):
        before = place.first % tile[0] if tile[0] else 0
        v = split_tiles(F.pad(shard, (0, 0, before, 0)) if before else shard, tile)
        first = place.first // tile[0] if tile[0] else 0
        found[first : first + len(v)] = compute_tile_amax(
            v, keep_nan=scaling.layout.scale != "float32"
        )[:, 0, :, 0]
    return found


def _of_rows(scales: Tensor, shard: Tensor, tile: Tile, place: ShardPlace) -> Tensor:
    """Of the scales [R / r, C / c] of a weight those of the elements of the shard."""
    _, c = tile_shape(tuple(shard.shape), tile)
    if tile[0]:
        scales = scales[
            torch.arange(place.first, place.first + len(shard), device=shard.device) // tile[0]
        ]
    return scales.repeat_interleave(c, 1)[:, : shard.shape[1]]


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
"""What FSDP2 does to a shard as it pads, moves and copies it; the result is a shard as well."""
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view.default}


class WeightShard(Tensor):
    """A float32 shard [rows, in] of a layer's weight, which is its own master."""

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
        made = func(
            *tree_map_only(WeightShard, lambda t: t._tensor, args),
            **tree_map_only(WeightShard, lambda t: t._tensor, kwargs or {}),
        )
        if func is _aten.copy_.default:
            return args[0]
        return tree_map_only(Tensor, WeightShard, made) if func in _KEEP else made

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        stored: FP8Weight = module.quantized_shard(self._tensor)
        split = split_fields(module.shard_scaling, module.shard_place)
        if (
            mesh.size() == 1
            # torch takes nothing but the first from one rank, which has the whole of the others. Seen
            # with 2.13
        ):
            split = dict([*split.items()][:1])
        sent = {name: getattr(stored, name) for name in split}
        of = stored, split, module.weight_grad_dtype, module.shard_codec
        return tuple(_padded(t, -(-split[name] // mesh.size())) for name, t in sent.items()), of

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        stored, split, dtype, codec = metadata
        whole = stored._replace(
            **{
                name: output.view(getattr(stored, name).dtype)[:rows]
                for output, (name, rows) in zip(outputs, split.items(), strict=True)
            }
        )
        if out is not None:
            out._hold(whole)
            return None
        return GatheredWeight(whole, dtype, codec), outputs


def _padded(t: Tensor, rows: int) -> Tensor:
    """The matrix `t` with as many `rows`, its float8 numbers as bytes."""
    t = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
    return F.pad(t, (0, 0, 0, rows - len(t))) if len(t) < rows else t


class GatheredWeight(Tensor):
    """A weight [out, in] that was gathered in float8, with its inverse scales, or in `codec`. To other code it is its values in the
    dtype of its gradient: compiled code hands a gradient over in the dtype of what it is of (torch 2.13).
    """

    _data: Tensor
    _scale_inv: Tensor
    _dgrad: Tensor | None
    _dgrad_scale_inv: Tensor | None
    _global_scale_inv: Tensor | None

    @staticmethod
    def __new__(
        cls, stored: FP8Weight, dtype: torch.dtype, codec: Codec | None = None
    ) -> GatheredWeight:
        data = stored.data
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            dtype=dtype,
            layout=data.layout,
            device=data.device,
        )

    def __init__(self, stored: FP8Weight, dtype: torch.dtype, codec: Codec | None = None) -> None:
        self.codec = codec
        self._hold(stored)

    def _hold(self, stored: FP8Weight) -> None:
        self._data, self._scale_inv, self._dgrad, self._dgrad_scale_inv, self._global_scale_inv = (
            stored
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({self._data}, {self._scale_inv})"

    @property
    def stored(self) -> FP8Weight:
        """The float8 weight as products read it."""
        return FP8Weight(
            self._data, self._scale_inv, self._dgrad, self._dgrad_scale_inv, self._global_scale_inv
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, Codec | None]]:
        return [f"_{name}" for name, t in self.stored._asdict().items() if t is not None], (
            self.dtype,
            self.codec,
        )

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], of: Any, size: Any, stride: Any
    ) -> GatheredWeight:
        return GatheredWeight(
            FP8Weight(**{name.removeprefix("_"): t for name, t in inner.items()}), *of
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES:
            return cls(args[0].stored, args[0].dtype, args[0].codec)
        wide = tree_map_only(
            GatheredWeight, lambda t: decoded(t.stored, t.codec, t.dtype), (args, kwargs or {})
        )
        return func(*wide[0], **wide[1])


@torch.no_grad()
def whole_master(p: Any) -> Tensor:
    """The whole float32 weight of which `p`, a DTensor, has a shard. All ranks that have one call it."""
    from torch.distributed.tensor import DTensor  # inside: it takes a second to load

    shard = p.to_local()
    plain = DTensor.from_local(
        getattr(shard, "_tensor", shard),
        p.device_mesh,
        p.placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),
    )
    return plain.full_tensor()


@torch.no_grad()
def refresh_shards(layers: Iterable[Any]) -> None:
    """New scales of all weights of `layers`, FP8Linears, that are gathered in FP8, or all in one codec, from their amaxes over all
    shards: one all-reduce for all, and another one over the ranks that split matrices. Every rank calls it after a step that has
    written them, once `update_scales` has moved delayed scales, and after a load."""
    those = [layer for layer in layers if layer.sharded]
    if not those:
        return
    mesh = those[0].parameter.device_mesh
    axis = mesh.ndim - 1  # which has the shards
    for layer in those:
        columns = (
            layer.amax_group is not None and layer.amax_group.group_of(WEIGHT, (1, 0)) is not None
        )
        layer.shard_place = ShardPlace(
            layer.out_features, mesh.size(axis), mesh.get_local_rank(axis), part_of_rows=columns
        )
        layer.shard_scales, layer.shard_quantized = ShardScales(), None
    shards = [layer.parameter.to_local()._tensor for layer in those]
    if (codec := those[0].shard_codec) and not codec.per_tensor:
        return
    found = shard_amaxes(
        shards,
        those[0].shard_scaling,
        [layer.shard_place for layer in those],
        keep_nan=codec is not None,
    )
    if not any(found):
        return
    flat = torch.cat([amax.flatten() for each in found for amax in each])
    dist.all_reduce(
        flat.view(torch.int32), dist.ReduceOp.MAX, group=mesh.get_group(axis)
    )  # by their bits, as largest_or_nan
    if codec:
        for layer, scale_inv in zip(those, codec.scale_inv(flat).unbind(), strict=True):
            layer.shard_scales = ShardScales(scale_inv)
        return
    counts = [amax.numel() for each in found for amax in each]
    flat = _over_parts(those, flat, counts)
    if those[0].scaling.tile(WEIGHT, 1) is None:
        _set_scales(those, flat)
        return
    left = iter(torch.split(flat, counts))
    for layer in those:
        amaxes = [
            next(left).view(shape)
            for shape in amax_shapes(layer.scaling, layer.shard_place, layer.in_features)
        ]
        layer.shard_scales = shard_scales(amaxes, layer.scaling, layer.shard_place)
        for amax in amaxes:
            record_amax(
                amax_record(layer)[0, WEIGHT], torch.where(amax >= 0, amax, 0).amax()
            )  # but for tiles that have NaN


def _over_parts(layers: list[Any], flat: Tensor, counts: Sequence[int]) -> Tensor:
    """The amaxes `flat` of the weights of `layers`, so many of each tile or tensor: those of which tensor-parallel ranks have other
    parts, over these."""
    flags = [
        flag
        for layer in layers
        for flag in span_tensor_ranks(layer.scaling, layer.shard_place, layer.amax_group)
    ]
    if not any(flags):
        return flat
    pieces = torch.split(flat, [*counts])
    shared = [amax for amax, flag in zip(pieces, flags, strict=True) if flag]
    whole = all_reduce_max_or_nan(
        torch.cat(shared), layers[0].amax_group.group
    )  # all of them are split over the same ranks
    left = iter(torch.split(whole, [len(amax) for amax in shared]))
    return torch.cat(
        [next(left) if flag else amax for amax, flag in zip(pieces, flags, strict=True)]
    )


def _set_scales(layers: list[Any], amaxes: Tensor) -> None:
    """The one scale of each of these weights, of the amaxes [layers], which are recorded; in few launches for all."""
    scaling, there = layers[0].scaling, None
    torch._foreach_maximum_(
        [amax_record(layer)[0, WEIGHT] for layer in layers], list(amaxes.unbind())
    )
    if scaling.layout.history:
        # A frozen weight is quantized once: by its first scale after a load too.
        first = amaxes.new_full((), scaling.first_step == "te")
        there = torch.stack(
            [
                layer.fp8_scale[WEIGHT] if layer.parameter.requires_grad else first
                for layer in layers
            ]
        )
    for layer, scale in zip(
        layers, scales_from_amaxes(amaxes, WEIGHT, scaling, there).unbind(), strict=True
    ):
        layer.shard_scales = ShardScales(scale)


def shard_parameter(weight: nn.Parameter) -> nn.Parameter:
    """`weight` as a Parameter that FSDP2 gathers in FP8."""
    return nn.Parameter(WeightShard(weight.detach()), requires_grad=weight.requires_grad)
