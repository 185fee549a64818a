"""Fused NVFP4 quantization on a GPU: a tensor is read for its amax, and once more to be packed as Blackwell multiplies it.

In plain torch operations it takes some seventy launches, and float32 copies of the tensor. The bits are those of `quantize_tiles`,
`packed_e2m1` and `swizzled`.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from fp8cfg.numerics.formats import E2M1
from fp8cfg.numerics.fused_quantize import TRITON
from fp8cfg.numerics.gemm_operand import Operand
from fp8cfg.numerics.microscaled_mm import ALIGNED, swizzled_size
from fp8cfg.numerics.overflowed_values import TAGS, counter
from fp8cfg.numerics.stochastic_rounding import Random

FOUR = 16
"""Elements that share a scale."""
Made = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def fuses_four_bits(t: Tensor, carrier: torch.dtype | None) -> bool:
    """Whether `quantize_four_bits_fused` can quantize `t`, for products of the hardware and no wider `carrier`."""
    return TRITON and t.is_cuda and carrier is None and t.dim() == 2 and t.numel() > 0


def quantize_four_bits_fused(
    t: Tensor,
    square: bool,
    draw: Random | None,
    history: Tensor | None,
    role: int,
    amax: Tensor | None = None,
) -> Operand:
    """The matrix `t` [R, C], of any float dtype, as an operand that contracts its last dimension, packed, with scales of 1x16; of
    16x16 where they are `square`, and then with its other operand. The amax, by default that of `t`, float32 [], goes into
    `history`, if it is given."""
    tile = (FOUR, FOUR) if square else (1, FOUR)
    random = (draw.key, draw.draw, draw.lane) if draw else (None, None, 0)
    *made, whole_inv = quantize_four_bits(t.contiguous(), square, *random, history, role, amax)
    along, across = (
        Operand(data, scale, E2M1, tile, whole_inv=whole_inv)
        for data, scale in (made[:2], made[2:])
    )
    return along._replace(other=across) if square else along


@library.custom_op("fp8cfg::quantize_four_bits", mutates_args=("history",), tags=TAGS)
def quantize_four_bits(
    t: Tensor,
    square: bool,
    key: Tensor | None,
    draw: Tensor | None,
    lane: int,
    history: Tensor | None,
    role: int,
    amax: Tensor | None,
) -> Made:
    """The contiguous matrix `t` [R, C] in E2M1, two to a byte, C completed with zeros to whole 16 bytes, and its inverse scales,
    E4M3, swizzled; where they are `square` the same of its transpose, else empty; and the inverse scale of the tensor, float32 [].
    Rounded stochastically where there is a `key`. The amax, `amax` [] where others have parts of the tensor, is folded into
    `history[0, role]`, if it is given."""
    from fp8cfg.numerics import triton_block_kernel

    made = _empty(t, square)
    data, scale_inv, data_t, scale_inv_t, whole_inv = made
    random = None if key is None or draw is None else (key, draw)
    seen, counts = (None, None) if history is None else (history[0, role], counter(t.device, role))
    triton_block_kernel.cast_four_bits(
        t,
        data,
        scale_inv,
        data_t if square else None,
        scale_inv_t if square else None,
        whole_inv,
        random,
        lane,
        seen,
        amax=amax,
        counts=counts,
    )
    return made


@quantize_four_bits.register_fake
def _(
    t: Tensor,
    square: bool,
    key: Tensor | None,
    draw: Tensor | None,
    lane: int,
    history: Tensor | None,
    role: int,
    amax: Tensor | None,
) -> Made:
    return _empty(t, square)


def _empty(t: Tensor, square: bool) -> Made:
    def of(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        whole = -(-columns // ALIGNED) * ALIGNED // 2
        return (
            t.new_empty((rows, whole), dtype=torch.uint8),
            t.new_empty(swizzled_size(rows, -(-columns // FOUR)), dtype=torch.uint8),
        )

    rows, columns = t.shape
    return (
        *of(rows, columns),
        *of(*(columns, rows) if square else (0, 0)),
        t.new_empty((), dtype=torch.float32),
    )
