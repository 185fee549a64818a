"""GEMM: the one function that multiplies operands, in FP8 or high precision, and its record of what it multiplied.

A product is either real (float8 operands, see scaled_mm.py) or emulated: the same values carried in bfloat16, which holds
all of them exactly, or in float32. Both accumulate in float32, scale, add the bias as the output's dtype has it and round once, to
that dtype; where operands have tiles, which no real product with a bias has, they add it to what was rounded. They differ by the
order of summation. What nobody emulates is the shorter accumulator of Hopper's fast accumulation.

Scales that vary along the contracted dimension are multiplied into the carried values. Powers of two change no mantissa,
and nvfp4's E4M3 scales leave six significant bits: bfloat16 still holds the values exactly. Block scaling with float32
scales needs a float32 carrier.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8cfg.numerics.gemm_operand import Operand, in_dtype
from fp8cfg.numerics.scaled_mm import scaled_mm

FPROP, DGRAD, WGRAD = 0, 1, 2  # slots of a layer's record

_KINDS = ("e4m3", "e5m2", "float32", "bfloat16", "float16", "float64", "e2m1")
_HOW = ("high_precision", "emulated", "scaled_mm")


class Ran(NamedTuple):
    """Record of one product: the kinds of its operands ("e4m3", "e5m2", "bfloat16", ...) and how they were multiplied: "emulated",
    "scaled_mm" or "high_precision".
    """

    a: str
    b: str
    how: str


def encode(a: Operand, b: Operand) -> int:
    if a.how != b.how:
        raise TypeError(
            f"one product cannot have operands of two precisions: {a.how} {a.kind} and {b.how}"
            f" {b.kind}"
        )
    return 1 + _KINDS.index(a.kind) + 8 * _KINDS.index(b.kind) + 64 * _HOW.index(a.how)


def decode(code: int) -> Ran | None:
    """Decodes one entry of `FP8Linear.gemms_ran`; None if that product has not run."""
    how, kinds = divmod(int(code) - 1, 64)
    return None if code == 0 else Ran(_KINDS[kinds % 8], _KINDS[kinds // 8], _HOW[how])


def gemm(
    a: Operand,
    b: Operand,
    out: torch.dtype,
    ran: Tensor | None,
    slot: int,
    bias: Tensor | None = None,
) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ (+ bias [N]) as [M, N] of dtype `out`, recorded in `ran[slot]`, an int32 tensor, if there is one.

    The record is derived from these two operands and written here and nowhere else, as an operation on a tensor, so that it
    is also made inside a compiled graph. Raises TypeError where one operand is FP8 and the other is not.
    """
    code = encode(a, b)
    if ran is not None:
        ran[slot].fill_(code)
    if a.how == "high_precision":
        return in_dtype(
            F.linear(a.data, b.data, None if bias is None else bias.to(a.data.dtype)), out
        )
    if a.how == "scaled_mm" and a.data.shape[1]:
        return scaled_mm(a, b, out, bias, fast_accumulation=slot == FPROP)
    y = accumulated(a.data, b.data)
    if (
        a.scale_inv is not None and b.scale_inv is not None and a.data.shape[1]
    ):  # tiles of no elements have no scales
        y = y * (a.scale_inv * (b.scale_inv.t() if b.scale_inv.dim() == 2 else b.scale_inv))
    if bias is None or (a.tile and 0 not in a.tile):
        y = in_dtype(y, out)
    return y if bias is None else in_dtype(y + bias.to(out), out)


def accumulated(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [N, K]ᵀ, both of one dtype, as float32 sums that are not rounded to that dtype."""
    if a.shape[1] == 0:
        return torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()  # torch's CPU product has no out_dtype (2.13)
