"""Exact float32 arithmetic: operations with one correct result, the same bits in eager and in compiled code."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def square_root(x: Tensor) -> Tensor:
    """The float32 nearest to the root, as processors and compiled code give it. Eager torch on a CPU takes MKL's, which is its
    neighbour in a sixth of all cases."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return x.sqrt()
    return x.double().sqrt().float()


def reciprocal(x: Tensor) -> Tensor:
    """1 / float32 `x`, rounded once. Of Tensor.reciprocal Inductor makes the quotient of an int, which Triton approximates even
    where it is told to round as eager torch does: that is for floats. Seen with torch 2.11; torch 2.13 takes a float.
    """
    return torch.ones_like(x) / x if torch.compiler.is_compiling() else x.reciprocal()


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in float32 `x`, []; 0 for an empty tensor, NaN where there is one."""
    if x.numel() == 0:
        return x.new_zeros(())
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return x.abs().amax()
    low, high = torch.aminmax(x)  # ten times faster than abs().amax()
    return torch.maximum(high, -low)


def pow2_scale(amax: Tensor, top: float) -> Tensor:
    """The largest power of two that keeps `amax` x scale within `top`: MS-AMP's scale, 2^floor(log2(top / amax)).

    1 where amax is 0, NaN where it is not finite. Exponents end at 126, where MS-AMP goes on to an infinite scale. The exponent
    is read from the quotient's bits: of three quotients in a million, just below a power of two, a float32 logarithm is rounded
    up to it, and not by every compiler.
    """
    quotient = torch.full_like(amax, top) / amax
    exponent = ((quotient.view(torch.int32) >> 23) - 127).clamp(-126, 126)
    scale = torch.where(amax > 0, power_of_two(exponent), 1.0)
    return torch.where(amax < math.inf, scale, math.nan)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)
