"""FP8 and FP4 formats: their ranges, rounding to them, and random numbers for stochastic rounding.

    E4M3  sign, 4 exponent bits, 3 mantissa bits   up to 448     no infinity, one NaN pattern
    E5M2  sign, 5 exponent bits, 2 mantissa bits   up to 57344   the upper byte of an IEEE float16
    E2M1  sign, 2 exponent bits, 1 mantissa bit    up to 6       0, 0.5, 1, 1.5, 2, 3, 4, 6

Rounding saturates: a value that is too large becomes the largest finite value, because one infinity
would spread through the whole GEMM. NaN stays NaN. E2M1 has neither.

Every value of the three formats is also a bfloat16. Emulation rounds to the grid of a format,
carries the values in bfloat16 and multiplies with float32 accumulation, so that hardware without
FP8 computes the same products.

Sources: arXiv:2209.05433, table 1; OCP 8-bit Floating Point Specification (OFP8) 1.0; for E2M1 OCP
Microscaling Formats (MX) 1.0, table 1.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """A format with few bits.

    Attributes:
        name: Name in lower case.
        dtype: The dtype that stores its values, one in a byte.
        max: The largest value.
        mantissa_bits: Bits of the mantissa.
        min_exponent: Exponent of the smallest normal number. The finest step of the grid is
            2**(min_exponent - mantissa_bits).
    """

    name: str
    dtype: torch.dtype
    max: float
    mantissa_bits: int
    min_exponent: int

    @property
    def reach(self) -> float:
        """Half a step above `max`. Without saturation, larger magnitudes round to more than `max`."""
        exponent = math.frexp(self.max)[1] - 1
        return self.max + 2.0 ** (exponent - 1 - self.mantissa_bits)


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 3, -6)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 2, -14)
# torch computes nothing in its packed dtype of E2M1. Each value of E2M1 is a value of E4M3 too.
E2M1 = Format("e2m1", torch.float8_e4m3fn, 6.0, 1, 0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The high precisions, by their names in a recipe."""
FORMAT_BY_DTYPE = {E4M3.dtype: E4M3, E5M2.dtype: E5M2}


# --- rounding


def cast(v: Tensor, fmt: Format) -> Tensor:
    """Rounds float32 `v` to `fmt.dtype`: to nearest, ties to even, saturating, NaN kept."""
    if fmt == E2M1:
        return round_in_steps(v, fmt).to(fmt.dtype)
    # Saturate first: torch's own cast overflows to NaN or to infinity, depending on its version
    # (pytorch#178817).
    return _saturate(v, fmt).to(fmt.dtype)


def round_to_format(
    v: Tensor, fmt: Format, dtype: torch.dtype, uniform: Tensor | None = None
) -> Tensor:
    """Rounds float32 `v` as `cast` does and returns the values in `dtype`, which holds all of them.

    Only E2M1 rounds stochastically, by the numbers `uniform`. See `round_in_steps`.
    """
    if fmt == E2M1:
        return round_in_steps(v, fmt, uniform).to(dtype)
    return cast(v, fmt).to(dtype)


def round_in_steps(v: Tensor, fmt: Format, uniform: Tensor | None = None) -> Tensor:
    """Returns the values of `cast(v, fmt)` as float32, for formats without a torch dtype.

    Args:
        v: float32 of any shape.
        fmt: The format.
        uniform: Numbers in [0, 1) of the shape of `v`. They round up or down at random instead of
            to nearest. The mean over many draws is `v` itself.
    """
    v = _saturate(v, fmt)
    exponent = torch.frexp(v)[1] - 1
    # Without a name the exponents of the steps are freed here, 4 bytes per element less at the peak.
    step = torch.ldexp(torch.ones_like(v), exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits)
    steps = torch.round(v / step) if uniform is None else torch.floor(v / step + uniform)
    # Saturate again: 3 + 0.99999994 is 4 in float32.
    return _saturate(steps * step, fmt)


def round_stochastic(v: Tensor, fmt: Format, u: Tensor) -> Tensor:
    """Rounds float32 `v` to the grid of `fmt` at random and returns float32.

    An element goes to its upper neighbor if `u`, in [0, 1), is below its distance to the lower one.
    Nothing saturates. Infinities and NaN stay.
    """
    # Steps are powers of two, so all of this is exact. A step finer than 2^-126 counts as 2^-126,
    # because its reciprocal is no float32. bfloat16 has such steps below 2^-119.
    exponent = ((v.view(torch.int32) >> 23) & 0xFF) - 127
    step = (exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits).clamp(min=-126)
    count = v * power_of_two(-step)
    lower = count.floor()
    return (lower + (u < count - lower).float()) * power_of_two(step)


def _saturate(v: Tensor, fmt: Format) -> Tensor:
    """Clamps `v` to the range of `fmt` and keeps NaN."""
    if not torch.compiler.is_compiling():
        return v.clamp(-fmt.max, fmt.max)
    # The min and max instructions that Inductor emits for clamp corrupt a transposed float8 store
    # in the same kernel. Use clamp again with the first torch whose Triton fixes
    # triton-lang/triton#11111. The bound is a constant here. With dynamic shapes `fmt.max` would
    # become an argument of the graph.
    largest = 6.0 if fmt == E2M1 else torch.finfo(fmt.dtype).max
    v = torch.where(v > largest, largest, v)
    return torch.where(v < -largest, -largest, v)


# --- arithmetic that is equal on all devices and in compiled code


def square_root(x: Tensor) -> Tensor:
    """Returns the square root of float32 `x`, rounded once."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return x.sqrt()
    # Eager torch on a CPU calls MKL, which returns a neighbor of it in a sixth of all cases.
    return x.double().sqrt().float()


def reciprocal(x: Tensor) -> Tensor:
    """Returns 1 / `x` of float32 `x`, rounded once."""
    if not torch.compiler.is_compiling():
        return x.reciprocal()
    # Inductor turns Tensor.reciprocal into the quotient of an int. Triton approximates that even if
    # it is told to round divisions, which applies to floats. Seen with torch 2.11. torch 2.13 emits
    # a float.
    return torch.ones_like(x) / x


def pow2_scale(amax: Tensor, top: float) -> Tensor:
    """Returns the largest power of two that keeps `amax` x scale within `top`, float32.

    MS-AMP's scale: 2^floor(log2(top / amax)). It is 1 if `amax` is 0 and NaN if it is not finite.
    Exponents end at 126. MS-AMP continues to an infinite scale.
    """
    quotient = torch.full_like(amax, top) / amax
    # The exponent is read from the bits. A float32 logarithm is rounded up to a power of two in
    # three of a million cases, and not by every compiler.
    exponent = ((quotient.view(torch.int32) >> 23) - 127).clamp(-126, 126)
    scale = torch.where(amax > 0, power_of_two(exponent), 1.0)
    return torch.where(amax < math.inf, scale, math.nan)


def power_of_two(exponent: Tensor) -> Tensor:
    """Returns 2^exponent, float32, for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


# --- random numbers


def random_key(seed: int, *words: int | str) -> Tensor:
    """Derives a key, int32 [2], from a seed and words such as the name of a parameter."""
    digest = hashlib.blake2b(repr((seed, *words)).encode(), digest_size=8).digest()
    return torch.tensor(struct.unpack("<2i", digest), dtype=torch.int32)


class StridedStart(NamedTuple):
    """The first element of a shard that has every `ranks`-th run of `run` elements of the whole
    tensor.

    A matrix that is sharded by columns has such shards.

    Attributes:
        start: Number of the element in the shard.
        run: Elements in a run.
        rank: The rank of the shard.
        ranks: Number of ranks.
    """

    start: int
    run: int
    rank: int
    ranks: int


Start = int | StridedStart
"""The first element: its number in the whole tensor, or its place in a shard."""


def advance_start(start: Start, by: int) -> Start:
    """Returns the place `by` elements after `start`."""
    if isinstance(start, StridedStart):
        return start._replace(start=start.start + by)
    return start + by


def element_numbers(
    start: Start, count: int, device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    """Returns the numbers of `count` elements in the whole tensor, `dtype` [count]."""
    if not isinstance(start, StridedStart):
        return torch.arange(start, start + count, dtype=dtype, device=device)
    number = element_numbers(start.start, count, device, dtype)
    runs_before = number // start.run * (start.ranks - 1) + start.rank  # of other ranks
    return number + runs_before * start.run


def uniform_numbers(key: Tensor, lane: int, start: Start, count: int) -> Tensor:
    """Returns random numbers in [0, 1), multiples of 2^-24.

    A number depends on the key, the lane and the number of the element in the whole tensor, so
    shards draw the numbers of the whole tensor. The index passes through the two multiply-xorshift
    rounds of lowbias32 (C. Wellons, "Hash function prospector", 2018). Half of the key is mixed in
    before each.

    Args:
        key: int32 [2], or [n, 2] for several streams.
        lane: Number of the stream of this key.
        start: The first element.
        count: Number of elements.

    Returns:
        float32 [count] or [n, count].
    """
    x = element_numbers(start, count, key.device)
    x = x ^ (key[..., :1] + _wrap_int32(lane * 0x9E3779B9))
    x = _xor_shifted(x, 16) * 0x7FEB352D
    x = x + key[..., 1:]
    x = _xor_shifted(x, 15) * _wrap_int32(0x846CA68B)
    x = _xor_shifted(x, 16)
    return ((x >> 8) & 0xFFFFFF).float() * 2.0**-24


class RandomStream(NamedTuple):
    """A stream of random numbers.

    Attributes:
        key: Identifies the stream, int32 [2].
        draw: Number of draws so far, int32 [].
        lane: Selects a tensor within a draw.
    """

    key: Tensor
    draw: Tensor
    lane: int

    def uniform(self, start: int, count: int) -> Tensor:
        """Returns `uniform_numbers` of this draw."""
        return uniform_numbers(derive_draw_key(self.key, self.draw), self.lane, start, count)


def derive_draw_key(key: Tensor, draw: Tensor) -> Tensor:
    """Derives the key of one draw from the stream of `key`, on its device."""
    return key ^ torch.stack([draw * _wrap_int32(0x9E3779B9), draw * _wrap_int32(0x85EBCA6B)])


def _xor_shifted(x: Tensor, by: int) -> Tensor:
    # int32 shifts copy the sign bit down. The mask clears the copies.
    return x ^ ((x >> by) & (0xFFFFFFFF >> by))


def _wrap_int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
