"""Triton kernels under Triton's interpreter, on a CPU: scaled values, amaxes, scales and layouts are those of the plain torch code.

The last step, float32 to FP8, is the hardware's and not the interpreter's: test_kernel_code.py looks for its instruction. Here the
kernels write float32 instead. The interpreter is chosen when Triton is imported, hence the process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8cfg.numerics import E4M3, E5M2, Format, Scaling
from fp8cfg.numerics.block_scaling import Tile
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, scale_now

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy, of infinities and NaN: the interpreter computes with it
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_under_the_interpreter() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
SCALINGS = {
    "delayed": Scaling(margin=1, amax_history_len=4), "delayed te": Scaling(first_step="te", amax_history_len=4), "current": Scaling("current"),
    "current pow2": Scaling("current", power_2_scales=True),
}  # fmt: skip
SHAPES = [(64, 64), (33, 70), (130, 1)]


def contents(shape: tuple[int, int]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g)
    spread = x * torch.exp(4 * torch.randn(shape, generator=g))
    spread[: shape[0] // 2, : shape[1] // 2] = 0
    odd = x.clone()
    odd.view(-1)[:: 7] = torch.nan
    infinite = x.clone()
    infinite.view(-1)[-1] = -torch.inf
    return {"normal": x, "spread": spread, "small": spread * 1e-20, "tiny": x * 1e-40, "zeros": torch.zeros(shape), "nan": odd, "inf": infinite}


def saturated(v: Tensor, fmt: Format) -> Tensor:
    return torch.where(v.isnan(), v, v.clamp(-fmt.max, fmt.max))


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("role", [INPUT, GRAD_OUTPUT])
def test_values_amaxes_scales_and_layouts(kind: str, role: int, shape: tuple[int, int]) -> None:
    from fp8cfg.numerics import triton_kernels

    scaling = SCALINGS[kind]
    fmt = scaling.format_of(role)
    history_cases = ((0.0, True), (0.0, False), (3.0, True), (1e30, True), (1e30, False)) if scaling.layout.history else ((None, False),)
    for i, (name, t) in enumerate(contents(shape).items()):
        dtype = torch.float32 if name == "tiny" else (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        for scale, record in history_cases:
            x, where = t.to(dtype), f"{name} {dtype} scale {scale} record {record}"
            scales = None if scale is None else torch.full((3,), scale if kind == "delayed" else scale or 1.0)
            history = None if scale is None else torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
            kept = None if history is None else history.clone()
            want = scale_now(x, role, scaling, scales, kept, record)
            data, transposed, scale_inv = torch.empty(shape), torch.empty(shape[::-1]), torch.empty(())
            target = fmt.max * 2.0**-scaling.margin if scales is not None else fmt.max
            power_2 = scaling.power_2_scales and scales is None
            seen = history if record else None
            triton_kernels.cast(x, scales, seen, role, target, fmt.max, power_2, data, transposed, scale_inv)
            exact = saturated(x.float() * want, fmt)
            assert torch.equal(scale_inv, want.reciprocal()), where
            assert torch.equal(data.view(torch.int32)[~exact.isnan()], exact.view(torch.int32)[~exact.isnan()]), where
            assert torch.equal(data.isnan(), exact.isnan()) and torch.equal(transposed.nan_to_num(7.0), data.t().nan_to_num(7.0)), where
            assert history is None or torch.equal(history, kept), where


@interpreted
def test_many_parts_and_no_transpose() -> None:
    """More elements than the programs of the first kernel read at once: each goes round."""
    from fp8cfg.numerics import triton_kernels

    t = torch.randn(257, 5000, generator=torch.Generator().manual_seed(2))
    t[200, 4999] = 1000.0
    parts, data, scale_inv = triton_kernels.PARTS, torch.empty(t.shape), torch.empty(())
    triton_kernels.PARTS = 16
    try:
        triton_kernels.cast(t, None, None, INPUT, E4M3.max, E4M3.max, False, data, None, scale_inv)
    finally:
        triton_kernels.PARTS = parts
    assert data[200, 4999] == E4M3.max and scale_inv == torch.tensor(448.0).div(1000.0).reciprocal()
    assert torch.equal(data, saturated(t * torch.tensor(448.0).div(1000.0), E4M3)) and E5M2.max > E4M3.max


def check_tiles(made: tuple[Tensor, ...], x: Tensor, tiles: tuple[Tile, Tile], scaling: Scaling, fmt: Format, where: str) -> None:
    """Values before their conversion and scales along both dimensions are those of plain torch code, bit for bit."""
    from fp8cfg.numerics.block_scaling import spread, tile_scales, tiled

    for tile, data, scale_inv in ((tiles[0], made[0], made[1]), (tiles[1], made[2].t(), made[3].t())):
        encode, decode = tile_scales(tiled(x, tile).float(), fmt, scaling, None, x.dtype)
        exact = saturated(x.float() * spread(encode[:, 0, :, 0], tuple(x.shape), tile), fmt)
        want = decode[:, 0, :, 0]
        assert torch.equal(scale_inv.isnan(), want.isnan()) and torch.equal(scale_inv.nan_to_num(7.0), want.nan_to_num(7.0)), (where, tile)
        assert torch.equal(data.isnan(), exact.isnan()) and torch.equal(data.nan_to_num(7.0), exact.nan_to_num(7.0)), (where, tile)


@interpreted
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 140), (1, 300)], ids=str)
def test_mx_along_both_dimensions(shape: tuple[int, int], square: bool) -> None:
    """1x32, 32x1 and 32x32 tiles with E8M0 scales; among the contents blocks of zeros, of NaN, of infinities and of subnormal numbers."""
    from fp8cfg.numerics import triton_kernels

    scaling, (r, c) = Scaling("mxfp8", backward=E4M3, weights_2d=square), shape
    down, across = -(-r // 32), -(-c // 32)
    for i, (name, t) in enumerate(contents(shape).items()):
        x = t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3])
        sizes = ((down, across), (across, down)) if square else ((r, across), (c, down))
        made = torch.empty(r, c), torch.empty(sizes[0]), torch.empty(c, r), torch.empty(sizes[1])
        triton_kernels.cast_blocks(x, 0.0, E4M3.max, False, square, *made, mx=32)
        check_tiles(made, x, ((32, 32),) * 2 if square else ((1, 32), (32, 1)), scaling, E4M3, name)


@interpreted
@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 270), (1, 300)], ids=str)
def test_rows_and_columns(shape: tuple[int, int], power_2: bool) -> None:
    from fp8cfg.numerics import triton_row_kernel

    scaling, (r, c) = Scaling("current", granularity="row", power_2_scales=power_2), shape
    for i, (name, t) in enumerate(contents(shape).items()):
        fmt = (E4M3, E5M2)[i % 2]
        x = t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3])
        made = torch.empty(r, c), torch.empty(r, 1), torch.empty(c, r), torch.empty(c, 1)
        triton_row_kernel.cast_rows(x, fmt.max, power_2, *made)
        check_tiles(made, x, ((1, 0), (0, 1)), scaling, fmt, name)
        alone = torch.empty(r, c), torch.empty(r, 1), torch.empty(c, r), torch.empty(c, 1)
        triton_row_kernel.cast_rows(x, fmt.max, power_2, *alone[:2], None, None)
        triton_row_kernel.cast_rows(x, fmt.max, power_2, None, None, *alone[2:])
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(made, alone, strict=True)), name


@interpreted
@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (130, 140), (1, 300)], ids=str)
def test_blocks_along_both_dimensions(shape: tuple[int, int], square: bool, power_2: bool) -> None:
    """Values before their conversion, scales and layouts of 1x128, 128x1 and 128x128 tiles."""
    from fp8cfg.numerics import triton_kernels

    scaling, (r, c) = Scaling("block", power_2_scales=power_2, weights_2d=square), shape
    for i, (name, t) in enumerate(contents(shape).items()):
        fmt = (E4M3, E5M2)[i % 2]
        x = t if name == "tiny" else t.to((torch.bfloat16, torch.float32, torch.float16)[i % 3])
        tiles = ((128, 128),) * 2 if square else ((1, 128), (128, 1))
        sizes = ((-(-r // 128), -(-c // 128)), (-(-c // 128), -(-r // 128))) if square else ((r, -(-c // 128)), (c, -(-r // 128)))
        made = torch.empty(r, c), torch.empty(sizes[0]), torch.empty(c, r), torch.empty(sizes[1])
        triton_kernels.cast_blocks(x, torch.finfo(x.dtype).max, fmt.max, power_2, square, *made)
        check_tiles(made, x, tiles, scaling, fmt, name)
