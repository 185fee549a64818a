"""Matrix products on CPU tensors that torch has on a GPU alone: into float32, scaled ones of FP8 and FP4, of groups.

Operands are dequantized to float32 by their own scales, multiplied in float32, and the sum is rounded once. Scales that hold for a
whole row are multiplied into the sums, as fp8cfg's emulation does (numerics/gemm.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    device="cpu",
)
TILES = {
    ScalingType.BlockWise1x16: 16,
    ScalingType.BlockWise1x32: 32,
    ScalingType.BlockWise1x128: 128,
    ScalingType.BlockWise128x128: 128,
}


def product_in(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.float() @ b.float()).to(dtype)


def sum_with_product(
    c: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return (beta * c.float() + alpha * (a.float() @ b.float())).to(dtype)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """`torch._scaled_mm` with scales [] or [1], or of rows, [M, 1] and [1, N]."""
    if (
        scale_a.numel() not in (1, len(a))
        or scale_b.numel() not in (1, b.shape[1])
        or scale_result is not None
    ):
        raise NotImplementedError("_scaled_mm with scales of blocks")
    return _rounded((a.float() @ b.float()) * (scale_a * scale_b), bias, out_dtype or a.dtype)


def scaled_mm_v2(
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_mm`: a [M, K] @ b [K, N]."""
    x, over_a = _dequantized(a, scale_a, recipe_a, swizzle_a)
    w, over_b = _dequantized(b.t(), scale_b, recipe_b, swizzle_b)
    return _rounded((x @ w.t()) * (over_a * over_b.t()), bias, out_dtype or torch.bfloat16)


def _rounded(y: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (y if bias is None else y + bias.float()).to(dtype)


def _dequantized(
    t: Tensor, scales: Sequence[Tensor], recipes: Sequence[int], swizzles: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`t` [R, K] in float32, times the scales that vary along K, and those that do not, [R, 1] or [1, 1]."""
    four = t.dtype == torch.float4_e2m1fn_x2
    values, over = unpacked(t.view(torch.uint8)) if four else t.float(), torch.ones(1, 1)
    for scale, recipe, swizzle in zip(
        scales, recipes, [*swizzles] or [0] * len(scales), strict=True
    ):
        of = ScalingType(recipe)
        if of in (ScalingType.TensorWise, ScalingType.RowWise):
            over = over * scale.float().reshape(-1, 1)
            continue
        width, (rows, columns) = TILES[of], values.shape
        if swizzle != SwizzleType.NO_SWIZZLE.value:
            scale = in_rows(scale, rows, -(-columns // width))
        elif of == ScalingType.BlockWise128x128:
            scale = scale.t().repeat_interleave(128, 0)[:rows]
        values = values * scale.float().repeat_interleave(width, 1)[:rows, :columns]
    return values, over


def unpacked(code: Tensor) -> Tensor:
    """Float32 values of bytes of two E2M1 numbers, of which the first has the low bits."""
    return E2M1[torch.stack([code & 15, code >> 4], -1).long()].flatten(-2)


def in_rows(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales [rows, columns] that lie in tiles of 128 x 4, of which (r, c) is at 16 (r mod 32) + 4 (r div 32) + c."""
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None]
    place = 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4
    tile = (r // 128) * -(-columns // 4) + c // 4
    return scales.flatten().view(torch.uint8)[tile * 512 + place].view(scales.dtype)


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch._grouped_mm`: groups are rows of `a` and matrices of `b`, columns of `a` alone, of both, or matrices of both."""
    dtype, ends = out_dtype or a.dtype, [] if offs is None else offs.tolist()
    parts = list(zip([0, *ends[:-1]], ends, strict=True))
    if a.dim() == b.dim() == 3:
        return (a.float() @ b.float()).to(dtype)
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, i:j].float() @ b[i:j].float() for i, j in parts]).to(dtype)
    if b.dim() == 2:
        return torch.cat(
            [a[g].float() @ b[:, i:j].float() for g, (i, j) in enumerate(parts)], 1
        ).to(dtype)
    y = torch.zeros(len(a), b.shape[2], dtype=dtype)
    for g, (i, j) in enumerate(parts):
        y[i:j] = a[i:j].float() @ b[g].float()
    return y


def _into(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return out.copy_(compute(*args, **kwargs))

    return write


HANDLERS: dict[str, Callable[..., Any]] = {
    **{f"aten.{name}.dtype": product_in for name in ("mm", "bmm")},
    **{f"aten.{name}.dtype": sum_with_product for name in ("addmm", "baddbmm")},
    "aten._scaled_mm.default": scaled_mm,
    "aten._scaled_mm.out": _into(scaled_mm),
    "aten._scaled_mm_v2.default": scaled_mm_v2,
    "aten._scaled_mm_v2.out": _into(scaled_mm_v2),
    "aten._grouped_mm.default": grouped_mm,
    **{f"aten.{name}.dtype_out": _into(product_in) for name in ("mm", "bmm")},
}
