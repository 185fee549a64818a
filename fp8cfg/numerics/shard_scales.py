"""Scales of a weight that is split by rows: each rank quantizes its own rows to the bits that one rank has of the whole weight.

A scale is that of a tile of the weight. Of a tile that lies in the rows of one rank that rank alone has the scale, and sends it
with its rows. Of tiles that several ranks have parts of, the whole weight, its columns, or blocks that the cut goes through, all
ranks have the scales, made of the largest amaxes over the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8cfg.numerics.amax_group import AmaxGroup
from fp8cfg.numerics.block_scaling import (
    Scales,
    first_level_of,
    scales_of_amaxes,
    sizes,
    tile_amax,
    tiled,
)
from fp8cfg.numerics.fp8_weights import Stored, pack
from fp8cfg.numerics.fused_store import (
    amaxes_of,
    store_four_bits_fused,
    store_scaled,
    store_tiles_fused,
)
from fp8cfg.numerics.quantize import quantize_tiles, rounded
from fp8cfg.numerics.scaling import WEIGHT, Scaling
from fp8cfg.numerics.unfused_counts import count_values
from fp8cfg.scalings import SCALE_BYTES, Tile

FIELDS = {1: ("data", "scale_inv"), 0: ("dgrad", "dgrad_scale_inv")}
"""The fields of `Stored` of the matrix that a product reads which contracts a weight's dimension 1, or 0."""

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
    tiles: Mapping[int, Scales] = {}


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
        parts is not None and parts.over(WEIGHT, tile) is not None
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
        [[amax] for amax in amaxes_of(shards, keep_nan or scaling.layout.two_levels).unbind()]
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
    whole = None if amax is None else first_level_of(amax)
    return ShardScales(
        None,
        amax,
        whole,
        {
            axis: scales_of_amaxes(next(left), scaling.forward, scaling, whole)
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
) -> Stored:
    """The shard [rows, in] in float8, with the scales of its tiles, and of those that are cut with all of the weight's. An infinite
    amax of the others goes into row 0 of `history`, which has that of the cut ones, and the overflow is counted, if it is given.
    """
    fmt, record = scaling.forward, None if history is None else history[0, WEIGHT]
    if known.scale is not None:
        return store_scaled(shard, scaling, known.scale, record)
    if not known.tiles and (
        four := store_four_bits_fused(shard, scaling, history, amax=known.amax)
    ):
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
                rounded(shard.float() * _of_rows(cut.encode, shard, tile, place), fmt),
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
        count_values(shard, WEIGHT, record, None, fmt)
    return Stored(
        **fields, global_scale_inv=None if known.whole is None else known.whole.reciprocal()
    )


def stored_bytes(scaling: Scaling, rows: int, columns: int) -> int:
    """Bytes of a stored weight [rows, columns] and its scales."""
    grids = [_grid((rows, columns), tile) for _, tile in _tiles(scaling)]
    scales = SCALE_BYTES[scaling.layout.scale] * sum(r * c for r, c in grids) if grids else FLOAT32
    return len(axes(scaling)) * rows * columns + scales + FLOAT32 * scaling.layout.two_levels


def _grid(shape: tuple[int, int], tile: Tile) -> tuple[int, int]:
    """The tiles of a matrix of `shape`."""
    r, c = sizes(shape, tile)
    return -(-shape[0] // r), -(-shape[1] // c)


def _amaxes(shard: Tensor, tile: Tile, scaling: Scaling, place: ShardPlace) -> Tensor:
    """The amaxes [R / r, C / c] of all tiles of the weight, of which the shard has parts."""
    found = torch.zeros(
        _grid((place.rows, shard.shape[1]), tile), dtype=torch.float32, device=shard.device
    )
    if len(shard):
        before = place.first % tile[0] if tile[0] else 0
        v = tiled(F.pad(shard, (0, 0, before, 0)) if before else shard, tile)
        first = place.first // tile[0] if tile[0] else 0
        found[first : first + len(v)] = tile_amax(v, keep_nan=scaling.layout.scale != "float32")[
            :, 0, :, 0
        ]
    return found


def _of_rows(scales: Tensor, shard: Tensor, tile: Tile, place: ShardPlace) -> Tensor:
    """Of the scales [R / r, C / c] of a weight those of the elements of the shard."""
    _, c = sizes(tuple(shard.shape), tile)
    if tile[0]:
        scales = scales[
            torch.arange(place.first, place.first + len(shard), device=shard.device) // tile[0]
        ]
    return scales.repeat_interleave(c, 1)[:, : shard.shape[1]]
