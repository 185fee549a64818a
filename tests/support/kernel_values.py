"""Contents and expectations of tests of the Triton kernels' values under Triton's interpreter (tests/fake_gpu).

The last step, float32 to FP8, is the hardware's and not the interpreter's: test_kernel_code.py looks for its instruction. Here the
kernels write float32 instead. That of Triton 3.6's interpreter rounds halves away from zero (17 becomes 18 in E4M3, 21 becomes 22),
does not saturate (464, 480 and 1e6 are NaN in E4M3; in E5M2 1e6 is infinity), loses the carry into the exponent (480 is 256 in E5M2),
makes 384 of NaN and 256 of infinity in E4M3, and truncates subnormal numbers (3 * 2^-10 is 2^-9 in E4M3). tools/gpu_rows/kernel_bits.py
compares the bytes on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8cfg.numerics import E4M3, Format, Scaling
from fp8cfg.numerics.amax import tile_shape
from fp8cfg.schema.scalings import Tile


def contents(shape: tuple[int, int]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g)
    spread = x * torch.exp(4 * torch.randn(shape, generator=g))
    spread[: shape[0] // 2, : shape[1] // 2] = 0
    odd = x.clone()
    odd.view(-1)[::7] = torch.nan
    infinite = x.clone()
    infinite.view(-1)[-1] = -torch.inf
    return {
        "normal": x,
        "spread": spread,
        "small": spread * 1e-20,
        "tiny": x * 1e-40,
        "zeros": torch.zeros(shape),
        "nan": odd,
        "inf": infinite,
    }


def saturated(v: Tensor, fmt: Format) -> Tensor:
    return torch.where(v.isnan(), v, v.clamp(-fmt.max, fmt.max))


def exact(rows: int, columns: int) -> Tensor:
    """Numbers that E4M3 holds, with an amax that scales by a power of two: nothing is left for the conversion to round."""
    t = (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
        .clamp(-3.5, 3.5)
        .to(E4M3.dtype)
        .float()
    )
    t[1, 1] = 3.5
    return t


def expand_scales(scales: Tensor, shape: tuple[int, ...], tile: Tile) -> Tensor:
    """Repeats scales [R / r, C / c] of tiles for each element of a matrix of `shape` [R, C]."""
    r, c = tile_shape(shape, tile)
    by_row = scales.repeat_interleave(r, 0)[: shape[0]]
    return by_row.repeat_interleave(c, 1)[:, : shape[1]]


def plain(x: Tensor, tile: Tile, scaling: Scaling, fmt: Format) -> tuple[Tensor, Tensor]:
    """The scaled values of `x`, saturated, and the inverse scales of its tiles, by plain torch code."""
    from fp8cfg.numerics.amax import split_tiles
    from fp8cfg.numerics.scaling import compute_tile_scales

    encode, decode = compute_tile_scales(split_tiles(x, tile).float(), fmt, scaling, None, x.dtype)
    return saturated(
        x.float() * expand_scales(encode[:, 0, :, 0], tuple(x.shape), tile), fmt
    ), decode[:, 0, :, 0]


def check_tiles(
    made: tuple[Tensor, ...],
    x: Tensor,
    tiles: tuple[Tile, Tile],
    scaling: Scaling,
    fmt: Format,
    where: str,
) -> None:
    """Values before their conversion and scales along both dimensions are those of plain torch code, bit for bit."""
    for tile, data, scale_inv in (
        (tiles[0], made[0], made[1]),
        (tiles[1], made[2].t(), made[3].t()),
    ):
        exact, want = plain(x, tile, scaling, fmt)
        assert torch.equal(scale_inv.isnan(), want.isnan()) and torch.equal(
            scale_inv.nan_to_num(7.0), want.nan_to_num(7.0)
        ), (where, tile)
        assert torch.equal(data.isnan(), exact.isnan()) and torch.equal(
            data.nan_to_num(7.0), exact.nan_to_num(7.0)
        ), (where, tile)
