"""Scaled matrix products: torch's FP8 GEMMs, and the operand layouts that the hardware requires.

What the hardware wants: an FP8 product on Hopper reads both operands along the contracted dimension, so the first must be
row-major and the second column-major. x @ Wᵀ has that layout as stored; dgrad and wgrad need transposed copies. The
contracted and the last dimension must be divisible by 16, by 128 under block scaling, by 32 under the two below; zeros complete
them, exactly.

    one scale a tensor      torch._scaled_mm, scalars
    one scale a row         torch._scaled_mm, [M, 1] and [1, N], bfloat16 out; of other dtypes, and of few rows on a GPU, the
                            float32 sums are scaled after it, and rounded once as well
    1x128 and 128x128       torch.nn.functional.scaled_mm: CUDA 12.9, compute capability 9.0. Scales of 1x128 tiles run down
                            the rows first in memory, a multiple of 4 of them; those of 128x128 tiles along the contracted
                            dimension, in steps of 4. (cuBLAS documentation, "1D and 128x128 2D block scaling for FP8 data
                            types") One operation to a compiler: torch's own lowering of it takes the scales the wrong way
                            round (pytorch#161127), until torch has the fix that is pytorch#195751
    1x32 and 1x16           MXFP8 and NVFP4: microscaled_mm.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, library

from fp8cfg.numerics.gemm_operand import Operand, in_dtype
from fp8cfg.numerics.microscaled_mm import microscaled_mm

WIDTH = 128
FEW = 256
"""Rows up to which a GPU is not asked for scales of rows. On an H100 cuBLASLt, which torch asks there, refuses them for [M, 9216] @
[3072, 9216]ᵀ of 256 rows or less (CUBLAS_STATUS_NOT_SUPPORTED), not of 257, nor for [127, 3072] @ [3072, 3072]ᵀ, nor scales of
tensors (pytorch/ao#4582, July 2026, open: no version ends it yet). Where the limit lies for other sizes is not known: few rows are
scaled afterwards whatever K and N are. `check_gpu.py --only gemm` multiplies some."""


def scaled_mm(
    a: Operand, b: Operand, out: torch.dtype, bias: Tensor | None, fast_accumulation: bool
) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ (+ bias [N]), both float8, as [M, N] of dtype `out`, rounded once where `out` has 16 bits and no
    operand has tiles: other products of the hardware take no bias. Fast accumulation spares promoting partial sums to full
    float32: good enough forward, too coarse for gradients."""
    assert a.scale_inv is not None and b.scale_inv is not None, "a float8 operand has a scale"
    if a.tile and 0 not in a.tile:
        y = _block(a, b, out) if max(a.tile) == WIDTH else microscaled_mm(a, b, out)
        return y if bias is None else y + bias.to(out)
    x, w = _padded(a.data, 16), _padded(b.data, 16)
    rows = a.scale_inv.dim() == 2
    scales = (
        (a.scale_inv.flatten()[:, None], b.scale_inv.flatten()[None])
        if rows
        else (a.scale_inv, b.scale_inv)
    )
    if rows and (
        out != torch.bfloat16 or (x.is_cuda and len(x) <= FEW)
    ):  # bfloat16 is all that torch's product with them gives
        one = torch.ones((), dtype=torch.float32, device=x.device)
        y = torch._scaled_mm(
            x,
            w.t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.float32,
            use_fast_accum=fast_accumulation,
        )
        y = y * (scales[0] * scales[1])
        return in_dtype(y if bias is None else y + bias.to(out), out)
    inside = bias.to(out) if bias is not None and out.itemsize == 2 else None
    y = torch._scaled_mm(
        x,
        w.t(),
        scale_a=scales[0],
        scale_b=scales[1],
        bias=inside,
        out_dtype=out,
        use_fast_accum=fast_accumulation,
    )
    return y if bias is None or inside is not None else y + bias.to(out)


def _block(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    assert a.scale_inv is not None and b.scale_inv is not None
    y: Tensor = scaled_mm_blocks(
        a.data, b.data, a.scale_inv, b.scale_inv, a.tile == (1, WIDTH), b.tile == (1, WIDTH), out
    )
    return y


@library.custom_op("fp8cfg::scaled_mm_blocks", mutates_args=())
def scaled_mm_blocks(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    rows_a: bool,
    rows_b: bool,
    out: torch.dtype,
) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ, float8 with scales of 1x128 tiles where `rows_*`, else of 128x128 tiles, as [M, N] of dtype `out`."""
    m, n = len(a), len(b)
    a, scale_a, recipe_a = _blocks(a, scale_a, rows_a)
    b, scale_b, recipe_b = _blocks(b, scale_b, rows_b)
    y = F.scaled_mm(
        a,
        b.t(),
        scale_a=scale_a,
        scale_recipe_a=recipe_a,
        scale_b=scale_b,
        scale_recipe_b=recipe_b,
        output_dtype=out,
    )
    return y[:m, :n].contiguous()


@scaled_mm_blocks.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    rows_a: bool,
    rows_b: bool,
    out: torch.dtype,
) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=out)


def _blocks(t: Tensor, scale: Tensor, rows: bool) -> tuple[Tensor, Tensor, F.ScalingType]:
    """Data and scales in the layout that cuBLAS wants, completed with zeros."""
    t = _padded(t, WIDTH)
    if not rows:
        missing = -scale.shape[1] % 4
        return (
            t,
            (F.pad(scale, (0, missing)) if missing else scale).contiguous().t(),
            F.ScalingType.BlockWise128x128,
        )
    missing = -len(t) % 4
    if missing:
        t, scale = (
            F.pad(t.view(torch.uint8), (0, 0, 0, missing)).view(t.dtype),
            F.pad(scale, (0, 0, 0, missing)),
        )
    if scale.stride() != (1, len(scale)):
        # A copy has fresh strides: those of a single column are any, and torch 2.11 wants (1, rows) there too.
        scale = scale.t().clone(memory_format=torch.contiguous_format).t()
    return t, scale, F.ScalingType.BlockWise1x128


def _padded(t: Tensor, multiple: int) -> Tensor:
    """Float8 `t` [M, K] row-major, K completed with zeros. Tokens are contracted in wgrad and come in any number."""
    t = t.contiguous()
    missing = -t.shape[1] % multiple
    return F.pad(t.view(torch.uint8), (0, missing)).view(t.dtype) if missing else t
