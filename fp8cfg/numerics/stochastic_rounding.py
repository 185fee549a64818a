"""Stochastic rounding: up or down with the odds that preserve the mean, so that updates below a step of the grid still add up.

The random numbers are a function of a key, a lane and the index of the element. Nothing advances: the same key gives the
same numbers in whatever pieces a tensor is processed, in eager and in compiled code, and on whichever rank.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from fp8cfg.numerics.exact_float32 import power_of_two
from fp8cfg.numerics.formats import Format


def random_key(seed: int, *words: int | str) -> Tensor:
    """The key, int32 [2], derived from these words: for example the name of a parameter and the number of a step."""
    digest = hashlib.blake2b(repr((seed, *words)).encode(), digest_size=8).digest()
    return torch.tensor(struct.unpack("<2i", digest), dtype=torch.int32)


class Strided(NamedTuple):
    """Element number `start` of a part of a tensor that is split: of every `ranks` runs of `run` elements the part has that of
    `rank`, as of a matrix that is split by columns."""

    start: int
    run: int
    rank: int
    ranks: int


Start = int | Strided
"""Where elements begin: in the whole tensor, or in a part of it."""


def further(start: Start, by: int) -> Start:
    """The place `by` elements after `start`."""
    return start._replace(start=start.start + by) if isinstance(start, Strided) else start + by


def elements(
    start: Start, count: int, device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    """The numbers, `dtype` [count], that elements from `start` on have in the whole tensor."""
    if not isinstance(start, Strided):
        return torch.arange(start, start + count, dtype=dtype, device=device)
    own = elements(start.start, count, device, dtype)
    return own + (own // start.run * (start.ranks - 1) + start.rank) * start.run


def uniform(key: Tensor, lane: int, start: Start, count: int) -> Tensor:
    """`count` float32 numbers in [0, 1), multiples of 2^-24, for the elements from `start` on; lanes are separate streams. Keys
    [n, 2] give [n, count].

    The index goes through the two multiply-xorshift rounds of lowbias32 (C. Wellons, "Hash function prospector", 2018), with
    half of the key mixed in before each.
    """
    x = elements(start, count, key.device)
    x = _shift_xor(x ^ (key[..., :1] + _int32(lane * 0x9E3779B9)), 16) * 0x7FEB352D
    x = _shift_xor(x + key[..., 1:], 15) * _int32(0x846CA68B)
    return ((_shift_xor(x, 16) >> 8) & 0xFFFFFF).float() * 2.0**-24


class Random(NamedTuple):
    """A stream of random numbers: `key`, int32 [2], identifies the stream, `draw`, an int32 scalar, counts the draws from it, and
    `lane` selects a tensor within a draw.
    """

    key: Tensor
    draw: Tensor
    lane: int

    def uniform(self, start: int, count: int) -> Tensor:
        """As the function `uniform`, for this draw."""
        return uniform(key_of_draw(self.key, self.draw), self.lane, start, count)


def key_of_draw(key: Tensor, draw: Tensor) -> Tensor:
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
