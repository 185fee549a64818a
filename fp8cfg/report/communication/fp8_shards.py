"""FP8 shards: what ranks send of weights that FSDP2 gathers in FP8, as numerics/shard_scales.py has it."""

from __future__ import annotations

from fp8cfg.config.fp8 import FP8, weights_2d
from fp8cfg.report.memory.shards import shard_rows
from fp8cfg.scalings import SCALE_BYTES, SCALINGS, Tile


def gathered_bytes(fp8: FP8, shape: tuple[int, ...], ranks: int, part_of_rows: bool = False) -> int:
    """Bytes that a rank gives of a weight of `shape` [out, in]: its rows, for dgrad once more where that reads other scales, and
    the scales of tiles that it alone has. With `part_of_rows` other ranks have the other columns of a weight.
    """
    (rows, columns), sent, scale = shape, 0, SCALE_BYTES[SCALINGS[fp8.scaling].scale]
    for tile in _tiles(fp8):
        sent += shard_rows(rows, ranks) * columns
        if tile is not None and not _cut(tile, rows, ranks, part_of_rows):
            sent += scale * shard_rows(rows // tile[0], ranks) * -(-columns // (tile[1] or columns))
    return sent


def amaxes_of_cut_tiles(
    fp8: FP8, shape: tuple[int, ...], ranks: int, part_of_rows: bool = False
) -> int:
    """The amaxes of a weight of `shape` [out, in] that are the largest over its shards: of all of it, and of tiles of which several
    ranks have parts."""
    (rows, columns), numbers = shape, int(SCALINGS[fp8.scaling].two_levels)
    for tile in _tiles(fp8):
        if tile is None:
            numbers += 1
        elif _cut(tile, rows, ranks, part_of_rows):
            numbers += -(-rows // (tile[0] or rows)) * -(-columns // (tile[1] or columns))
    return numbers


def _tiles(fp8: FP8) -> list[Tile | None]:
    """The tiles of each matrix of a weight."""
    each = [
        SCALINGS[fp8.scaling].tile(axis, fp8.granularity, square=weights_2d(fp8)) for axis in (1, 0)
    ]
    return each[:1] if each[0] == each[1] else each


def _cut(tile: Tile, rows: int, ranks: int, part_of_rows: bool) -> bool:
    """As `ShardPlace.cuts`."""
    return tile[0] == 0 or (part_of_rows and tile[1] == 0) or rows % (tile[0] * ranks) != 0
