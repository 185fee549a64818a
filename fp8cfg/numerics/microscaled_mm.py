"""Microscaled matrix products: MXFP8 and NVFP4 through torch's scaled products, on Blackwell (compute capability 10.0, CUDA 12.8).

    MXFP8   E4M3 elements, an E8M0 scale for 1x32 of them
    NVFP4   E2M1 elements, two to a byte, an E4M3 scale for 1x16 of them, and a float32 scale of the tensor above these

Both operands lie along the contracted dimension, row-major: the only layout that GPUs of compute capability 12 take too
(pytorch#198126). The tensor cores read scales in tiles of 128 rows and 4 columns, 512 neighbours in memory: of row r and column c
of a tile the place is 16 (r mod 32) + 4 (r div 32) + c (cuBLAS documentation, "1D block scaling factors layout"; torch's
SWIZZLE_32_4_4, torchao's `to_blocked`). What has no tile of its own is completed with zeros, and so is the contracted dimension to
a multiple of 32, which makes rows of 16 bytes and more. Exact: both add zeros to the sums.

The product is one operation to a compiler, as that with scales of 128 is (scaled_mm.py). The layouts are made outside of it, as
bytes, where a compiler makes them part of other kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, library

from fp8cfg.numerics.block_scaling import e8m0_bytes
from fp8cfg.numerics.gemm_operand import Operand

ALIGNED = 32
"""Elements of which the contracted dimension is a multiple: a tile of MXFP8, and 16 bytes of E2M1."""
SWIZZLE = F.SwizzleType.SWIZZLE_32_4_4


def microscaled_mm(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ as [M, N] of dtype `out`, of operands with scales of 1x32, or 1x16 and one of the tensor, or squares."""
    (x, x_scale), (w, w_scale) = laid_out(a), laid_out(b)
    product: Tensor = scaled_mm_micro(x, w, x_scale, w_scale, a.whole_inv, b.whole_inv, out)
    return product


def laid_out(t: Operand) -> tuple[Tensor, Tensor]:
    """The data and scales of `t` as the hardware reads them, bytes. A square of n x n has its scale once for each of its n rows."""
    assert t.scale_inv is not None and t.tile is not None
    if t.data.dtype == torch.uint8:
        return t.data, t.scale_inv
    data, scale = _completed(t.data.view(torch.uint8)), t.scale_inv
    if scale.dim() == 1:
        return data, scale
    if t.tile[0] > 1:
        scale = scale.repeat_interleave(t.tile[0], 0)[: len(data)]
    if t.whole_inv is None:
        return data, swizzled(scale if scale.dtype == torch.uint8 else e8m0_bytes(scale))
    return packed_e2m1(data), swizzled(scale.to(torch.float8_e4m3fn).view(torch.uint8))


@library.custom_op("fp8cfg::scaled_mm_micro", mutates_args=())
def scaled_mm_micro(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    whole_a: Tensor | None,
    whole_b: Tensor | None,
    out: torch.dtype,
) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ as [M, N] of dtype `out`. All are bytes, scales swizzled: E4M3 with E8M0 scales of 1x32, or with
    `whole_*`, float32 [], two of E2M1 to a byte with E4M3 scales of 1x16."""
    if whole_a is None or whole_b is None:
        data, of_scale, recipe, swizzle = (
            torch.float8_e4m3fn,
            torch.float8_e8m0fnu,
            F.ScalingType.BlockWise1x32,
            SWIZZLE,
        )
        return F.scaled_mm(
            a.view(data),
            b.view(data).t(),
            scale_a.view(of_scale),
            recipe,
            scale_b.view(of_scale),
            recipe,
            swizzle,
            swizzle,
            output_dtype=out,
        )
    packed, of_scale = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    recipes, swizzles = (
        [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise],
        [
            SWIZZLE,
            F.SwizzleType.NO_SWIZZLE,
        ],
    )
    return F.scaled_mm(
        a.view(packed),
        b.view(packed).t(),
        [scale_a.view(of_scale), whole_a],
        recipes,
        [scale_b.view(of_scale), whole_b],
        recipes,
        swizzles,
        swizzles,
        output_dtype=out,
    )


@scaled_mm_micro.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    whole_a: Tensor | None,
    whole_b: Tensor | None,
    out: torch.dtype,
) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=out)


def _completed(t: Tensor) -> Tensor:
    """Bytes `t` [M, K], row-major, K completed with zeros."""
    missing = -t.shape[1] % ALIGNED
    return (
        F.pad(t, (0, missing)) if missing else t
    ).contiguous()  # pad copies, also where nothing is missing


def swizzled(scales: Tensor) -> Tensor:
    """Bytes `scales` [R, C] in the order that the tensor cores read, completed with zeros to whole tiles of 128 x 4; flat."""
    rows, columns = scales.shape
    missing = (0, -columns % 4, 0, -rows % 128)
    t = F.pad(scales, missing) if any(missing) else scales
    return t.view(len(t) // 128, 4, 32, t.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def swizzled_size(rows: int, columns: int) -> int:
    """The bytes that scales [rows, columns] take in that order."""
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4)


def packed_e2m1(code: Tensor) -> Tensor:
    """Values of E2M1 as bytes of E4M3 `code` [M, K], two to a byte, [M, K / 2]; of two neighbours the first has the low bits.

    An E4M3 code has the exponent biased by 7 and three bits of mantissa, an E2M1 code biased by 1 and one bit; 0.5 is normal in
    the one and subnormal in the other. A NaN becomes some number: E2M1 has none, and its scale is NaN.
    """
    magnitude = code & 0x7F
    code = (code >> 4 & 8) | torch.where(
        magnitude >= 0x38, (magnitude - 0x30) >> 2 & 7, magnitude >> 5
    )
    return code[:, ::2] | code[:, 1::2] << 4
