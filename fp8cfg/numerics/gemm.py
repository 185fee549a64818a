"""Operands, the one function that multiplies them, and its record of what it multiplied.

What the hardware wants: an FP8 product on Hopper reads both operands along the contracted dimension, so the first must be
row-major and the second column-major. x @ Wᵀ has that layout as stored; dgrad and wgrad need transposed copies. The
contracted and the last dimension must be divisible by 16.

A product is either real (float8 operands, torch._scaled_mm) or emulated: the same values carried in bfloat16, which holds
all of them exactly, multiplied with float32 accumulation, then scaled. The two differ by the order of summation and by
rounding the product once before its scale, when the carrier is bfloat16. With a float32 carrier only float32 rounding is
left. What nobody emulates is the shorter accumulator of Hopper's fast accumulation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8cfg.numerics.formats import BY_DTYPE, Format, cast, round_to_grid, widen

FPROP, DGRAD, WGRAD = 0, 1, 2  # slots of a layer's record
CHUNK = 1 << 17  # elements quantized at a time in eager mode: float32 temporaries stay in the cache, and none pages in anew

_KINDS = ("e4m3", "e5m2", "float32", "bfloat16", "float16", "float64")
_HOW = ("high_precision", "emulated", "scaled_mm")


class Operand(NamedTuple):
    """A matrix to multiply. In FP8 `fmt` and the float32 scalar `scale_inv` are set, and `data` is float8 or holds values of
    its grid in a wider carrier; in high precision both are None."""

    data: Tensor
    scale_inv: Tensor | None = None
    fmt: Format | None = None

    def t(self) -> Operand:
        return self._replace(data=self.data.t())

    @property
    def how(self) -> str:
        if self.data.dtype in BY_DTYPE:
            return "scaled_mm"
        return "emulated" if self.fmt else "high_precision"

    @property
    def kind(self) -> str:
        fmt = BY_DTYPE.get(self.data.dtype, self.fmt)
        return fmt.name if fmt else str(self.data.dtype).removeprefix("torch.")


class Ran(NamedTuple):
    """What a product multiplied: the kinds of its operands ("e4m3", "e5m2", "bfloat16", ...) and "emulated", "scaled_mm" or
    "high_precision"."""

    a: str
    b: str
    how: str


def _encode(a: Operand, b: Operand) -> int:
    if a.how != b.how:
        raise TypeError(f"one product cannot have operands of two precisions: {a.how} {a.kind} and {b.how} {b.kind}")
    return 1 + _KINDS.index(a.kind) + 8 * _KINDS.index(b.kind) + 64 * _HOW.index(a.how)


def decode(code: int) -> Ran | None:
    """Reads one entry of `FP8Linear.gemms_ran`; None if that product has not run."""
    how, kinds = divmod(int(code) - 1, 64)
    return None if code == 0 else Ran(_KINDS[kinds % 8], _KINDS[kinds // 8], _HOW[how])


def quantize(t: Tensor, scale: Tensor, fmt: Format, carrier: torch.dtype) -> Operand:
    """Multiplies the matrix `t`, read as float32, by the scalar `scale` and rounds it to FP8, once. `carrier` is the dtype of
    the data: `fmt.dtype` for a real product, bfloat16 or float32 for an emulated one.

    Always from float32: rounding to bfloat16 before FP8 changes 3 in 100 values."""
    scale_inv = scale.reciprocal()
    if carrier == fmt.dtype:
        data = cast(t.float() * scale, fmt)
    elif t.device.type != "cpu":  # a GPU has the cast in hardware, and its compiler contracts what round_to_grid relies on
        data = widen(cast(t.float() * scale, fmt), carrier)
    elif torch.compiler.is_compiling():
        data = round_to_grid(t.float() * scale, fmt).to(carrier)
    else:
        data = torch.empty(t.shape, dtype=carrier)
        rows = max(1, CHUNK // max(1, t.shape[1]))
        for source, target in zip(torch.split(t, rows), torch.split(data, rows), strict=True):
            target.copy_(widen(cast(source.float() * scale, fmt), carrier))
    return Operand(data, scale_inv, fmt)


def gemm(a: Operand, b: Operand, out: torch.dtype, ran: Tensor, slot: int, bias: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ (+ bias [N]) as [M, N] of dtype `out`, recorded in `ran[slot]`, an int32 tensor.

    The record is derived from these two operands and written here and nowhere else, as an operation on a tensor, so that it
    is also made inside a compiled graph. Raises TypeError where one operand is FP8 and the other is not."""
    ran[slot].fill_(_encode(a, b))
    if a.how == "high_precision":
        return F.linear(a.data, b.data, None if bias is None else bias.to(a.data.dtype)).to(out)
    assert a.scale_inv is not None and b.scale_inv is not None, "an FP8 operand has a scale"
    if a.how == "scaled_mm":
        y = _scaled_mm(a.data, b.data, a.scale_inv, b.scale_inv, out, fast_accumulation=slot == FPROP)
    else:
        y = a.data @ b.data.t()
        scale = a.scale_inv * b.scale_inv
        # In place on CPU, which multiplies in float32 and rounds once; a GPU would round the scale to bfloat16 first.
        y = y.mul_(scale) if y.dtype == out and y.device.type == "cpu" else (y.float() * scale).to(out)
    return y if bias is None else y + bias.to(out)


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: torch.dtype, fast_accumulation: bool) -> Tensor:
    """Fast accumulation spares promoting partial sums to full float32: good enough forward, too coarse for gradients. Tokens
    are contracted in wgrad and come in any number: zeros complete them to 16."""
    if a.shape[1] == 0:
        return torch.zeros(a.shape[0], b.shape[0], dtype=out, device=a.device)
    a, b = a.contiguous(), b.contiguous()
    if missing := -a.shape[1] % 16:
        a, b = (F.pad(t.view(torch.uint8), (0, missing)).view(t.dtype) for t in (a, b))
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=out, use_fast_accum=fast_accumulation)
