"""FP8 shards of a weight: put together, they are the weight that one rank quantizes, to the bit."""

from __future__ import annotations

import pytest
import torch

from fp8cfg.numerics import E2M1, E4M3, Scaling
from fp8cfg.numerics.fp8_weights import Stored, store
from fp8cfg.numerics.scaling import WEIGHT, amax_of, scale_now
from fp8cfg.numerics.shard_scales import (
    ShardPlace,
    ShardScales,
    amax_shapes,
    quantized_shard,
    shard_amaxes,
    shard_scales,
    split_fields,
    stored_bytes,
)

SCALINGS = {
    "tensor": Scaling("current"), "rows": Scaling("current", granularity="row", power_2_scales=True),
    "squares of 128": Scaling("block", weights_2d=True), "block, both ways": Scaling("block", power_2_scales=True),
    "mxfp8": Scaling("mxfp8"), "squares of 32": Scaling("mxfp8", weights_2d=True),
    "nvfp4": Scaling("nvfp4", forward=E2M1, weights_2d=True), "nvfp4, both ways": Scaling("nvfp4", forward=E2M1),
}  # fmt: skip
SHAPES = [(256, 128, 2), (96, 80, 2), (160, 64, 3), (16, 48, 4), (304, 32, 20)]  # rows, columns, ranks: even, cut tiles, uneven, empty


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("rows", "columns", "ranks"), SHAPES)
def test_shards_are_the_rows_of_the_whole_weight(name: str, rows: int, columns: int, ranks: int) -> None:
    scaling = SCALINGS[name]
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 2, rows)[:, None]
    weight[3] = 0
    scale = scale_now(weight, WEIGHT, scaling, None, None, record=False) if name == "tensor" else None
    whole = store(weight, scaling, scale)
    size = -(-rows // ranks)
    shards = [weight[min(r * size, rows):min((r + 1) * size, rows)] for r in range(ranks)]
    places = [ShardPlace(rows, ranks, r) for r in range(ranks)]
    found = shard_amaxes(shards, scaling, places)
    assert all([tuple(a.shape) for a in each] == amax_shapes(scaling, places[0], columns) for each in found)
    amaxes = [torch.stack(each).amax(0) for each in zip(*found, strict=True)]
    known = ShardScales(scale) if scale is not None else shard_scales(amaxes, scaling, places[0])
    if scale is not None:
        assert torch.equal(amaxes[0], amax_of(weight))
    parts = [quantized_shard(shard, scaling, place, known) for shard, place in zip(shards, places, strict=True)]
    split = split_fields(scaling, places[0])
    for field in Stored._fields:
        expected, mine = getattr(whole, field), [getattr(part, field) for part in parts]
        if expected is None:
            assert mine == [None] * ranks
            continue
        made = torch.cat(mine) if field in split else mine[0]
        assert made.dtype == expected.dtype and made.shape == expected.shape, field
        assert len(made) == split[field] if field in split else all(torch.equal(t.view(torch.uint8) if t.dim() else t, made.view(torch.uint8) if t.dim() else made) for t in mine)
        assert torch.equal(made.flatten().view(torch.uint8), expected.flatten().view(torch.uint8)), field
    assert stored_bytes(scaling, rows, columns) == sum(t.nbytes for t in whole if t is not None)


def test_a_tile_is_cut_where_no_rank_has_all_its_rows() -> None:
    assert not ShardPlace(256, 2, 0).cuts((128, 128)) and ShardPlace(256, 4, 0).cuts((128, 128)) and ShardPlace(256, 2, 0).cuts((0, 1))
    assert not ShardPlace(8, 2, 0).cuts((1, 32)) and ShardPlace(7, 2, 0).cuts((1, 32)), "FSDP2 pads uneven rows"
    assert ShardPlace(304, 20, 19).first == 304
    assert E4M3.max == 448
