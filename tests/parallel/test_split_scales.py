"""TileScales across ranks: what two gloo ranks quantize of a split tensor is, bit for bit, their part of the whole tensor quantized by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp8cfg.numerics import E2M1, E4M3, Scaling
from fp8cfg.numerics.amax import AmaxGroup
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD
from fp8cfg.numerics.kernels.store import store_and_record
from fp8cfg.numerics.linear_operands import CONTRACTED, LinearCall, PassBuffers
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from fp8cfg.parallel.process_group import World
from fp8cfg.parallel.tensor import COLUMN_PARALLEL_AMAXES, ROW_PARALLEL_AMAXES
from tests.support.ranks import on_ranks

NVFP4 = Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True, stochastic=False)
SCALINGS = {
    "tensor": Scaling("current"),
    "rows": Scaling("current", granularity="row"),
    "rows, powers of two": Scaling(
        "current", backward=E4M3, granularity="row", power_2_scales=True
    ),
    "mxfp8": Scaling("mxfp8", backward=E4M3),
    "nvfp4": NVFP4,
    "nvfp4 along rows": replace(NVFP4, weights_2d=False),
    "nvfp4 as it is": replace(NVFP4, hadamard=False),
}
SPLITS = {"column": COLUMN_PARALLEL_AMAXES, "row": ROW_PARALLEL_AMAXES}
PRODUCTS = {INPUT: [FPROP, WGRAD], WEIGHT: [FPROP, DGRAD], GRAD_OUTPUT: [DGRAD, WGRAD]}
ODD = {"finite": 1.0, "infinite": torch.inf, "not a number": torch.nan}
"""An element of the first rank's part."""


def buffers() -> PassBuffers:
    return PassBuffers(None, torch.zeros(1, 3), torch.zeros(3, dtype=torch.int32))


def quantized(
    t: Tensor, role: int, scaling: Scaling, carrier: torch.dtype | None, parts: AmaxGroup | None
) -> dict[int, tuple[Any, ...]]:
    """Data, scales of tiles, and that of the tensor, for each product that reads `t`, contracted dimension last."""
    call = LinearCall(
        scaling,
        (False, False, False),
        carrier,
        torch.float32,
        torch.float32,
        record_amax=True,
        amax_group=parts,
    )
    made = call.operands(t, role, PRODUCTS[role], buffers())
    return {
        slot: (operand.data, operand.scale_inv, operand.global_scale_inv)
        for slot, operand in made.items()
    }


def part(whole: Tensor | None, dim: int, rank: int) -> Tensor | None:
    """Of what has rows and columns, or tiles in both, a rank's part; the whole of what lies across the ranks."""
    return (
        whole
        if whole is None or whole.dim() < 2 or whole.shape[dim] == 1
        else whole.chunk(2, dim)[rank]
    )


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.float().nan_to_num(7.0, 8.0, 9.0), b.float().nan_to_num(7.0, 8.0, 9.0))
    )


def on_two(world: World) -> dict[str, list[str]]:
    """By scaling the tensors of layers that are not the part of the whole."""
    found: dict[str, list[str]] = {}
    for name, scaling in SCALINGS.items():
        wrong = found.setdefault(name, [])
        for (kind, split), (odd, value), role in (
            (k, o, r) for k in SPLITS.items() for o in ODD.items() for r, _ in k[1]
        ):
            parts, dim = AmaxGroup(split, dist.group.WORLD.group_name), dict(split)[role]
            whole = (
                torch.randn(128, 192, generator=torch.Generator().manual_seed(role))
                * torch.logspace(-3, 2, 128)[:, None]
            )
            whole = whole.bfloat16()
            whole[5, 7] *= value
            mine = whole.chunk(2, dim)[world.rank].contiguous()
            for carrier in (None, torch.float32):
                wants, gots = (
                    quantized(t, role, scaling, carrier, p)
                    for t, p in ((whole, None), (mine, parts))
                )
                for slot, want in wants.items():
                    along = dim if CONTRACTED[role, slot] else 1 - dim
                    if not all(
                        same(got, part(t, along, world.rank))
                        for got, t in zip(gots[slot], want, strict=True)
                    ):
                        wrong.append(f"{kind} {odd} role {role} product {slot} in {carrier}")
            if role == WEIGHT and scaling.tile(WEIGHT, 1) is not None:
                stored, want = (
                    store_and_record(t.float(), scaling, None, None, p)
                    for t, p in ((mine, parts), (whole, None))
                )
                wrong += [
                    f"{kind} {odd} stored {field}"
                    for field, t in want._asdict().items()
                    if not same(getattr(stored, field), part(t, dim, world.rank))
                ]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return on_ranks(2, on_two, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SCALINGS)
def test_parts_are_quantized_as_the_whole(name: str, two: list[dict[str, list[str]]]) -> None:
    assert [rank[name] for rank in two] == [[], []]


def test_a_tile_within_one_part_is_that_ranks_alone() -> None:
    column, row = (
        AmaxGroup(COLUMN_PARALLEL_AMAXES, "ranks"),
        AmaxGroup(ROW_PARALLEL_AMAXES, "ranks"),
    )
    assert (
        column.group_of(WEIGHT) == row.group_of(WEIGHT) == "ranks"
        and column.group_of(INPUT) is row.group_of(GRAD_OUTPUT) is None
    )
    assert (
        column.group_of(WEIGHT, (0, 1))
        == row.group_of(WEIGHT, (1, 0))
        == column.group_of(GRAD_OUTPUT, (1, 0))
        == row.group_of(INPUT, (1, 0))
        == "ranks"
    )
    within = [
        column.group_of(WEIGHT, (1, 0)),
        row.group_of(WEIGHT, (0, 1)),
        column.group_of(GRAD_OUTPUT, (0, 1)),
        row.group_of(WEIGHT, (16, 16)),
    ]
    assert within == [None] * 4
