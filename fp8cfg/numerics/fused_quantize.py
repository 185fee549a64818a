"""Fused quantization on a GPU: a tensor with one scale is read once under delayed scaling, and comes row-major and transposed.

In plain torch operations a quantized tensor takes some twenty launches, and each transposed copy another. The operator is one to a
compiler too; what it computes is that of `scale_now` and `quantize`, of which it is a part where the hardware multiplies FP8.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, library

from fp8cfg.numerics.amax_group import AmaxGroup
from fp8cfg.numerics.formats import BY_DTYPE
from fp8cfg.numerics.fp8_weights import Stored, store
from fp8cfg.numerics.gemm_operand import Operand
from fp8cfg.numerics.scaling import WEIGHT, Scaling, scale_now

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
    """`t` [R, C], of any float dtype, as an operand that contracts its last dimension, and with `both` its first one too: then
    `Operand.transposed` is there. The scale is that of `scale_now`, and where `record` says so the amax goes into `history`."""
    fmt = scaling.format_of(role)
    target = fmt.max * 2.0**-scaling.margin if scales is not None else fmt.max
    seen = history if record else None
    data, transposed, scale_inv = quantize_tensor(
        t.contiguous(), scales, seen, role, target, fmt.dtype, scaling.power_2_scales and scales is None, both)
    return Operand(data, scale_inv, fmt, None, transposed if both else None)


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
