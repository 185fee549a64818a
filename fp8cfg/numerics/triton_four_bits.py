"""Triton functions of four-bit quantization (NVFP4): the scale of a tensor, E4M3 scales under it, E2M1 codes, two to a byte.

Parts of the kernel of blocks (triton_block_kernel.py). The formulas are those of block_scaling.py, formats.py and
stochastic_rounding.py to the bit, the rounding to E4M3 and E2M1 among them: what is added to was multiplied by a power of two,
exactly, so that a compiler which contracts both to one rounding changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEAREST = tl.constexpr(12582912.0)
"""1.5 * 2^23: what is added and taken off again is rounded to a whole number, ties to even."""


@triton.jit  # type: ignore[untyped-decorator]
def _first_level(parts, count, PARTS: tl.constexpr):
    """The amax of a tensor, NaN where it has a NaN, and the scale of it all: `first_level_of`."""
    of = tl.arange(0, PARTS)
    bits = tl.load(parts + of, mask=of < count, other=0.0).to(tl.int32, bitcast=True)
    amax = tl.max(bits, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(2688.0, amax)
    scale = tl.where(scale > 3.4028234663852886e38, 3.4028234663852886e38, scale)
    return amax, tl.where((amax == 0) | (scale == 0), 1.0, scale)


@triton.jit
def _e4m3(amax, whole):
    """The scale that elements are multiplied by, and the byte of E4M3 that decodes them under `whole`: `_two_levels`."""
    v = amax * (whole * 0.16666666666666666)
    v = tl.where(v > 448.0, 448.0, v)
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(v < 0.015625, ((v * 512.0 + NEAREST) - NEAREST).to(tl.int32), normal)
    decode = tl.where(
        code < 8,
        code.to(tl.float32) * 0.001953125,
        ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True),
    )
    encode = tl.div_rn(1.0, decode * tl.div_rn(1.0, whole))
    encode = tl.where(encode > 3.4028234663852886e38, 3.4028234663852886e38, encode)
    return tl.where(v != v, float("nan"), encode), tl.where(v != v, 0x7F, code).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _mixed(x, by: tl.constexpr):
    return x ^ ((x >> by) & (0xFFFFFFFF >> by))


@triton.jit  # type: ignore[untyped-decorator]
def _uniform(key, draw, index, LANE: tl.constexpr):
    """Numbers in [0, 1) of the elements `index`, int32: `Random.uniform`. Constants are the signed ones of 32 bits."""
    count = tl.load(draw)
    first = tl.load(key) ^ (count * -1640531527)
    second = tl.load(key + 1) ^ (count * -2048144789)
    x = _mixed(index ^ (first + LANE * -1640531527), 16) * 0x7FEB352D
    x = _mixed(x + second, 15) * -2073254261
    return ((_mixed(x, 16) >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit  # type: ignore[untyped-decorator]
def _e2m1(v, key, draw, index, RANDOM: tl.constexpr, LANE: tl.constexpr):
    """Codes of float32 `v`, which lies within -6 and 6: `round_in_steps`. Of NaN it is some number."""
    exponent = ((v.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    exponent = tl.where(exponent < 0, 0, tl.where(exponent > 2, 2, exponent))
    steps = v * ((128 - exponent) << 23).to(tl.float32, bitcast=True)  # of 2^(exponent - 1)
    if RANDOM:
        steps = tl.floor(steps + _uniform(key, draw, index, LANE))
        negative = steps < 0
    else:
        steps = (steps + NEAREST) - NEAREST
        negative = v.to(tl.int32, bitcast=True) < 0  # also of what became zero
    code = tl.abs(steps).to(tl.int32) + 2 * exponent
    return (tl.where(code > 7, 7, code) & 7) | tl.where(negative, 8, 0)


@triton.jit
def _e4m3_of_e2m1(code, v):
    """The bytes of E4M3 that are the numbers of E2M1 codes, and NaN where `v`, which they stand for, is NaN."""
    magnitude = code & 7
    byte = tl.where(magnitude > 1, magnitude * 4 + 0x30, magnitude * 0x30) | ((code & 8) << 4)
    return tl.where(v != v, 0x7F, byte)


@triton.jit  # type: ignore[untyped-decorator]
def _store_packed(to, code, i, j, rows, columns, WIDTH: tl.constexpr):
    """The codes of the tile (i, j) of a matrix, two to a byte, of which the first has the low bits; rows of whole 16 bytes."""
    low, high = tl.split(tl.reshape(code, [WIDTH, WIDTH // 2, 2]))
    row, byte = i * WIDTH + tl.arange(0, WIDTH), j * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
    width = tl.cdiv(columns, 32) * 16
    inside = (row < rows)[:, None] & (byte < width)[None, :]
    tl.store(
        to + row[:, None].to(tl.int64) * width + byte[None, :],
        (low | (high << 4)).to(tl.uint8),
        mask=inside,
    )
