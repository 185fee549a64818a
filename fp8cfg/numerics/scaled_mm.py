"""The matrix products of FP8 hardware, through torch.

What the hardware wants: an FP8 product on Hopper reads both operands along the contracted dimension, so the first must be
row-major and the second column-major. x @ Wᵀ has that layout as stored; dgrad and wgrad need transposed copies. The
contracted and the last dimension must be divisible by 16, by 128 under block scaling; zeros complete them, exactly.

    one scale a tensor      torch._scaled_mm, scalars
    one scale a row         torch._scaled_mm, [M, 1] and [1, N]; bfloat16 out
    1x128 and 128x128       torch.nn.functional.scaled_mm: CUDA 12.9, compute capability 9.0. Scales of 1x128 tiles run down
                            the rows first in memory; those of 128x128 tiles along the contracted dimension, in steps of 4.
                            (cuBLAS documentation, "1D and 128x128 2D block scaling for FP8 data types")
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8cfg.numerics.operand import Operand

WIDTH = 128


def scaled_mm(a: Operand, b: Operand, out: torch.dtype, fast_accumulation: bool) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ, both float8, as [M, N] of dtype `out`. Fast accumulation spares promoting partial sums to full
    float32: good enough forward, too coarse for gradients."""
    assert a.scale_inv is not None and b.scale_inv is not None, "a float8 operand has a scale"
    if a.tile and 0 not in a.tile:
        return _block(a, b, out)
    x, w = _padded(a.data, 16), _padded(b.data, 16)
    rows = a.scale_inv.dim() == 2
    scales = (a.scale_inv.flatten()[:, None], b.scale_inv.flatten()[None]) if rows else (a.scale_inv, b.scale_inv)
    direct = torch.bfloat16 if rows and x.is_cuda else out
    y = torch._scaled_mm(x, w.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=direct, use_fast_accum=fast_accumulation)
    return y.to(out)


def _block(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    (scale_a, recipe_a), (scale_b, recipe_b) = _scales(a), _scales(b)
    return F.scaled_mm(
        _padded(a.data, WIDTH), _padded(b.data, WIDTH).t(), scale_a=scale_a, scale_recipe_a=recipe_a, scale_b=scale_b,
        scale_recipe_b=recipe_b, output_dtype=out)  # fmt: skip


def _scales(operand: Operand) -> tuple[Tensor, F.ScalingType]:
    scale = operand.scale_inv
    assert scale is not None
    if operand.tile == (1, WIDTH):
        return scale.t().contiguous().t(), F.ScalingType.BlockWise1x128
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t(), F.ScalingType.BlockWise128x128


def _padded(t: Tensor, multiple: int) -> Tensor:
    """Float8 `t` [M, K] row-major, K completed with zeros. Tokens are contracted in wgrad and come in any number."""
    t = t.contiguous()
    missing = -t.shape[1] % multiple
    return F.pad(t.view(torch.uint8), (0, missing)).view(t.dtype) if missing else t
