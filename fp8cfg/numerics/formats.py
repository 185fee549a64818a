"""FP8 and FP4 formats (E4M3, E5M2, E2M1): ranges, grids, and rounding of float32 values to them.

    E4M3  sign, 4 exponent bits, 3 mantissa bits   up to 448     no infinity, one NaN pattern: range bought with codes
    E5M2  sign, 5 exponent bits, 2 mantissa bits   up to 57344   an IEEE float16 cut to eight bits
    E2M1  sign, 2 exponent bits, 1 mantissa bit    up to 6       0, 0.5, 1, 1.5, 2, 3, 4, 6: neither infinity nor NaN

Training saturates: what is too large becomes the largest finite value, because one infinity would spread through the
whole product. NaN stays NaN. Source: arXiv:2209.05433, table 1; OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP
Microscaling Formats (MX) 1.0, table 1, for E2M1.

Every value of the three is also a bfloat16, which is what lets hardware without FP8 compute the same products: round
to the grid, carry the values in bfloat16, multiply with float32 accumulation.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import NamedTuple

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


class Format(NamedTuple):
    """A narrow format. `min_exponent` is that of the smallest normal number, so the grid's finest step is
    2**(min_exponent - mantissa_bits). `dtype` holds its values, one to a byte."""

    name: str
    dtype: torch.dtype
    max: float
    mantissa_bits: int
    min_exponent: int

    @property
    def reach(self) -> float:
        """The largest magnitude that rounds to `max`, half a step above it: what is larger is clipped."""
        return self.max + 2.0 ** (math.frexp(self.max)[1] - 2 - self.mantissa_bits)


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 3, -6)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 2, -14)
E2M1 = Format("e2m1", torch.float8_e4m3fn, 6.0, 1, 0)  # emulated: its values are E4M3 values too
FORMAT_BY_DTYPE = {E4M3.dtype: E4M3, E5M2.dtype: E5M2}


def _saturate(v: Tensor, fmt: Format) -> Tensor:
    """Clamp that keeps NaN. Compiled it is written with `where`: the min/max instructions that inductor emits for clamp
    corrupt a transposed float8 store beside them. Ends with the torch whose Triton has mended triton-lang/triton#11111.
    """
    if torch.compiler.is_compiling():
        largest = (
            6.0 if fmt == E2M1 else torch.finfo(fmt.dtype).max
        )  # constants; with dynamic shapes fmt.max would be an argument
        v = torch.where(v > largest, largest, v)
        return torch.where(v < -largest, -largest, v)
    return v.clamp(-fmt.max, fmt.max)


def cast(v: Tensor, fmt: Format) -> Tensor:
    """Round float32 `v`, any shape, to a tensor of `fmt.dtype`: nearest, ties to even, saturating, NaN kept.

    torch's own cast overflows to NaN or infinity, differently by version (pytorch#178817), hence saturation first.
    """
    return (round_in_steps(v, fmt) if fmt == E2M1 else _saturate(v, fmt)).to(fmt.dtype)


def round_to_format(
    v: Tensor, fmt: Format, dtype: torch.dtype, uniform: Tensor | None = None
) -> Tensor:
    """Rounds float32 `v` as `cast` does and returns the values in `dtype`, which holds all of them.

    Only E2M1 rounds stochastically, by the numbers `uniform`: see `round_in_steps`.
    """
    if fmt == E2M1:
        return round_in_steps(v, fmt, uniform).to(dtype)
    return cast(v, fmt).to(dtype)


def round_in_steps(v: Tensor, fmt: Format, uniform: Tensor | None = None) -> Tensor:
    """The values of `cast(v, fmt)` as float32, for formats without a torch dtype.

    `uniform`, numbers in [0, 1) of the shape of `v`, rounds up or down at random instead of to nearest: the mean over many draws
    is `v` itself.
    """
    v = _saturate(v, fmt)
    exponent = torch.frexp(v)[1] - 1
    step = torch.ldexp(torch.ones_like(v), exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits)
    steps = torch.round(v / step) if uniform is None else torch.floor(v / step + uniform)
    return _saturate(steps * step, fmt)  # 3 + 0.99999994 is 4 in float32


def random_key(seed: int, *words: int | str) -> Tensor:
    """The key, int32 [2], derived from these words: for example the name of a parameter and the number of a step."""
    digest = hashlib.blake2b(repr((seed, *words)).encode(), digest_size=8).digest()
    return torch.tensor(struct.unpack("<2i", digest), dtype=torch.int32)


class StridedStart(NamedTuple):
    """Element number `start` of a part of a tensor that is split: of every `ranks` runs of `run` elements the part has that of
    `rank`, as of a matrix that is split by columns."""

    start: int
    run: int
    rank: int
    ranks: int


Start = int | StridedStart
"""Where elements begin: in the whole tensor, or in a part of it."""


def advance_start(start: Start, by: int) -> Start:
    """The place `by` elements after `start`."""
    return start._replace(start=start.start + by) if isinstance(start, StridedStart) else start + by


def element_numbers(
    start: Start, count: int, device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    """The numbers, `dtype` [count], that elements from `start` on have in the whole tensor."""
    if not isinstance(start, StridedStart):
        return torch.arange(start, start + count, dtype=dtype, device=device)
    own = element_numbers(start.start, count, device, dtype)
    return own + (own // start.run * (start.ranks - 1) + start.rank) * start.run


def uniform_numbers(key: Tensor, lane: int, start: Start, count: int) -> Tensor:
    """`count` float32 numbers in [0, 1), multiples of 2^-24, for the elements from `start` on; lanes are separate streams. Keys
    [n, 2] give [n, count].

    The index goes through the two multiply-xorshift rounds of lowbias32 (C. Wellons, "Hash function prospector", 2018), with
    half of the key mixed in before each.
    """
    x = element_numbers(start, count, key.device)
    x = _shift_xor(x ^ (key[..., :1] + _int32(lane * 0x9E3779B9)), 16) * 0x7FEB352D
    x = _shift_xor(x + key[..., 1:], 15) * _int32(0x846CA68B)
    return ((_shift_xor(x, 16) >> 8) & 0xFFFFFF).float() * 2.0**-24


class RandomStream(NamedTuple):
    """A stream of random numbers: `key`, int32 [2], identifies the stream, `draw`, an int32 scalar, counts the draws from it, and
    `lane` selects a tensor within a draw.
    """

    key: Tensor
    draw: Tensor
    lane: int

    def uniform(self, start: int, count: int) -> Tensor:
        """As the function `uniform`, for this draw."""
        return uniform_numbers(derive_draw_key(self.key, self.draw), self.lane, start, count)


def derive_draw_key(key: Tensor, draw: Tensor) -> Tensor:
    """The key of one of the draws from the stream of `key`, made on its device."""
    return key ^ torch.stack([draw * _int32(0x9E3779B9), draw * _int32(0x85EBCA6B)])


def round_stochastic(v: Tensor, fmt: Format, u: Tensor) -> Tensor:
    """Float32 `v` on the grid of `fmt`, still float32: the upper neighbour where `u` is below the distance to the lower one.

    Steps are powers of two, so all of this is exact. It does not saturate; infinities and NaN stay. A step finer than 2^-126,
    as bfloat16 has them below 2^-119, counts as 2^-126: its reciprocal would not be a float32.
    """
    exponent = ((v.view(torch.int32) >> 23) & 0xFF) - 127
    step = (exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits).clamp(min=-126)
    count = v * power_of_two(-step)
    lower = count.floor()
    return (lower + (u < count - lower).float()) * power_of_two(step)


def _shift_xor(x: Tensor, by: int) -> Tensor:
    return x ^ (
        (x >> by) & (0xFFFFFFFF >> by)
    )  # int32 shifts copy the sign down; the mask takes it off


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
