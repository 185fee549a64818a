"""FP8 shards of a weight: put together, they are the weight that one rank quantizes, to the bit."""

from __future__ import annotations

import math
from functools import partial, reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import multi_threaded_pg

from fp8cfg.numerics import E2M1, E4M3, FP8Linear, Region, Scaling
from fp8cfg.numerics.amax import AmaxGroup, compute_amax, record_amax
from fp8cfg.numerics.fp8_weights import FP8Weight, GatheredWeight, store
from fp8cfg.numerics.fsdp_weights import (
    ShardPlace,
    ShardScales,
    WeightShard,
    amax_shapes,
    compute_shard_amaxes,
    compute_shard_scales,
    quantize_shard,
    refresh_shards,
    shard_in_fp8,
    split_fields,
    stored_bytes,
)
from fp8cfg.numerics.kernels.store import store_and_record
from fp8cfg.numerics.overflow_counts import take_step_counts
from fp8cfg.numerics.scaling import WEIGHT, choose_tensor_scale
from fp8cfg.numerics.stored_state import amax_record
from fp8cfg.parallel.process_group import World
from tools.gradient_sums.threaded_ranks import on_threads

SCALINGS = {
    "tensor": Scaling("current"),
    "rows": Scaling("current", granularity="row", power_2_scales=True),
    "squares of 128": Scaling("block", weights_2d=True),
    "block, both ways": Scaling("block", power_2_scales=True),
    "mxfp8": Scaling("mxfp8"),
    "squares of 32": Scaling("mxfp8", weights_2d=True),
    "nvfp4": Scaling("nvfp4", forward=E2M1, weights_2d=True),
    "nvfp4, both ways": Scaling("nvfp4", forward=E2M1),
}
SHAPES = [
    (256, 128, 2),
    (96, 80, 2),
    (160, 64, 3),
    (16, 48, 4),
    (304, 32, 20),
]  # rows, columns, ranks: even, cut tiles, uneven, empty


def test_views_of_a_gathered_weight_have_their_own_shape() -> None:
    stored = store_and_record(torch.randn(8, 6), SCALINGS["tensor"], None, None, None)
    weight = nn.Parameter(GatheredWeight(stored, torch.float32))
    values = stored.values(torch.float32)
    assert torch.equal(weight.view(-1), values.view(-1))
    assert torch.equal(weight.unflatten(0, (2, 4)), values.unflatten(0, (2, 4)))
    assert torch.equal(weight.as_strided((6, 8), (1, 6)), values.t())
    for same in (weight.detach(), weight.view(8, 6), weight.as_strided((8, 6), (6, 1))):
        assert isinstance(same, GatheredWeight)
    weight.view(-1).sum().backward()
    assert torch.equal(weight.grad, torch.ones(8, 6))


def bits(t: Tensor) -> Tensor:
    return t.flatten().view(torch.uint8)


@pytest.mark.parametrize("odd", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("rows", "columns", "ranks"), SHAPES)
def test_shards_are_the_rows_of_the_whole_weight(
    name: str, rows: int, columns: int, ranks: int, odd: float
) -> None:
    scaling = SCALINGS[name]
    weight = (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
        * torch.logspace(-4, 2, rows)[:, None]
    )
    weight[3], weight[5, 7] = 0, odd
    scale = (
        choose_tensor_scale(weight, WEIGHT, scaling, None, None, record=False)
        if name == "tensor"
        else None
    )
    whole = store(weight, scaling, scale)
    size = -(-rows // ranks)
    shards = [weight[min(r * size, rows) : min((r + 1) * size, rows)] for r in range(ranks)]
    places = [ShardPlace(rows, ranks, r) for r in range(ranks)]
    found = compute_shard_amaxes(shards, scaling, places)
    assert all(
        [tuple(a.shape) for a in each] == amax_shapes(scaling, places[0], columns) for each in found
    )
    amaxes = [torch.stack(each).amax(0) for each in zip(*found, strict=True)]
    known = (
        ShardScales(scale)
        if scale is not None
        else compute_shard_scales(amaxes, scaling, places[0])
    )
    if scale is not None:
        assert torch.equal(amaxes[0], compute_amax(weight))
    seen = torch.zeros(1, 3)
    for amax in amaxes:  # as `refresh_shards` records them
        record_amax(seen[0, WEIGHT], torch.where(amax >= 0, amax, 0).amax())
    take_step_counts(weight.device)
    parts = [
        quantize_shard(shard, scaling, place, known, seen.clone())
        for shard, place in zip(shards, places, strict=True)
    ]
    assert take_step_counts(weight.device)[1] == (odd == math.inf), (
        "counted by the rank that has it"
    )
    split = split_fields(scaling, places[0])
    for field in FP8Weight._fields:
        expected, mine = getattr(whole, field), [getattr(part, field) for part in parts]
        if expected is None:
            assert mine == [None] * ranks
            continue
        made = torch.cat(mine) if field in split else mine[0]
        assert made.dtype == expected.dtype and made.shape == expected.shape, field
        assert (
            len(made) == split[field]
            if field in split
            else all(torch.equal(bits(t), bits(made)) for t in mine)
        )
        assert torch.equal(bits(made), bits(expected)), field
    assert stored_bytes(scaling, rows, columns) == sum(t.nbytes for t in whole if t is not None)


FOURTH = "nvfp4", "nvfp4, both ways", "squares of 32", "mxfp8", "rows", "tensor"
"""Scalings of weights whose rows and columns are split, a part on each of four ranks."""


def quantized_parts(world: World, weight: Tensor) -> dict[str, list[Tensor]]:
    """By scaling the data, and nvfp4's first level, of this rank's rows and columns of `weight`: those of tensor-parallel and of
    data-parallel ranks, two by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    column, row = (mesh.get_local_rank(axis) for axis in ("tp", "dp"))
    shard, found = weight.chunk(2, 1)[column].chunk(2)[row].contiguous(), dict[str, list[Tensor]]()
    for name in FOURTH:
        linear = nn.Linear(weight.shape[1] // 2, len(weight), bias=False)
        linear.amax_group = AmaxGroup(((WEIGHT, 1),), mesh.get_group("tp").group_name)  # type: ignore[assignment]
        layer = FP8Linear.from_linear(linear, SCALINGS[name], Region(active=True))
        shard_in_fp8(layer)
        layer._parameters["weight"] = nn.Parameter(
            DTensor.from_local(WeightShard(shard), mesh["dp"], [Shard(0)], run_check=False)
        )
        refresh_shards([layer])
        stored = layer.fsdp_shard.quantize(shard, amax_record(layer))
        found[name] = [t for t in (stored.data, stored.global_scale_inv) if t is not None]
    return found


def test_a_nan_on_one_rank_is_in_the_scales_that_ranks_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in those of the whole weight, over collectives whose largest number is none of them NaN, whichever rank has it."""
    monkeypatch.setitem(
        multi_threaded_pg._reduce_ops, dist.ReduceOp.MAX, partial(reduce, torch.fmax)
    )
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    weight[50, 70] = math.nan  # in a tile that the cut goes through, 32 to 63
    found = on_threads(4, partial(quantized_parts, weight=weight))
    for name in FOURTH:
        scaling = SCALINGS[name]
        data, *_, whole = store_and_record(weight, scaling, None, None, None)
        for rank, (mine, *first) in enumerate(each[name] for each in found):
            assert torch.equal(
                bits(mine), bits(data.chunk(2, 1)[rank // 2].chunk(2)[rank % 2].contiguous())
            ), (name, rank)
            assert whole is None or torch.equal(bits(first[0]), bits(whole)), (name, rank)
        assert (
            bool(data.float().isnan().all()) == scaling.layout.two_levels
            and data.float().isnan().any()
        )


def test_the_largest_of_ranks_is_nan_where_one_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either sign, over collectives whose largest number is none of them NaN; -1 is below all."""
    monkeypatch.setitem(
        multi_threaded_pg._reduce_ops, dist.ReduceOp.MAX, partial(reduce, torch.fmax)
    )
    own = torch.tensor([[math.nan, 1.0, -1.0, 2.0, -1.0], [3.0, -math.nan, 0.0, math.inf, -1.0]])
    assert own[1, 1].view(torch.int32) < 0
    want = torch.tensor([math.nan, math.nan, 0.0, math.inf, -1.0])
    for dtype in (torch.float32, torch.bfloat16):
        for found in on_threads(2, lambda world: world.largest(own[world.rank].to(dtype))):  # noqa: B023
            assert found.dtype == dtype and torch.equal(bits(found), bits(want.to(dtype)))


def test_a_tile_is_cut_where_no_rank_has_all_its_rows() -> None:
    assert (
        not ShardPlace(256, 2, 0).cuts((128, 128))
        and ShardPlace(256, 4, 0).cuts((128, 128))
        and ShardPlace(256, 2, 0).cuts((0, 1))
    )
    assert not ShardPlace(8, 2, 0).cuts((1, 32)) and ShardPlace(7, 2, 0).cuts((1, 32)), (
        "FSDP2 pads uneven rows"
    )
    assert ShardPlace(304, 20, 19).first == 304
    assert E4M3.max == 448
