"""Microscaled matrix products: MXFP8 and NVFP4 through torch's scaled products, on Blackwell (compute capability 10.0, CUDA 12.8).

    MXFP8   E4M3 elements, an E8M0 scale for 1x32 of them
    NVFP4   E2M1 elements, two to a byte, an E4M3 scale for 1x16 of them, and a float32 scale of the tensor above these

Both operands lie along the contracted dimension, row-major: the only layout that GPUs of compute capability 12 take too
(pytorch#198126). The tensor cores read scales in tiles of 128 rows and 4 columns, 512 neighbours in memory: of row r and column c
of a tile the place is 16 (r mod 32) + 4 (r div 32) + c (cuBLAS documentation, "1D block scaling factors layout"; torch's
SWIZZLE_32_4_4, torchao's `to_blocked`). What has no tile of its own is completed with zeros, and so is the contracted dimension to
a multiple of 32, which makes rows of 16 bytes and more. Exact: both add zeros to the sums.

One operation to a compiler, as the product with scales of 128 is (scaled_mm.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, library

from fp8cfg.numerics.block_scaling import e8m0_bytes
from fp8cfg.numerics.gemm_operand import Operand

ALIGNED = 32
"""Elements of which the contracted dimension is a multiple: a tile of MXFP8, and 16 bytes of E2M1."""


def microscaled_mm(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ as [M, N] of dtype `out`, of operands with scales of 1x32, or 1x16 and one of the tensor, or squares."""
    (data_a, scale_a), (data_b, scale_b) = _rows(a), _rows(b)
    return scaled_mm_micro(data_a, data_b, scale_a, scale_b, a.whole_inv, b.whole_inv, out)  # type: ignore[no-any-return]


def _rows(t: Operand) -> tuple[Tensor, Tensor]:
    """The data and float32 scales of `t` by row: those of a square of n x n once for each of its n rows."""
    assert t.scale_inv is not None and t.tile is not None
    scale = t.scale_inv if t.tile[0] == 1 else t.scale_inv.repeat_interleave(t.tile[0], 0)[: len(t.data)]
    return t.data, scale


@library.custom_op("fp8cfg::scaled_mm_micro", mutates_args=())
def scaled_mm_micro(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, whole_a: Tensor | None, whole_b: Tensor | None, out: torch.dtype
) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ as [M, N] of dtype `out`. Data are float8 E4M3, and with `whole_*`, [], values of E2M1 in it; scales are
    float32 values of E8M0 or E4M3, [M, ceil(K / 32)] or [M, ceil(K / 16)], and so for N."""
    operands = [_mx(a, scale_a), _mx(b, scale_b)] if whole_a is None else [_nvfp4(a, scale_a), _nvfp4(b, scale_b)]
    (x, x_scale), (w, w_scale) = operands
    if whole_a is None or whole_b is None:
        recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
        return F.scaled_mm(x, w.t(), x_scale, recipe, w_scale, recipe, swizzle, swizzle, output_dtype=out)
    recipes = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(x, w.t(), [x_scale, whole_a], recipes, [w_scale, whole_b], recipes, swizzles, swizzles, output_dtype=out)


@scaled_mm_micro.register_fake
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, whole_a: Tensor | None, whole_b: Tensor | None, out: torch.dtype
) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=out)


def _mx(t: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _completed(t.view(torch.uint8)).view(t.dtype), swizzled(e8m0_bytes(scale)).view(torch.float8_e8m0fnu)


def _nvfp4(t: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return packed_e2m1(_completed(t.view(torch.uint8)).view(t.dtype)), swizzled(scale.to(torch.float8_e4m3fn))


def _completed(t: Tensor) -> Tensor:
    """Bytes `t` [M, K], row-major, K completed with zeros."""
    missing = -t.shape[1] % ALIGNED
    return (F.pad(t, (0, missing)) if missing else t).contiguous()  # pad copies, also where nothing is missing


def swizzled(scales: Tensor) -> Tensor:
    """One-byte `scales` [R, C] in the order that the tensor cores read, completed with zeros to whole tiles of 128 x 4; flat."""
    rows, columns = scales.shape
    t, missing = scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128)
    t = F.pad(t, missing) if any(missing) else t
    t = t.view(len(t) // 128, 4, 32, t.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return t.flatten().view(scales.dtype)


def packed_e2m1(t: Tensor) -> Tensor:
    """Values of E2M1 in float8 E4M3 `t` [M, K], as float4_e2m1fn_x2 [M, K / 2]; of two neighbours the first has the low bits.

    An E4M3 code has the exponent biased by 7 and three bits of mantissa, an E2M1 code biased by 1 and one bit; 0.5 is normal in
    the one and subnormal in the other. A NaN becomes some number: E2M1 has none, and its scale is NaN."""
    code = t.view(torch.uint8)
    magnitude = code & 0x7F
    code = (code >> 4 & 8) | torch.where(magnitude >= 0x38, (magnitude - 0x30) >> 2 & 7, magnitude >> 5)
    return (code[:, ::2] | code[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)
