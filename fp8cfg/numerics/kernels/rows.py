"""Triton kernel for one scale per row and per column: amaxes, cast and transpose in one launch.

A program has a strip of rows, or a strip of columns, to itself. It reads the strip twice: first for
the amaxes, then for the cast. The second read of rows comes from the cache. Formulas and names are the
same as in tensor.py.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp8cfg.numerics.kernels.tensor import (
    _compute_scale,
    _count_infinite,
    _record_infinite,
    _saturate,
    _store_columnwise,
    launch_on_device,
    pointer,
    record_pointer,
)

FLT_MAX = 3.4028234663852886e38
STRIP, LONG = 16, 256
"""Rows of a program, and columns that it reads at a time."""
STRIP_T, LONG_T = 32, 128
"""Columns of a program, and rows that it reads at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _row_amaxes(t, first, rows, columns, STRIP: tl.constexpr, LONG: tl.constexpr):
    """Returns the amaxes of STRIP rows from `first` on."""
    row = first + tl.arange(0, STRIP)
    row_offsets = row[:, None].to(tl.int64) * columns
    largest = tl.zeros([STRIP, LONG], tl.float32)
    start = first * 0  # a tensor: the type of a loop variable must not change
    while start < columns:
        column = start + tl.arange(0, LONG)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        v = tl.load(t + row_offsets + column[None, :], mask=mask, other=0.0).to(tl.float32)
        a = tl.abs(v)
        largest = tl.where(a > largest, a, largest)  # false for NaN, which is skipped
        start += LONG
    return tl.max(largest, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _column_amaxes(t, first, rows, columns, STRIP: tl.constexpr, LONG: tl.constexpr):
    """Returns the amaxes of STRIP columns from `first` on."""
    column = first + tl.arange(0, STRIP)
    largest = tl.zeros([LONG, STRIP], tl.float32)
    start = first * 0
    while start < rows:
        row = start + tl.arange(0, LONG)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        v = tl.load(t + row[:, None].to(tl.int64) * columns + column[None, :], mask=mask, other=0.0)
        a = tl.abs(v.to(tl.float32))
        largest = tl.where(a > largest, a, largest)
        start += LONG
    return tl.max(largest, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _cast_row_strip(
    t,
    data,
    scale_inv,
    record,
    counts,
    amaxes,
    first,
    rows,
    columns,
    target,
    highest,
    LARGEST: tl.constexpr,
    POWER_2: tl.constexpr,
    RECORD: tl.constexpr,
    COUNT: tl.constexpr,
    KNOWN: tl.constexpr,
    STRIP: tl.constexpr,
    LONG: tl.constexpr,
):
    """Quantizes STRIP rows from `first` on."""
    row = first + tl.arange(0, STRIP)
    row_offsets = row[:, None].to(tl.int64) * columns
    if KNOWN:
        amax = tl.load(amaxes + row, mask=row < rows, other=0.0)
    else:
        amax = _row_amaxes(t, first, rows, columns, STRIP, LONG)
    if RECORD:
        _record_infinite(record, tl.max(amax, 0))
    scale = _compute_scale(amax, target, highest, POWER_2)
    strip_amax = tl.max(amax, 0)
    start = first * 0
    while start < columns:
        column = start + tl.arange(0, LONG)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        v = tl.load(t + row_offsets + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if COUNT:
            _count_infinite(counts, v, strip_amax)
        tl.store(
            data + row_offsets + column[None, :],
            _saturate(v * scale[:, None], LARGEST).to(data.dtype.element_ty),
            mask=mask,
        )
        start += LONG
    tl.store(scale_inv + row, tl.div_rn(1.0, scale), mask=row < rows)


@triton.jit  # type: ignore[untyped-decorator]
def _cast_column_strip(
    t,
    data_t,
    scale_inv_t,
    record,
    counts,
    amaxes,
    first,
    rows,
    columns,
    target,
    highest,
    LARGEST: tl.constexpr,
    POWER_2: tl.constexpr,
    RECORD: tl.constexpr,
    COUNT: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    KNOWN: tl.constexpr,
    STRIP: tl.constexpr,
    LONG: tl.constexpr,
):
    """Quantizes STRIP columns from `first` on."""
    column = first + tl.arange(0, STRIP)
    if KNOWN:
        amax = tl.load(amaxes + column, mask=column < columns, other=0.0)
    else:
        amax = _column_amaxes(t, first, rows, columns, STRIP, LONG)
    if RECORD:
        _record_infinite(record, tl.max(amax, 0))
    scale = _compute_scale(amax, target, highest, POWER_2)
    strip_amax = tl.max(amax, 0)
    start = first * 0
    while start < rows:
        row = start + tl.arange(0, LONG)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        offsets = row[:, None].to(tl.int64) * columns + column[None, :]
        v = tl.load(t + offsets, mask=mask, other=0.0).to(tl.float32)
        if COUNT:
            _count_infinite(counts, v, strip_amax)
        q = _saturate(v * scale[None, :], LARGEST).to(data_t.dtype.element_ty)
        mask_t = (column < columns)[:, None] & (row < rows)[None, :]
        offsets_t = column[:, None].to(tl.int64) * rows + row[None, :]
        _store_columnwise(data_t, q, offsets, mask, offsets_t, mask_t, TRANSPOSE)
        start += LONG
    tl.store(scale_inv_t + column, tl.div_rn(1.0, scale), mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _cast_rows(
    t,
    data,
    scale_inv,
    data_t,
    scale_inv_t,
    record,
    counts,
    amaxes,
    amaxes_t,
    rows,
    columns,
    target,
    highest,
    LARGEST: tl.constexpr,
    POWER_2: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    RECORD: tl.constexpr,
    COUNT: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    KNOWN: tl.constexpr,
    KNOWN_T: tl.constexpr,
    STRIP: tl.constexpr,
    LONG: tl.constexpr,
    STRIP_T: tl.constexpr,
    LONG_T: tl.constexpr,
):
    """Quantizes a strip of columns in the first programs, and a strip of rows in the rest."""
    program = tl.program_id(0)
    # Column strips are fewer and take longer, so they start first.
    column_strips = 0
    if HAS_COLUMNS:
        column_strips = tl.cdiv(columns, STRIP_T)
    if program < column_strips:
        first = program * STRIP_T
        _cast_column_strip(
            t,
            data_t,
            scale_inv_t,
            record,
            counts,
            amaxes_t,
            first,
            rows,
            columns,
            target,
            highest,
            LARGEST=LARGEST,
            POWER_2=POWER_2,
            RECORD=RECORD and not HAS_ROWS,  # the row strips do it
            COUNT=COUNT and not HAS_ROWS,
            TRANSPOSE=TRANSPOSE,
            KNOWN=KNOWN_T,
            STRIP=STRIP_T,
            LONG=LONG_T,
        )
    elif HAS_ROWS:
        first = (program - column_strips) * STRIP
        _cast_row_strip(
            t,
            data,
            scale_inv,
            record,
            counts,
            amaxes,
            first,
            rows,
            columns,
            target,
            highest,
            LARGEST=LARGEST,
            POWER_2=POWER_2,
            RECORD=RECORD,
            COUNT=COUNT,
            KNOWN=KNOWN,
            STRIP=STRIP,
            LONG=LONG,
        )


@launch_on_device
def cast_rows(
    t: Tensor,
    largest: float,
    power_2: bool,
    data: Tensor | None,
    scale_inv: Tensor | None,
    data_t: Tensor | None,
    scale_inv_t: Tensor | None,
    transpose: bool = True,
    record: Tensor | None = None,
    amaxes: Tensor | None = None,
    amaxes_t: Tensor | None = None,
    counts: Tensor | None = None,
) -> Any:
    """Quantizes a matrix with a scale for each row, and for each column. Either may be left out.

    Args:
        t: Contiguous [R, C].
        largest: The largest value of the format.
        power_2: Whether to round scales down to powers of two.
        data: [R, C] with scales of rows, written. In float32 it receives the scaled values.
        scale_inv: Inverse scales of rows, float32 [R, 1], written.
        data_t: [C, R] with scales of columns, written. [R, C] without `transpose`.
        scale_inv_t: Inverse scales of columns, float32 [C, 1], written. [1, C] without `transpose`.
        transpose: Whether `data_t` is transposed.
        record: float32 []. Becomes infinite if `t` has an infinite element.
        amaxes: Amaxes of rows if they are known, float32 [R].
        amaxes_t: Amaxes of columns if they are known, float32 [C].
        counts: Infinite elements are added to its second element.

    Returns:
        The compiled kernel.
    """
    rows, columns = t.shape
    has_rows = data is not None
    has_columns = data_t is not None
    outputs = [pointer(output, t) for output in (data, scale_inv, data_t, scale_inv_t)]
    programs = has_rows * triton.cdiv(rows, STRIP) + has_columns * triton.cdiv(columns, STRIP_T)
    return _cast_rows[(programs,)](
        t,
        *outputs,
        record_pointer(record, t),
        pointer(counts, t),
        pointer(amaxes, t),
        pointer(amaxes_t, t),
        rows,
        columns,
        target=largest,
        highest=FLT_MAX,
        LARGEST=largest,
        POWER_2=power_2,
        HAS_ROWS=has_rows,
        HAS_COLUMNS=has_columns,
        RECORD=record is not None,
        COUNT=counts is not None,
        TRANSPOSE=transpose,
        KNOWN=amaxes is not None,
        KNOWN_T=amaxes_t is not None,
        STRIP=STRIP,
        LONG=LONG,
        STRIP_T=STRIP_T,
        LONG_T=LONG_T,
        num_warps=4,
        enable_fp_fusion=False,
    )
