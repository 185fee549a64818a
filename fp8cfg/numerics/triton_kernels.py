"""Triton kernels of quantization: casts with their transposes, amaxes and scales in one read of a tensor.

    largest_parts   the amaxes of parts of a tensor; returns at once where a delayed scale is set, for nobody reads them then
    cast            scale, saturate and round to FP8, row-major and, where asked, transposed; folds the amax into a running maximum

    cast_blocks     the same with a scale for 128 elements along either dimension, or for 128x128; for 32 with powers of two (MX)

A scale for a row is made by triton_row_kernel.py.

Delayed scaling reads a tensor once, current scaling and a scale that was never set twice. The scale is made in the kernel, so that
no launch stands between. The formulas are those of scaling.py, formats.py and block_scaling.py, division and reciprocal rounded to
nearest: bit for bit the same scaled float32 values, amaxes and scales; the conversion to FP8 is the hardware's cvt.rn.satfinite.

Saturation and maxima are written with `where`: tl.minimum and tl.maximum that pass NaN on corrupt a transposed float8 store beside
them (triton-lang/triton#11111, Triton 3.6 at least).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 1024
"""Programs of `largest_parts`, and numbers that each program of `cast` reads where it makes a scale."""
BLOCK = 4096
ROWS, COLUMNS = 64, 64
"""The tile of `cast`."""
WIDTH = 128
"""Rows and columns of the tile of `cast_blocks`, and elements that share a scale under block scaling."""


@triton.jit  # type: ignore[untyped-decorator]
def _largest_parts(  # type: ignore[no-untyped-def]
    t, scales, parts, count, ROLE: tl.constexpr, DELAYED: tl.constexpr, BLOCK: tl.constexpr
):
    if DELAYED:  # noqa: SIM102, one is decided as this is compiled, the other as it runs
        if tl.load(scales + ROLE) != 0:
            return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    largest = tl.zeros([BLOCK], tl.float32)
    while start < count:
        at = start + tl.arange(0, BLOCK)
        a = tl.abs(tl.load(t + at, mask=at < count, other=0.0).to(tl.float32))
        largest = tl.where(a > largest, a, largest)  # no NaN is greater
        start += tl.num_programs(0) * BLOCK
    tl.store(parts + tl.program_id(0), tl.max(largest))


@triton.jit  # type: ignore[untyped-decorator]
def _scale_of(amax, target, highest, POWER_2: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.div_rn(target, amax)
    scale = tl.where(scale == float("inf"), highest, scale)
    scale = tl.where(amax > 0, tl.where(amax < float("inf"), scale, 1.0), 1.0)
    if POWER_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def _saturated(v, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    v = tl.where(v > LARGEST, LARGEST, v)
    return tl.where(v < -LARGEST, -LARGEST, v)


@triton.jit  # type: ignore[untyped-decorator]
def _cast(  # type: ignore[no-untyped-def]
    t, scales, history, parts, data, transposed, scale_inv, rows, columns, count, target, LARGEST: tl.constexpr,
    ROLE: tl.constexpr, DELAYED: tl.constexpr, RECORD: tl.constexpr, POWER_2: tl.constexpr, TRANSPOSE: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    old = tl.load(scales + ROLE) if DELAYED else 0.0
    of = tl.arange(0, PARTS)
    amax = tl.max(tl.load(parts + of, mask=of < tl.where(old == 0, count, 0), other=0.0))
    scale = _scale_of(amax, target, 3.4028234663852886e38, POWER_2)
    scale = tl.where(old == 0, scale, old)
    across = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    row = (program // across) * ROWS + tl.arange(0, ROWS)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    v = tl.load(t + at, mask=inside, other=0.0).to(tl.float32)
    if RECORD:  # float32 numbers that are not negative are in the order of their bits
        a = tl.abs(v)
        seen = tl.max(tl.max(tl.where(a >= 0, a, 0.0), 1), 0)
        tl.atomic_max(history + ROLE, seen.to(tl.int32, bitcast=True))
    q = _saturated(v * scale, LARGEST).to(data.dtype.element_ty)
    tl.store(data + at, q, mask=inside)
    if TRANSPOSE:
        across_inside = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(transposed + column[:, None].to(tl.int64) * rows + row[None, :], tl.trans(q), mask=across_inside)
    if program == 0:
        tl.store(scale_inv, tl.div_rn(1.0, scale))


def cast(
    t: Tensor, scales: Tensor | None, history: Tensor | None, role: int, target: float, largest: float, power_2: bool, data: Tensor,
    transposed: Tensor | None, scale_inv: Tensor,
) -> Any:
    """Quantize the contiguous matrix `t` into `data`, `transposed` and `scale_inv`. `scales` and `history` are those of delayed
    scaling, None under current scaling; `history` also where no amax is recorded. `target` is what the amax is brought to,
    `largest` the format's maximum. `data` in float32 receives the scaled values. Returns the compiled kernel."""
    (rows, columns), count = t.shape, min(PARTS, triton.cdiv(t.numel(), BLOCK))
    parts = torch.empty(PARTS, dtype=torch.float32, device=t.device)
    delayed, of = scales is not None, parts if scales is None else scales
    _largest_parts[(count,)](t, of, parts, t.numel(), role, delayed, BLOCK, num_warps=8)
    seen = (parts if history is None else history[0]).view(torch.int32)
    other = data if transposed is None else transposed
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    return _cast[(tiles,)](
        t, of, seen, parts, data, other, scale_inv, rows, columns, count, target, largest, role, delayed, history is not None,
        power_2, transposed is not None, PARTS, ROWS, COLUMNS, num_warps=4)


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
def _cast_blocks(  # type: ignore[no-untyped-def]
    t, data, scale_inv, data_t, scale_inv_t, rows, columns, target, highest, LARGEST: tl.constexpr, POWER_2: tl.constexpr,
    SQUARE: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, WIDTH: tl.constexpr, MX: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, WIDTH), tl.cdiv(columns, WIDTH)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    row, column = i * WIDTH + tl.arange(0, WIDTH), j * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    v = tl.load(t + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.abs(v)
    a = tl.where(a >= 0, a, 0.0)
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
                tl.store(scale_inv + block[:, None] * across + block_t[None, :], inverse, mask=blocks)
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
                tl.store(scale_inv + row[:, None].to(tl.int64) * across + block[None, :], inverse, mask=blocks)
            if ACROSS:
                amax, broken = tl.max(tl.reshape(a, [parts, MX, WIDTH]), 1), tl.max(tl.reshape(odd, [parts, MX, WIDTH]), 1)
                scale, inverse = _e8m0(amax, broken, highest)
                q = tl.reshape(tl.reshape(v, [parts, MX, WIDTH]) * scale[:, None, :], [WIDTH, WIDTH])
                tl.store(data_t + at_t, tl.trans(_saturated(q, LARGEST).to(data_t.dtype.element_ty)), mask=inside_t)
                block = i * parts + part
                blocks = (block < down)[:, None] & (column < columns)[None, :]
                tl.store(scale_inv_t + column[None, :].to(tl.int64) * down + block[:, None], inverse, mask=blocks)
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
            tl.store(data_t + at_t, tl.trans(q), mask=inside_t)
            tl.store(scale_inv_t + column * down + i, tl.div_rn(1.0, scale), mask=column < columns)


def cast_blocks(
    t: Tensor, highest: float, largest: float, power_2: bool, square: bool, data: Tensor | None, scale_inv: Tensor | None,
    data_t: Tensor | None, scale_inv_t: Tensor | None, mx: int = 0,
) -> Any:
    """Quantize the contiguous matrix `t` [R, C] with a scale for 1x128 elements, or 128x128 where it is `square`: into `data` and
    `scale_inv`, and its transpose into `data_t` and `scale_inv_t`; either pair may be None, of a square the second. `highest` is
    the scale where that would be infinite, `largest` the format's maximum. With `mx` scales are for so many elements, powers of
    two as MX has them, of `largest` alone. `data` in float32 receives the scaled values. Returns the compiled kernel."""
    (rows, columns), along, across = t.shape, data is not None, data_t is not None
    targets = [x if x is not None else t for x in (data, scale_inv, data_t, scale_inv_t)]
    tiles = triton.cdiv(rows, WIDTH) * triton.cdiv(columns, WIDTH)
    return _cast_blocks[(tiles,)](
        t, *targets, rows, columns, largest, 1.0 / largest if mx else highest, largest, power_2, square, along, across, WIDTH, mx,
        num_warps=8)
