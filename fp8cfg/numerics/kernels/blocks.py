"""Triton kernel for scales of tiles, in one launch and one read for both dimensions.

    block scaling   a scale for 128 elements along either dimension, or for 128 x 128
    MXFP8           32 or 32 x 32, powers of two
    NVFP4           16 or 16 x 16 below a global scale, four bits

A program has a square of WIDTH x WIDTH elements, with complete tiles of all algorithms in both
directions. Formulas and names are the same as in tensor.py. Scales are stored where GEMMs read them:
by the strides of their tensor, or in the order of the tensor cores (`gemm.swizzle_scales`).
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
    pointer,
    record_pointer,
)

NEAREST = tl.constexpr(12582912.0)
"""1.5 * 2^23. Adding and subtracting it rounds a float32 to an integer, ties to even."""


@triton.jit  # type: ignore[untyped-decorator]
def _global_scale(parts, count, PARTS: tl.constexpr):
    """Returns the amax of a tensor, NaN if it has one, and `scaling.global_scale_from_amax`."""
    part = tl.arange(0, PARTS)
    # As integers, the bits of magnitudes are in the same order, and NaN is above all of them.
    bits = tl.load(parts + part, mask=part < count, other=0.0).to(tl.int32, bitcast=True)
    amax = tl.max(bits, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(2688.0, amax)  # 448 * 6
    scale = tl.where(scale > 3.4028234663852886e38, 3.4028234663852886e38, scale)
    return amax, tl.where((amax == 0) | (scale == 0), 1.0, scale)


@triton.jit
def _nvfp4_scales(amax, global_scale):
    """`scaling.nvfp4_scales`: the encode scale, and the E4M3 byte of the decode scale."""
    v = amax * (global_scale * 0.16666666666666666)
    v = tl.where(v > 448.0, 448.0, v)
    # Rounds to E4M3 by integer arithmetic: to 3 mantissa bits, ties to even, with the exponent bias
    # of 7 instead of 127. Below 2^-6 E4M3 is subnormal and has steps of 2^-9.
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(v < 0.015625, ((v * 512.0 + NEAREST) - NEAREST).to(tl.int32), normal)
    decode = tl.where(
        code < 8,
        code.to(tl.float32) * 0.001953125,
        ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True),
    )
    encode = tl.div_rn(1.0, decode * tl.div_rn(1.0, global_scale))
    encode = tl.where(encode > 3.4028234663852886e38, 3.4028234663852886e38, encode)
    return tl.where(v != v, float("nan"), encode), tl.where(v != v, 0x7F, code).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _xor_shifted(x, by: tl.constexpr):
    return x ^ ((x >> by) & (0xFFFFFFFF >> by))


@triton.jit  # type: ignore[untyped-decorator]
def _uniform(key, draw, index, LANE: tl.constexpr):
    """`RandomStream.uniform`: numbers in [0, 1) for the elements `index`, int32."""
    # The constants of formats.py as signed 32-bit numbers.
    count = tl.load(draw)
    first = tl.load(key) ^ (count * -1640531527)
    second = tl.load(key + 1) ^ (count * -2048144789)
    x = _xor_shifted(index ^ (first + LANE * -1640531527), 16) * 0x7FEB352D
    x = _xor_shifted(x + second, 15) * -2073254261
    return ((_xor_shifted(x, 16) >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit  # type: ignore[untyped-decorator]
def _e2m1_codes(v, key, draw, index, RANDOM: tl.constexpr, LANE: tl.constexpr):
    """`formats.round_in_steps`: the codes of float32 `v` in [-6, 6]. NaN becomes any number."""
    exponent = ((v.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    exponent = tl.where(exponent < 0, 0, tl.where(exponent > 2, 2, exponent))
    steps = v * ((128 - exponent) << 23).to(tl.float32, bitcast=True)  # of 2^(exponent - 1)
    if RANDOM:
        steps = tl.floor(steps + _uniform(key, draw, index, LANE))
        negative = steps < 0
    else:
        steps = (steps + NEAREST) - NEAREST
        negative = v.to(tl.int32, bitcast=True) < 0  # the sign bit: keeps -0
    code = tl.abs(steps).to(tl.int32) + 2 * exponent
    return (tl.where(code > 7, 7, code) & 7) | tl.where(negative, 8, 0)


@triton.jit
def _e2m1_as_e4m3(code, v):
    """Returns the E4M3 bytes of the values of E2M1 codes.

    `v` are the values before rounding. A byte is NaN if its `v` is NaN.
    """
    magnitude = code & 7
    byte = tl.where(magnitude > 1, magnitude * 4 + 0x30, magnitude * 0x30) | ((code & 8) << 4)
    return tl.where(v != v, 0x7F, byte)


@triton.jit  # type: ignore[untyped-decorator]
def _store_packed(output, code, i, j, rows, columns, WIDTH: tl.constexpr):
    """Stores the codes of the square (i, j), two to a byte. The first of two has the low bits."""
    low, high = tl.split(tl.reshape(code, [WIDTH, WIDTH // 2, 2]))
    row, byte = i * WIDTH + tl.arange(0, WIDTH), j * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
    width = tl.cdiv(columns, 32) * 16  # bytes of a row, padded to whole 16 bytes
    mask = (row < rows)[:, None] & (byte < width)[None, :]
    tl.store(
        output + row[:, None].to(tl.int64) * width + byte[None, :],
        (low | (high << 4)).to(tl.uint8),
        mask=mask,
    )


WIDTH = 128
"""Rows and columns of a program's square, and elements that share a scale under block scaling."""
NVFP4_TILE = 16
"""Elements that share a scale under NVFP4."""
WARPS = 16
"""Warps of a program. Each thread then has up to 128 registers, and an SM runs 16 warps or more at
once. 8 warps would need about 200 registers a thread, and an SM would run only these 8.
"""


@triton.jit
def _mxfp8_scales(amax, has_nan, inverse_max):
    """`scaling.mxfp8_scales`: the encode scale, and the E8M0 byte of the decode scale.

    `has_nan` is above 0 for tiles with NaN. `inverse_max` is 1 / the format's maximum.
    """
    v = amax * inverse_max
    bits = v.to(tl.int32, bitcast=True)
    byte, mantissa = bits >> 23, bits & 0x7FFFFF
    byte += ((mantissa > 0) & (byte < 254) & ((byte > 0) | (mantissa > 0x400000))).to(tl.int32)
    byte = tl.where(v == float("inf"), 254, byte)
    # 2^-127 by its bits: as a literal Triton takes it for a float64.
    smallest = (byte * 0 + 0x400000).to(tl.float32, bitcast=True)
    encode = tl.where(byte == 254, smallest, ((254 - byte) << 23).to(tl.float32, bitcast=True))
    encode = tl.where(byte == 0, 1.0, encode)
    encode = tl.where(has_nan > 0, float("nan"), encode)
    return encode, tl.where(has_nan > 0, 255, byte).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _tile_scales(
    amax, has_nan, global_scale, target, highest, POWER_2: tl.constexpr, BLOCK: tl.constexpr
):
    """`scaling.tile_scales_from_amaxes`: the encode scale, and the decode scale as it is stored.

    BLOCK selects the algorithm. Under MXFP8 `highest` is 1 / the format's maximum.
    """
    if BLOCK == 16:
        return _nvfp4_scales(amax, global_scale)
    elif BLOCK == 32:
        return _mxfp8_scales(amax, has_nan, highest)
    else:
        scale = _compute_scale(amax, target, highest, POWER_2)
        return scale, tl.div_rn(1.0, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _max_of_squares(a, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the maximum of each BLOCK x BLOCK of a square, [WIDTH / BLOCK, WIDTH / BLOCK]."""
    n: tl.constexpr = WIDTH // BLOCK
    return tl.max(tl.max(tl.reshape(a, [n, BLOCK, n, BLOCK]), 3), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _store_scales(
    output,
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
    """Stores the scales of tiles of HIGH x WIDE of the square (i, j), by strides or swizzled."""
    row = i * (WIDTH // HIGH) + tl.arange(0, WIDTH // HIGH)
    column = j * (WIDTH // WIDE) + tl.arange(0, WIDTH // WIDE)
    mask = (row < tl.cdiv(rows, HIGH))[:, None] & (column < tl.cdiv(columns, WIDE))[None, :]
    if SWIZZLED:
        # Blocks of 128 rows x 4 scales are 512 bytes each (`gemm.swizzle_scales`). In a block the
        # rows r, r + 32, r + 64 and r + 96 are neighbors.
        tiles = tl.cdiv(columns, 4 * WIDE)
        r = tl.arange(0, WIDTH)
        tile = (i * tiles + column // 4).to(tl.int64)
        place = (r % 32 * 16 + r // 32 * 4)[:, None] + (tile * 512 + column % 4)[None, :]
        scale = tl.where(mask, scale, 0)
        if HIGH > 1:
            # The hardware knows only tiles of one row. A square repeats its scale for each of its
            # rows.
            scale = tl.reshape(
                tl.broadcast_to(scale[:, None, :], [WIDTH // HIGH, HIGH, WIDTH // WIDE]),
                [WIDTH, WIDTH // WIDE],
            )
            scale = tl.where((i * WIDTH + r < rows)[:, None], scale, 0)
        tl.store(output + place, scale, mask=(column < 4 * tiles)[None, :])
    else:
        tl.store(
            output + row[:, None].to(tl.int64) * by_row + column[None, :].to(tl.int64) * by_column,
            scale,
            mask=mask,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _cast_blocks(
    t,
    data,
    scale_inv,
    data_t,
    scale_inv_t,
    record,
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
    """Quantizes a square of WIDTH x WIDTH with tiles along rows (ALONG) and columns (ACROSS).

    The square is read once and reshaped for each direction. In [WIDTH, n, BLOCK] the last dimension
    has the tiles along rows. In [n, BLOCK, WIDTH] the middle dimension has the tiles along columns.
    """
    n: tl.constexpr = WIDTH // BLOCK
    is_nvfp4: tl.constexpr = BLOCK == 16
    high: tl.constexpr = BLOCK if SQUARE else 1
    squares_across = tl.cdiv(columns, WIDTH)
    i, j = tl.program_id(0) // squares_across, tl.program_id(0) % squares_across
    row, column = i * WIDTH + tl.arange(0, WIDTH), j * WIDTH + tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    mask_t = (column < columns)[:, None] & (row < rows)[None, :]
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    offsets_t = column[:, None].to(tl.int64) * rows + row[None, :]
    v = tl.load(t + offsets, mask=mask, other=0.0).to(tl.float32)
    a = tl.abs(v)
    a = tl.where(a >= 0, a, 0.0)
    is_nan = (v != v).to(tl.int32)

    # The amax of the tensor (NVFP4) or of this square. Squares record only an infinite amax.
    global_scale = 1.0
    if is_nvfp4:
        amax, global_scale = _global_scale(parts, count, PARTS)
        if tl.program_id(0) == 0:
            tl.store(global_scale_inv, tl.div_rn(1.0, global_scale))
            if RECORD:
                tl.atomic_max(
                    record, amax.to(tl.int32, bitcast=True), mask=amax == amax, sem="relaxed"
                )
    elif RECORD or COUNT:
        amax = tl.max(tl.max(a, 1), 0)
        if RECORD:
            _record_infinite(record, amax)
    if COUNT:
        _count_infinite(counts, v, amax)

    # Scale and saturate: square tiles serve both directions.
    if SQUARE:
        scale, inverse = _tile_scales(
            _max_of_squares(a, WIDTH, BLOCK),
            _max_of_squares(is_nan, WIDTH, BLOCK),
            global_scale,
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
        tile_amax = tl.max(tl.reshape(a, [WIDTH, n, BLOCK]), 2)
        has_nan = tl.max(tl.reshape(is_nan, [WIDTH, n, BLOCK]), 2)
        scale, inverse = _tile_scales(
            tile_amax, has_nan, global_scale, target, highest, POWER_2, BLOCK
        )
        q = _saturate(
            tl.reshape(tl.reshape(v, [WIDTH, n, BLOCK]) * scale[:, :, None], [WIDTH, WIDTH]),
            LARGEST,
        )
    if is_nvfp4:
        index = row[:, None] * (tl.cdiv(columns, BLOCK) * BLOCK) + column[None, :]
        code = tl.where(mask, _e2m1_codes(q, key, draw, index, RANDOM, LANE), 0)
        # GEMMs read packed codes. Stored weights (without TRANSPOSE) are E4M3 bytes.
        q = code if TRANSPOSE else _e2m1_as_e4m3(code, q)
    if ALONG:
        if is_nvfp4 and TRANSPOSE:
            _store_packed(data, q, i, j, rows, columns, WIDTH)
        else:
            tl.store(data + offsets, q.to(data.dtype.element_ty), mask=mask)
        _store_scales(
            scale_inv, inverse, i, j, rows, columns, by_row, by_column, SWIZZLED, WIDTH, high, BLOCK
        )
    if ACROSS:
        if not SQUARE:
            tile_amax = tl.max(tl.reshape(a, [n, BLOCK, WIDTH]), 1)
            has_nan = tl.max(tl.reshape(is_nan, [n, BLOCK, WIDTH]), 1)
            scale, inverse = _tile_scales(
                tile_amax, has_nan, global_scale, target, highest, POWER_2, BLOCK
            )
            q = _saturate(
                tl.reshape(tl.reshape(v, [n, BLOCK, WIDTH]) * scale[:, None, :], [WIDTH, WIDTH]),
                LARGEST,
            )
            inverse_t = tl.trans(inverse)
            if is_nvfp4:
                q = _e2m1_as_e4m3(_e2m1_codes(q, key, draw, index, RANDOM, LANE), q)
        if is_nvfp4 and TRANSPOSE:
            _store_packed(data_t, tl.trans(q), j, i, columns, rows, WIDTH)
        else:
            q = q.to(data_t.dtype.element_ty)
            _store_columnwise(data_t, q, offsets, mask, offsets_t, mask_t, TRANSPOSE)
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
    record: Tensor | None = None,
    counts: Tensor | None = None,
) -> Any:
    """Quantizes a matrix under block scaling or MXFP8.

    Args:
        t: Contiguous [R, C].
        highest: The scale instead of infinity. Not read under MXFP8.
        largest: The largest value of the format.
        power_2: Whether to round scales down to powers of two. Not read under MXFP8.
        square: Whether a scale covers 128 x 128 (32 x 32) elements instead of 1 x 128 (1 x 32).
        data: [R, C], written. In float32 it receives the scaled values. None leaves this direction
            out.
        scale_inv: Its inverse scales, of any strides, written. Under MXFP8 bytes of E8M0, swizzled
            if they are flat.
        data_t: The transpose [C, R], written with other scales. None leaves this direction out.
        scale_inv_t: Its inverse scales, written.
        mx: Elements that share a scale under MXFP8. 0 is block scaling.
        transpose: Whether `data_t` is transposed. Otherwise it is [R, C], with scales of 128 x 1.
        record: float32 []. Becomes infinite if `t` has an infinite element.
        counts: Infinite elements are added to its second element.

    Returns:
        The compiled kernel.
    """
    rows, columns = t.shape
    outputs = [pointer(output, t) for output in (data, scale_inv, data_t, scale_inv_t)]
    _, scales, _, scales_t = outputs
    # `t` stands in for missing scales, and only scales can be flat.
    is_swizzled = scales.dim() == 1 or scales_t.dim() == 1
    strides = [0, 0, 0, 0]
    if not is_swizzled:
        strides_t = scales_t.stride()
        if not transpose:
            # The kernel computes the scales of the transpose, which are stored transposed.
            strides_t = strides_t[::-1]
        strides = [*scales.stride(), *strides_t]
    block, scale_limit, num_warps = WIDTH, highest, WARPS
    if mx:
        block, scale_limit = mx, 1.0 / largest
        if not square:
            num_warps = 8  # with 16 warps 1 x 32 needs more registers than a thread has, and spills
    squares = triton.cdiv(rows, WIDTH) * triton.cdiv(columns, WIDTH)
    return _cast_blocks[(squares,)](
        t,
        *outputs,
        record_pointer(record, t),
        pointer(counts, t),
        t,  # only NVFP4 reads the arguments from `parts` to `draw`
        t,
        t,
        t,
        rows,
        columns,
        0,
        *strides,
        target=largest,
        highest=scale_limit,
        LARGEST=largest,
        POWER_2=power_2,
        SQUARE=square,
        ALONG=data is not None,
        ACROSS=data_t is not None,
        TRANSPOSE=transpose,
        RECORD=record is not None,
        COUNT=counts is not None,
        SWIZZLED=is_swizzled,
        RANDOM=False,
        LANE=0,
        PARTS=PARTS,
        WIDTH=WIDTH,
        BLOCK=block,
        num_warps=num_warps,
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
    record: Tensor | None = None,
    transpose: bool = True,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> Any:
    """Quantizes a matrix to E2M1, with a scale for 16 elements and a global one.

    With `transpose` the hardware can read the result (gemm.py): packed codes and swizzled scales.
    Tiles are 16 x 16 with `data_t`, and 1 x 16 without. Without `transpose` the result is a stored
    weight: row-major E4M3 bytes. Tiles are 16 x 16 without `data_t`. With it they are 1 x 16 in
    `data` and 16 x 1 in `data_t`.

    Args:
        t: Contiguous [R, C].
        data: Bytes of the matrix, written.
        scale_inv: Bytes of its inverse scales, written.
        data_t: Bytes of the other direction, written.
        scale_inv_t: Bytes of its inverse scales, written.
        global_scale_inv: float32 [], written.
        random: Key and number of draws of stochastic rounding. None rounds to nearest.
        lane: The lane of stochastic rounding.
        record: Running maximum, float32 [], that the amax is folded into.
        transpose: See above.
        amax: Amax of the whole tensor, float32 [], if `t` is a shard of it.
        counts: Infinite elements are added to its second element.

    Returns:
        The compiled kernel.
    """
    rows, columns = t.shape
    has_data_t = data_t is not None
    if amax is None:
        parts = torch.empty(PARTS, dtype=torch.float32, device=t.device)
        num_amaxes = num_parts(t)
        compute_part_amaxes(t, parts, keep_nan=True)
    else:
        parts = amax
        num_amaxes = 1
    outputs = []
    for output in (data, scale_inv, data_t, scale_inv_t):
        if output is None:
            outputs.append(t)  # see `pointer`
        else:
            outputs.append(output.view(torch.uint8))
    strides = [0, 0, 0, 0]
    if not transpose:
        strides = [*outputs[1].stride(), *outputs[3].stride()[::-1]]
    squares = triton.cdiv(rows, WIDTH) * triton.cdiv(columns, WIDTH)
    return _cast_blocks[(squares,)](
        t,
        *outputs,
        record_pointer(record, t),
        pointer(counts, t),
        parts,
        global_scale_inv,
        *(random or (t, t)),
        rows,
        columns,
        num_amaxes,
        *strides,
        target=0.0,
        highest=0.0,
        LARGEST=6.0,
        POWER_2=False,
        SQUARE=has_data_t == transpose,
        ALONG=True,
        ACROSS=has_data_t,
        TRANSPOSE=transpose,
        RECORD=record is not None,
        COUNT=counts is not None,
        SWIZZLED=transpose,
        RANDOM=random is not None,
        LANE=lane,
        PARTS=PARTS,
        WIDTH=WIDTH,
        BLOCK=NVFP4_TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
