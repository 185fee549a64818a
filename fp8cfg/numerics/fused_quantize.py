"""Fused quantization on a GPU: a tensor with one scale is read once under delayed scaling, and comes row-major and transposed.

In plain torch operations a quantized tensor takes some twenty launches, and each transposed copy another. The operator is one to a
compiler too; what it computes is that of `scale_now` and `quantize`, of which it is a part where the hardware multiplies FP8.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, library

from fp8cfg.numerics.amax_group import AmaxGroup
from fp8cfg.numerics.block_scaling import Tile
from fp8cfg.numerics.formats import BY_DTYPE
from fp8cfg.numerics.fp8_weights import Stored, store
from fp8cfg.numerics.gemm_operand import Operand
from fp8cfg.numerics.scaling import FLT_MAX, WEIGHT, Scaling, scale_now

WIDTH = 128
"""Elements of a tile of block scaling along a contracted dimension."""
MX = 32
"""The same under MX."""
TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed: torch's CUDA builds bring it."""


def fuses(t: Tensor, scaling: Scaling, carrier: torch.dtype | None, parts: AmaxGroup | None = None) -> bool:
    """Whether `quantize_fused` can quantize `t`: with a single scale, for a real product, of amaxes that are this rank's own."""
    if not TRITON or not t.is_cuda or carrier is not None or parts is not None or t.dim() != 2 or t.numel() == 0:
        return False
    return scaling.layout.tile(1, scaling.granularity, square=False) is None


def quantize_fused(
    t: Tensor, role: int, scaling: Scaling, scales: Tensor | None, history: Tensor | None, record: bool, both: bool
) -> Operand:
    """`t` [R, C], of any float dtype, as an operand that contracts its last dimension, and with `both` its first one too, as
    `Operand.other`. The scale is that of `scale_now`, and where `record` says so the amax goes into `history`."""
    fmt = scaling.format_of(role)
    target = fmt.max * 2.0**-scaling.margin if scales is not None else fmt.max
    seen = history if record else None
    data, transposed, scale_inv = quantize_tensor(
        t.contiguous(), scales, seen, role, target, fmt.dtype, scaling.power_2_scales and scales is None, both)
    return Operand(data, scale_inv, fmt, None, Operand(transposed, scale_inv, fmt) if both else None)


def fuses_tiles(t: Tensor, tile: Tile, scaling: Scaling, carrier: torch.dtype | None) -> bool:
    """Whether `quantize_tiles_fused` can quantize `t`, for a real product: with a float32 scale for a row, 128 elements or their
    square, or an E8M0 one for 32."""
    made = {"float32": 0 in tile or max(tile) == WIDTH, "e8m0": max(tile) == MX}.get(scaling.layout.scale, False)
    return TRITON and t.is_cuda and carrier is None and made and t.dim() == 2 and t.numel() > 0


def quantize_tiles_fused(t: Tensor, role: int, scaling: Scaling, axis: int, both: bool) -> Operand:
    """`quantize_tiles` of `t` [R, C] for a product that contracts its dimension `axis`, with the other one in the same read where
    `both` are contracted, as `Operand.other`."""
    fmt, tile = scaling.format_of(role), scaling.tile(role, 1)
    assert tile is not None, "there are scales of tiles"
    rows, columns = both or axis == 1, both or axis == 0
    made = quantize_blocks(t.contiguous(), tile[1], fmt.dtype, scaling.power_2_scales, tile[0] > 1, rows, columns)
    along, across = (Operand(data, scale_inv, fmt, tile) for data, scale_inv in (made[:2], made[2:]))
    return along._replace(other=across) if both else along if rows else across.t()


@library.custom_op("fp8cfg::quantize_blocks", mutates_args=())
def quantize_blocks(
    t: Tensor, width: int, dtype: torch.dtype, power_2: bool, square: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The contiguous matrix `t` [R, C] in float8 `dtype` with a scale for 1 x `width` elements, or their square, and its inverse
    scales, float32; then the same of its transpose [C, R]. What `rows` or `columns` do not ask for is empty. The `width` is 128
    under block scaling, 32 under MX, whose scales are powers of two by its own rule, and 0 for a scale for each row."""
    from fp8cfg.numerics import triton_kernels, triton_row_kernel

    made, largest = _empty_blocks(t, width, dtype, square, rows, columns), BY_DTYPE[dtype].max
    data, scale_inv, data_t, scale_inv_t = (x if x.numel() else None for x in made)
    if width == 0:
        triton_row_kernel.cast_rows(t, largest, power_2, data, scale_inv, data_t, scale_inv_t)
    else:
        highest = min(torch.finfo(t.dtype).max, FLT_MAX)
        mx = width if width == MX else 0
        triton_kernels.cast_blocks(t, highest, largest, power_2, square, data, scale_inv, data_t, scale_inv_t, mx)
    return made


@quantize_blocks.register_fake
def _(
    t: Tensor, width: int, dtype: torch.dtype, power_2: bool, square: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_blocks(t, width, dtype, square, rows, columns)


def _empty_blocks(
    t: Tensor, width: int, dtype: torch.dtype, square: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def of(r: int, c: int, wanted: bool) -> tuple[Tensor, Tensor]:
        scales = (-(-r // width) if square else r, -(-c // width) if width else 1)
        return (t.new_empty((r, c) if wanted else (0, 0), dtype=dtype),
                t.new_empty(scales if wanted else (0, 0), dtype=torch.float32))

    (r, c) = t.shape
    return *of(r, c, rows), *of(c, r, columns)


def store_recorded(
    master: Tensor, scaling: Scaling, scales: Tensor | None, history: Tensor | None, real: bool, parts: AmaxGroup | None
) -> Stored:
    """`store` of a matrix with the scale of this moment, whose amax is recorded under delayed scaling; `real` says that the
    hardware multiplies it."""
    if real and fuses(master, scaling, None, parts):
        made = quantize_fused(master, WEIGHT, scaling, scales, history, record=True, both=False)
        assert made.scale_inv is not None
        return Stored(made.data, made.scale_inv)
    return store(master, scaling, scale_now(master, WEIGHT, scaling, scales, history, record=True, parts=parts))


@library.custom_op("fp8cfg::quantize_tensor", mutates_args=("history",))
def quantize_tensor(
    t: Tensor, scales: Tensor | None, history: Tensor | None, role: int, target: float, dtype: torch.dtype, power_2: bool,
    both: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The contiguous matrix `t` [R, C] in float8 `dtype`, transposed [C, R] where `both`, else empty, and its inverse scale, [].
    The amax is folded into row 0 of `history`, if it is given."""
    from fp8cfg.numerics import triton_kernels

    data, transposed, scale_inv = _empty(t, dtype, both)
    other = transposed if both else None
    triton_kernels.cast(t, scales, history, role, target, BY_DTYPE[dtype].max, power_2, data, other, scale_inv)
    return data, transposed, scale_inv


@quantize_tensor.register_fake
def _(
    t: Tensor, scales: Tensor | None, history: Tensor | None, role: int, target: float, dtype: torch.dtype, power_2: bool,
    both: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(t, dtype, both)


def _empty(t: Tensor, dtype: torch.dtype, both: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = t.shape
    transposed = t.new_empty((columns, rows) if both else (0,), dtype=dtype)
    return t.new_empty((rows, columns), dtype=dtype), transposed, t.new_empty((), dtype=torch.float32)
