"""Triton kernel of quantization by rows and columns: the scale of each from its amax, the cast, and the transpose, in one launch.

A program has some rows, or some columns, to itself and reads them twice, for their amaxes and for the cast: rows out of the cache.
Rules and rounding are those of tensor.py, by the same functions.
"""

from __future__ import annotations

from typing import Any

import torch
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
)

FLT_MAX = 3.4028234663852886e38
STRIP, LONG = 16, 256
"""Rows of a program, and columns that it reads at once."""
STRIP_T, LONG_T = 32, 128
"""Columns of a program, and rows that it reads at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _amaxes_of_rows(t, first, rows, columns, STRIP: tl.constexpr, LONG: tl.constexpr):
    """The amaxes of some rows, from the `first` on."""
    row = first + tl.arange(0, STRIP)
    at = row[:, None].to(tl.int64) * columns
    largest = tl.zeros([STRIP, LONG], tl.float32)
    start = first * 0
    while start < columns:
        column = start + tl.arange(0, LONG)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        a = tl.abs(tl.load(t + at + column[None, :], mask=inside, other=0.0).to(tl.float32))
        largest = tl.where(a > largest, a, largest)  # no NaN is greater
        start += LONG
    return tl.max(largest, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _amaxes_of_columns(t, first, rows, columns, STRIP: tl.constexpr, LONG: tl.constexpr):
    """The amaxes of some columns, from the `first` on."""
    column = first + tl.arange(0, STRIP)
    largest = tl.zeros([LONG, STRIP], tl.float32)
    start = first * 0
    while start < rows:
        row = start + tl.arange(0, LONG)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        a = tl.abs(
            tl.load(
                t + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0
            ).to(tl.float32)
        )
        largest = tl.where(a > largest, a, largest)
        start += LONG
    return tl.max(largest, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _strip_of_rows(
    t,
    data,
    scale_inv,
    seen,
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
    row = first + tl.arange(0, STRIP)
    at = row[:, None].to(tl.int64) * columns
    amax = (
        tl.load(amaxes + row, mask=row < rows, other=0.0)
        if KNOWN
        else _amaxes_of_rows(t, first, rows, columns, STRIP, LONG)
    )
    if RECORD:
        _record_infinite(seen, tl.max(amax, 0))
    scale, most = _compute_scale(amax, target, highest, POWER_2), tl.max(amax, 0)
    start = first * 0
    while start < columns:
        column = start + tl.arange(0, LONG)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        v = tl.load(t + at + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if COUNT:
            _count_infinite(counts, v, most)
        tl.store(
            data + at + column[None, :],
            _saturate(v * scale[:, None], LARGEST).to(data.dtype.element_ty),
            mask=inside,
        )
        start += LONG
    tl.store(scale_inv + row, tl.div_rn(1.0, scale), mask=row < rows)


@triton.jit  # type: ignore[untyped-decorator]
def _strip_of_columns(
    t,
    data_t,
    scale_inv_t,
    seen,
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
    column = first + tl.arange(0, STRIP)
    if KNOWN:
        amax = tl.load(amaxes + column, mask=column < columns, other=0.0)
    else:
        amax = _amaxes_of_columns(t, first, rows, columns, STRIP, LONG)
    if RECORD:
        _record_infinite(seen, tl.max(amax, 0))
    scale, most = _compute_scale(amax, target, highest, POWER_2), tl.max(amax, 0)
    start = first * 0
    while start < rows:
        row = start + tl.arange(0, LONG)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        v = tl.load(t + at, mask=inside, other=0.0).to(tl.float32)
        if COUNT:
            _count_infinite(counts, v, most)
        q = _saturate(v * scale[None, :], LARGEST).to(data_t.dtype.element_ty)
        inside_t = (column < columns)[:, None] & (row < rows)[None, :]
        _store_columnwise(
            data_t,
            q,
            at,
            inside,
            column[:, None].to(tl.int64) * rows + row[None, :],
            inside_t,
            TRANSPOSE,
        )
        start += LONG
    tl.store(scale_inv_t + column, tl.div_rn(1.0, scale), mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _cast_rows(
    t,
    data,
    scale_inv,
    data_t,
    scale_inv_t,
    seen,
    counts,
    amaxes,
    amaxes_t,
    rows,
    columns,
    target,
    highest,
    LARGEST: tl.constexpr,
    POWER_2: tl.constexpr,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
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
    program = tl.program_id(0)
    across = tl.cdiv(columns, STRIP_T) if ACROSS else 0
    if program < across:  # the fewer and the longer ones begin first
        first = program * STRIP_T
        _strip_of_columns(
            t,
            data_t,
            scale_inv_t,
            seen,
            counts,
            amaxes_t,
            first,
            rows,
            columns,
            target,
            highest,
            LARGEST,
            POWER_2,
            RECORD and not ALONG,
            COUNT and not ALONG,
            TRANSPOSE,
            KNOWN_T,
            STRIP_T,
            LONG_T,
        )
    elif ALONG:
        first = (program - across) * STRIP
        _strip_of_rows(
            t,
            data,
            scale_inv,
            seen,
            counts,
            amaxes,
            first,
            rows,
            columns,
            target,
            highest,
            LARGEST,
            POWER_2,
            RECORD,
            COUNT,
            KNOWN,
            STRIP,
            LONG,
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
    seen: Tensor | None = None,
    amaxes: Tensor | None = None,
    amaxes_t: Tensor | None = None,
    counts: Tensor | None = None,
) -> Any:
    """Quantize the contiguous matrix `t` [R, C] with a scale for each row into `data` and `scale_inv` [R, 1], and with one for each
    column, transposed, into `data_t` [C, R] and `scale_inv_t` [C, 1]; without `transpose` they are [R, C] and [1, C]. Either pair
    may be None. `largest` is the format's maximum. The amaxes of rows and of columns are read from `amaxes` [R] and `amaxes_t` [C],
    where they are given. `seen`, float32 [], becomes infinite where an amax is, and infinite elements are added to `counts`, if
    these are given. `data` in float32 receives the scaled values. Returns the compiled kernel."""
    (rows, columns), along, across = t.shape, data is not None, data_t is not None
    targets = [x if x is not None else t for x in (data, scale_inv, data_t, scale_inv_t)]
    programs = along * triton.cdiv(rows, STRIP) + across * triton.cdiv(columns, STRIP_T)
    return _cast_rows[(programs,)](
        t,
        *targets,
        (t if seen is None else seen.view(torch.int32)),
        t if counts is None else counts,
        t if amaxes is None else amaxes,
        t if amaxes_t is None else amaxes_t,
        rows,
        columns,
        largest,
        FLT_MAX,
        largest,
        power_2,
        along,
        across,
        seen is not None,
        counts is not None,
        transpose,
        amaxes is not None,
        amaxes_t is not None,
        STRIP,
        LONG,
        STRIP_T,
        LONG_T,
        num_warps=4,
        enable_fp_fusion=False,
    )
