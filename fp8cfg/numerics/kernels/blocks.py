"""Triton kernel of quantization by blocks, one launch and one read for both dimensions: a scale for 128 elements along either, or
for 128x128; for 32 or 32x32 with powers of two (MX); for 16 or 16x16 under one of the tensor, in four bits (NVFP4).

Rules and rounding are those of tensor.py, by the same functions. Scales are stored where products read
them: by the strides of their tensor, or in the tiles of the tensor cores (gemm.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8cfg.numerics.kernels.tensor import (
    PARTS,
    _compute_scale,
    _count_infinite,
    _record_infinite,
    _saturate,
    _store_columnwise,
    compute_part_amaxes,
    launch_on_device,
    num_parts,
)

NEAREST = tl.constexpr(12582912.0)
"""1.5 * 2^23: what is added and taken off again is rounded to a whole number, ties to even."""


@triton.jit  # type: ignore[untyped-decorator]
def _first_level(parts, count, PARTS: tl.constexpr):
    """The amax of a tensor, NaN where it has a NaN, and the scale of it all: `global_scale_from_amax`."""
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


WIDTH = 128
"""Rows and columns of a program's tile, and elements that share a scale under block scaling."""
FOUR = 16
"""Elements that share a scale under NVFP4."""
WARPS = 16
"""Warps of a program: each of their threads then has up to 128 registers, and an SM 16 warps or more at once, where 8 warps of more
registers, some 200, would be alone on it."""


@triton.jit
def _e8m0(amax, broken, reciprocal):
    """The scale that elements are multiplied by, a power of two, NaN where a block is `broken`, and the byte of its inverse."""
    v = amax * reciprocal
    bits = v.to(tl.int32, bitcast=True)
    byte, mantissa = bits >> 23, bits & 0x7FFFFF
    byte += ((mantissa > 0) & (byte < 254) & ((byte > 0) | (mantissa > 0x400000))).to(tl.int32)
    byte = tl.where(v == float("inf"), 254, byte)
    least = (byte * 0 + 0x400000).to(
        tl.float32, bitcast=True
    )  # 2^-127, which Triton takes for a float64 where it is written out
    encode = tl.where(byte == 254, least, ((254 - byte) << 23).to(tl.float32, bitcast=True))
    encode = tl.where(byte == 0, 1.0, encode)
    return tl.where(broken > 0, float("nan"), encode), tl.where(broken > 0, 255, byte).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _scales(amax, broken, whole, target, highest, POWER_2: tl.constexpr, BLOCK: tl.constexpr):
    """The scale that elements are multiplied by, and what is stored of it. Under MX `highest` is the reciprocal of the format's
    maximum."""
    if BLOCK == 16:
        return _e4m3(amax, whole)
    elif BLOCK == 32:
        return _e8m0(amax, broken, highest)
    else:
        scale = _compute_scale(amax, target, highest, POWER_2)
        return scale, tl.div_rn(1.0, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _square(a, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of each block of BLOCK x BLOCK."""
    parts: tl.constexpr = WIDTH // BLOCK
    return tl.max(tl.max(tl.reshape(a, [parts, BLOCK, parts, BLOCK]), 3), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _store_scales(
    to,
    scale,
    i,
    j,
    rows,
    columns,
    by_row,
    by_column,
    SWIZZLED: tl.constexpr,
    WIDTH: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The scales of blocks of HIGH x WIDE of the tile (i, j), by strides; swizzled they are bytes for each of WIDTH rows."""
    row = i * (WIDTH // HIGH) + tl.arange(0, WIDTH // HIGH)
    column = j * (WIDTH // WIDE) + tl.arange(0, WIDTH // WIDE)
    inside = (row < tl.cdiv(rows, HIGH))[:, None] & (column < tl.cdiv(columns, WIDE))[None, :]
    if SWIZZLED:
        tiles = tl.cdiv(columns, 4 * WIDE)
        r, tile = tl.arange(0, WIDTH), (i * tiles + column // 4).to(tl.int64)
        place = (r % 32 * 16 + r // 32 * 4)[:, None] + (tile * 512 + column % 4)[None, :]
        scale = tl.where(inside, scale, 0)
        if HIGH > 1:
            scale = tl.reshape(
                tl.broadcast_to(scale[:, None, :], [WIDTH // HIGH, HIGH, WIDTH // WIDE]),
                [WIDTH, WIDTH // WIDE],
            )
            scale = tl.where((i * WIDTH + r < rows)[:, None], scale, 0)
        tl.store(to + place, scale, mask=(column < 4 * tiles)[None, :])
    else:
        tl.store(
            to + row[:, None].to(tl.int64) * by_row + column[None, :].to(tl.int64) * by_column,
            scale,
            mask=inside,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _cast_blocks(
    t,
    data,
    scale_inv,
    data_t,
    scale_inv_t,
    seen,
    counts,
    parts,
    global_scale_inv,
    key,
    draw,
    rows,
    columns,
    count,
    by_row,
    by_column,
    by_row_t,
    by_column_t,
    target,
    highest,
    LARGEST: tl.constexpr,
    POWER_2: tl.constexpr,
    SQUARE: tl.constexpr,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    RECORD: tl.constexpr,
    COUNT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    RANDOM: tl.constexpr,
    LANE: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n: tl.constexpr = WIDTH // BLOCK
    four: tl.constexpr = BLOCK == 16
    high: tl.constexpr = BLOCK if SQUARE else 1
    across = tl.cdiv(columns, WIDTH)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    row, column = i * WIDTH + tl.arange(0, WIDTH), j * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    inside_t = (column < columns)[:, None] & (row < rows)[None, :]
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    at_t = column[:, None].to(tl.int64) * rows + row[None, :]
    v = tl.load(t + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.abs(v)
    a = tl.where(a >= 0, a, 0.0)
    odd = (v != v).to(tl.int32)
    whole = 1.0
    if four:
        amax, whole = _first_level(parts, count, PARTS)
        if tl.program_id(0) == 0:
            tl.store(global_scale_inv, tl.div_rn(1.0, whole))
            if RECORD:
                tl.atomic_max(
                    seen, amax.to(tl.int32, bitcast=True), mask=amax == amax, sem="relaxed"
                )
    elif RECORD or COUNT:
        amax = tl.max(tl.max(a, 1), 0)
        if RECORD:
            _record_infinite(seen, amax)
    if COUNT:
        _count_infinite(counts, v, amax)
    if SQUARE:
        scale, inverse = _scales(
            _square(a, WIDTH, BLOCK),
            _square(odd, WIDTH, BLOCK),
            whole,
            target,
            highest,
            POWER_2,
            BLOCK,
        )
        q = _saturate(
            tl.reshape(
                tl.reshape(v, [n, BLOCK, n, BLOCK]) * scale[:, None, :, None], [WIDTH, WIDTH]
            ),
            LARGEST,
        )
        inverse_t = tl.trans(inverse)
    elif ALONG:
        of, broken = (
            tl.max(tl.reshape(a, [WIDTH, n, BLOCK]), 2),
            tl.max(tl.reshape(odd, [WIDTH, n, BLOCK]), 2),
        )
        scale, inverse = _scales(of, broken, whole, target, highest, POWER_2, BLOCK)
        q = _saturate(
            tl.reshape(tl.reshape(v, [WIDTH, n, BLOCK]) * scale[:, :, None], [WIDTH, WIDTH]),
            LARGEST,
        )
    if four:
        index = row[:, None] * (tl.cdiv(columns, BLOCK) * BLOCK) + column[None, :]
        code = tl.where(inside, _e2m1(q, key, draw, index, RANDOM, LANE), 0)
        q = code if TRANSPOSE else _e4m3_of_e2m1(code, q)
    if ALONG:
        if four and TRANSPOSE:
            _store_packed(data, q, i, j, rows, columns, WIDTH)
        else:
            tl.store(data + at, q.to(data.dtype.element_ty), mask=inside)
        _store_scales(
            scale_inv, inverse, i, j, rows, columns, by_row, by_column, SWIZZLED, WIDTH, high, BLOCK
        )
    if ACROSS:
        if not SQUARE:
            of, broken = (
                tl.max(tl.reshape(a, [n, BLOCK, WIDTH]), 1),
                tl.max(tl.reshape(odd, [n, BLOCK, WIDTH]), 1),
            )
            scale, inverse = _scales(of, broken, whole, target, highest, POWER_2, BLOCK)
            q = _saturate(
                tl.reshape(tl.reshape(v, [n, BLOCK, WIDTH]) * scale[:, None, :], [WIDTH, WIDTH]),
                LARGEST,
            )
            inverse_t = tl.trans(inverse)
            if four:
                q = _e4m3_of_e2m1(_e2m1(q, key, draw, index, RANDOM, LANE), q)
        if four and TRANSPOSE:
            _store_packed(data_t, tl.trans(q), j, i, columns, rows, WIDTH)
        else:
            _store_columnwise(
                data_t, q.to(data_t.dtype.element_ty), at, inside, at_t, inside_t, TRANSPOSE
            )
        _store_scales(
            scale_inv_t,
            inverse_t,
            j,
            i,
            columns,
            rows,
            by_row_t,
            by_column_t,
            SWIZZLED,
            WIDTH,
            high,
            BLOCK,
        )


@launch_on_device
def cast_blocks(
    t: Tensor,
    highest: float,
    largest: float,
    power_2: bool,
    square: bool,
    data: Tensor | None,
    scale_inv: Tensor | None,
    data_t: Tensor | None,
    scale_inv_t: Tensor | None,
    mx: int = 0,
    transpose: bool = True,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> Any:
    """Quantize the contiguous matrix `t` [R, C] with a scale for 1x128 elements, or 128x128 where it is `square`: into `data` and
    `scale_inv`, of any strides, and its transpose into `data_t` and `scale_inv_t`; either pair may be None. `highest` is the scale
    where that would be infinite, `largest` the format's maximum. With `mx` scales are for so many elements, powers of two as MX
    has them, of `largest` alone, and bytes of E8M0; swizzled where they are flat. Without `transpose` the second pair is laid out
    as `t` is, with scales for 128x1. `seen`, float32 [], becomes infinite where `t` has an infinite element, and these are added to
    `counts`, if they are given. `data` in float32 receives the scaled values. Returns the compiled kernel.
    """
    (rows, columns), along, across = t.shape, data is not None, data_t is not None
    targets = [x if x is not None else t for x in (data, scale_inv, data_t, scale_inv_t)]
    swizzled = (targets[1] if along else targets[3]).dim() == 1
    strides = (
        [0] * 4
        if swizzled
        else [*targets[1].stride(), *targets[3].stride()[:: 1 if transpose else -1]]
    )
    tiles = triton.cdiv(rows, WIDTH) * triton.cdiv(columns, WIDTH)
    return _cast_blocks[(tiles,)](
        t,
        *targets,
        (t if seen is None else seen.view(torch.int32)),
        t if counts is None else counts,
        t,
        t,
        t,
        t,
        rows,
        columns,
        0,
        *strides,
        largest,
        1.0 / largest if mx else highest,
        largest,
        power_2,
        square,
        along,
        across,
        transpose,
        seen is not None,
        counts is not None,
        swizzled,
        False,
        0,
        PARTS,
        WIDTH,
        mx or WIDTH,
        num_warps=8 if mx and not square else WARPS,  # 1x32 takes more registers, and would spill
        enable_fp_fusion=False,
    )


@launch_on_device
def cast_nvfp4(
    t: Tensor,
    data: Tensor,
    scale_inv: Tensor,
    data_t: Tensor | None,
    scale_inv_t: Tensor | None,
    global_scale_inv: Tensor,
    random: tuple[Tensor, Tensor] | None = None,
    lane: int = 0,
    seen: Tensor | None = None,
    transpose: bool = True,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> Any:
    """Quantize the contiguous matrix `t` [R, C] to E2M1, with a scale for 1x16 elements, or for 16x16 where its transpose is
    wanted, and one of the tensor: into bytes `data` and `scale_inv`, its transpose into `data_t` and `scale_inv_t`, all as hardware
    reads them (gemm.py), and `global_scale_inv`, float32 []. Without `transpose` they are as a weight is stored, all row-major
    and a byte an element, E4M3: one matrix with scales for 16x16, or one with scales for 1x16 and one for 16x1. `random`, the key
    and the count of draws, and `lane` are those of stochastic rounding. The amax is folded into the running maximum `seen`, float32
    [], and infinite elements are added to `counts`, if these are given; where `t` is a part of the tensor, its `amax` is
    given, []. Returns the compiled kernel."""
    (rows, columns), both = t.shape, data_t is not None
    parts, count = amax, 1
    if parts is None:
        parts, count = torch.empty(PARTS, dtype=torch.float32, device=t.device), num_parts(t)
        compute_part_amaxes(t, parts, keep_nan=True)
    targets = [
        t if x is None else x.view(torch.uint8) for x in (data, scale_inv, data_t, scale_inv_t)
    ]
    strides = [0] * 4 if transpose else [*targets[1].stride(), *targets[3].stride()[::-1]]
    tiles = triton.cdiv(rows, WIDTH) * triton.cdiv(columns, WIDTH)
    return _cast_blocks[(tiles,)](
        t,
        *targets,
        t if seen is None else seen.view(torch.int32),
        t if counts is None else counts,
        parts,
        global_scale_inv,
        *(random or (t, t)),
        rows,
        columns,
        count,
        *strides,
        0.0,
        0.0,
        6.0,
        False,
        both == transpose,
        True,
        both,
        transpose,
        seen is not None,
        counts is not None,
        transpose,
        random is not None,
        lane,
        PARTS,
        WIDTH,
        FOUR,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
