"""Triton kernel of quantization by blocks, one launch and one read for both dimensions: a scale for 128 elements along either, or
for 128x128; for 32 with powers of two (MX).

Rules and rounding are those of triton_kernels.py, whose functions these are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8cfg.numerics.triton_kernels import _note_infinite, _saturated, _scale_of, _store_across

WIDTH = 128
"""Rows and columns of a program's tile, and elements that share a scale under block scaling."""


@triton.jit
def _e8m0(amax, broken, reciprocal):  # type: ignore[no-untyped-def]
    """The scale that elements are multiplied by and its inverse: powers of two, NaN where a block is `broken`."""
    v = amax * reciprocal
    bits = v.to(tl.int32, bitcast=True)
    byte, mantissa = bits >> 23, bits & 0x7FFFFF
    byte += ((mantissa > 0) & (byte < 254) & ((byte > 0) | (mantissa > 0x400000))).to(tl.int32)
    byte = tl.where(v == float("inf"), 254, byte)
    least = (byte * 0 + 0x400000).to(tl.float32, bitcast=True)  # 2^-127, which Triton takes for a float64 where it is written out
    encode = tl.where(byte == 254, least, ((254 - byte) << 23).to(tl.float32, bitcast=True))
    encode = tl.where(byte == 0, 1.0, encode)
    decode = tl.where(byte == 0, least, (byte << 23).to(tl.float32, bitcast=True))
    return tl.where(broken > 0, float("nan"), encode), tl.where(broken > 0, float("nan"), decode)


@triton.jit  # type: ignore[untyped-decorator]
def _square(a, WIDTH: tl.constexpr, MX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of each block of MX x MX."""
    parts: tl.constexpr = WIDTH // MX
    return tl.max(tl.max(tl.reshape(a, [parts, MX, parts, MX]), 3), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _inverse_in(dtype: tl.constexpr, inverse):  # type: ignore[no-untyped-def]
    """Inverse scales in the `dtype` of their place: float32, or bytes of E8M0."""
    if dtype == tl.uint8:
        return (inverse.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    else:
        return inverse


@triton.jit  # type: ignore[untyped-decorator]
def _cast_blocks(  # type: ignore[no-untyped-def]
    t, data, scale_inv, data_t, scale_inv_t, seen, rows, columns, target, highest, LARGEST: tl.constexpr, POWER_2: tl.constexpr,
    SQUARE: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, TRANSPOSE: tl.constexpr, RECORD: tl.constexpr,
    WIDTH: tl.constexpr, MX: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, WIDTH), tl.cdiv(columns, WIDTH)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    row, column = i * WIDTH + tl.arange(0, WIDTH), j * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    v = tl.load(t + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.abs(v)
    a = tl.where(a >= 0, a, 0.0)
    if RECORD:
        _note_infinite(seen, tl.max(tl.max(a, 1), 0))
    inside_t = (column < columns)[:, None] & (row < rows)[None, :]
    at_t = column[:, None].to(tl.int64) * rows + row[None, :]
    if MX:  # `highest` is the reciprocal of the format's maximum; `v` with its blocks of MX apart, along either dimension
        parts: tl.constexpr = WIDTH // MX
        odd = (v != v).to(tl.int32)
        part = tl.arange(0, parts)
        down, across = tl.cdiv(rows, MX), tl.cdiv(columns, MX)
        if SQUARE:
            amax, broken = (_square(a, WIDTH, MX), _square(odd, WIDTH, MX))
            scale, inverse = _e8m0(amax, broken, highest)
            q = tl.reshape(v, [parts, MX, parts, MX]) * scale[:, None, :, None]
            q = _saturated(tl.reshape(q, [WIDTH, WIDTH]), LARGEST).to(data.dtype.element_ty)
            block, block_t = i * parts + part, j * parts + part
            blocks = (block < down)[:, None] & (block_t < across)[None, :]
            if ALONG:
                tl.store(data + at, q, mask=inside)
                inverse_e8m0 = _inverse_in(scale_inv.dtype.element_ty, inverse)
                tl.store(scale_inv + block[:, None] * across + block_t[None, :], inverse_e8m0, mask=blocks)
            if ACROSS:
                tl.store(data_t + at_t, tl.trans(q), mask=inside_t)
                tl.store(scale_inv_t + block_t[None, :] * down + block[:, None], inverse, mask=blocks)
        else:
            if ALONG:
                amax, broken = tl.max(tl.reshape(a, [WIDTH, parts, MX]), 2), tl.max(tl.reshape(odd, [WIDTH, parts, MX]), 2)
                scale, inverse = _e8m0(amax, broken, highest)
                q = tl.reshape(tl.reshape(v, [WIDTH, parts, MX]) * scale[:, :, None], [WIDTH, WIDTH])
                tl.store(data + at, _saturated(q, LARGEST).to(data.dtype.element_ty), mask=inside)
                block = j * parts + part
                blocks = (row < rows)[:, None] & (block < across)[None, :]
                inverse = _inverse_in(scale_inv.dtype.element_ty, inverse)
                tl.store(scale_inv + row[:, None].to(tl.int64) * across + block[None, :], inverse, mask=blocks)
            if ACROSS:
                amax, broken = tl.max(tl.reshape(a, [parts, MX, WIDTH]), 1), tl.max(tl.reshape(odd, [parts, MX, WIDTH]), 1)
                scale, inverse = _e8m0(amax, broken, highest)
                q = tl.reshape(tl.reshape(v, [parts, MX, WIDTH]) * scale[:, None, :], [WIDTH, WIDTH])
                q = _saturated(q, LARGEST).to(data_t.dtype.element_ty)
                _store_across(data_t, q, at, inside, at_t, inside_t, TRANSPOSE)
                block = i * parts + part
                blocks = (block < down)[:, None] & (column < columns)[None, :]
                inverse = _inverse_in(scale_inv_t.dtype.element_ty, inverse)
                if TRANSPOSE:
                    tl.store(scale_inv_t + column[None, :].to(tl.int64) * down + block[:, None], inverse, mask=blocks)
                else:
                    tl.store(scale_inv_t + block[:, None].to(tl.int64) * columns + column[None, :], inverse, mask=blocks)
    elif SQUARE:
        scale = _scale_of(tl.max(tl.max(a, 1), 0), target, highest, POWER_2)
        q = _saturated(v * scale, LARGEST).to(data.dtype.element_ty)
        if ALONG:
            tl.store(data + at, q, mask=inside)
            tl.store(scale_inv + i * across + j, tl.div_rn(1.0, scale))
        if ACROSS:
            tl.store(data_t + at_t, tl.trans(q), mask=inside_t)
            tl.store(scale_inv_t + j * down + i, tl.div_rn(1.0, scale))
    else:
        if ALONG:
            scale = _scale_of(tl.max(a, 1), target, highest, POWER_2)
            q = _saturated(v * scale[:, None], LARGEST).to(data.dtype.element_ty)
            tl.store(data + at, q, mask=inside)
            tl.store(scale_inv + row * across + j, tl.div_rn(1.0, scale), mask=row < rows)
        if ACROSS:
            scale = _scale_of(tl.max(a, 0), target, highest, POWER_2)
            q = _saturated(v * scale[None, :], LARGEST).to(data_t.dtype.element_ty)
            _store_across(data_t, q, at, inside, at_t, inside_t, TRANSPOSE)
            place = column * down + i if TRANSPOSE else i * columns + column
            tl.store(scale_inv_t + place, tl.div_rn(1.0, scale), mask=column < columns)


def cast_blocks(
    t: Tensor, highest: float, largest: float, power_2: bool, square: bool, data: Tensor | None, scale_inv: Tensor | None,
    data_t: Tensor | None, scale_inv_t: Tensor | None, mx: int = 0, transpose: bool = True,
    seen: Tensor | None = None,
) -> Any:
    """Quantize the contiguous matrix `t` [R, C] with a scale for 1x128 elements, or 128x128 where it is `square`: into `data` and
    `scale_inv`, and its transpose into `data_t` and `scale_inv_t`; either pair may be None, of a square the second. `highest` is
    the scale where that would be infinite, `largest` the format's maximum. With `mx` scales are for so many elements, powers of
    two as MX has them, of `largest` alone, and E8M0 bytes where `scale_inv` holds such. Without `transpose` the second pair is laid
    out as `t` is, with scales for 128x1. `seen`, float32 [], becomes infinite where `t` has an infinite element. `data` in float32
    receives the scaled values. Returns the compiled kernel."""
    (rows, columns), along, across = t.shape, data is not None, data_t is not None
    targets = [x if x is not None else t for x in (data, scale_inv, data_t, scale_inv_t)]
    tiles = triton.cdiv(rows, WIDTH) * triton.cdiv(columns, WIDTH)
    return _cast_blocks[(tiles,)](
        t, *targets, (t if seen is None else seen.view(torch.int32)), rows, columns, largest, 1.0 / largest if mx else highest,
        largest, power_2, square, along, across, transpose, seen is not None, WIDTH, mx, num_warps=8)
