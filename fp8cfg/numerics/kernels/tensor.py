"""Triton kernels for tensors with one scale: amaxes, and a cast that also writes the transpose.

    compute_part_amaxes   amaxes of parts of a tensor. `cast` computes the scale of current scaling
                          from them. If a delayed scale is set, the kernel returns at once.
    count                 the same kernel counts values that do not fit, for tensors that plain torch
                          operations quantize
    cast                  scales, saturates and rounds to FP8, row-major and, if asked, transposed;
                          folds the amax into a running maximum

Tiles are in blocks.py, rows in rows.py. Both share the small functions at the top of this file.

Delayed scaling reads a tensor once, current scaling twice. Each program of `cast` computes the scale
from the part amaxes, so that no launch is needed in between.

The formulas come from scaling.py and formats.py. Divisions and reciprocals are rounded to nearest,
products and sums are not fused: scaled float32 values, amaxes and scales are equal bit for bit. The
hardware converts to FP8 (cvt.rn.satfinite).

Names in kernels: `t` is the matrix that is read, row-major. `mask` is true for the elements of a
program that are in the matrix. The suffix `_t` is the transpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _compute_scale(amax, target, highest, POWER_2: tl.constexpr):
    """`scaling.compute_scale` with a fallback of 1. The scale moves the amax to `target`."""
    scale = tl.div_rn(target, amax)
    scale = tl.where(scale == float("inf"), highest, scale)
    scale = tl.where(amax > 0, tl.where(amax < float("inf"), scale, 1.0), 1.0)
    if POWER_2:
        # Clears the mantissa.
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _record_infinite(record, amax):
    """Writes infinity to `record`, the bits of a float32, if `amax` is infinite."""
    # Finite amaxes are not recorded, so only few programs write.
    tl.atomic_max(record, amax.to(tl.int32, bitcast=True), mask=amax == float("inf"), sem="relaxed")


@triton.jit
def _count(counts, is_beyond, is_infinite):
    """Adds the numbers of clipped and of infinite elements of a tile to `counts`.

    `is_beyond` includes infinite elements. Call it only if a tile has some: atomics are slow.
    """
    num_infinite = tl.sum(tl.sum(is_infinite.to(tl.float32), 1), 0)
    num_beyond = tl.sum(tl.sum(is_beyond.to(tl.float32), 1), 0)
    tl.atomic_add(counts, num_beyond - num_infinite, sem="relaxed")
    tl.atomic_add(counts + 1, num_infinite, sem="relaxed")


@triton.jit
def _count_infinite(counts, v, amax):
    """Adds the number of infinite elements of the tile `v` to `counts`, if `amax` is infinite."""
    if amax == float("inf"):
        tl.atomic_add(
            counts + 1,
            tl.sum(tl.sum((tl.abs(v) == float("inf")).to(tl.float32), 1), 0),
            sem="relaxed",
        )


@triton.jit  # type: ignore[untyped-decorator]
def _saturate(v, LARGEST: tl.constexpr):
    # Comparisons instead of clamp, which would not keep NaN.
    v = tl.where(v > LARGEST, LARGEST, v)
    return tl.where(v < -LARGEST, -LARGEST, v)


@triton.jit  # type: ignore[untyped-decorator]
def _store_columnwise(output, q, offsets, mask, offsets_t, mask_t, TRANSPOSE: tl.constexpr):
    """Stores a tile for GEMMs that contract rows: transposed, or laid out as the input."""
    if TRANSPOSE:
        tl.store(output + offsets_t, tl.trans(q), mask=mask_t)
    else:
        tl.store(output + offsets, q, mask=mask)


PARTS = 1024
"""The maximum number of programs of `compute_part_amaxes`, and of amaxes that `cast` reads."""
BLOCK = 4096
"""Elements that a program of `compute_part_amaxes` reads at a time."""
ROWS, COLUMNS = 64, 64
"""The tile of a program of `cast`."""
_P = ParamSpec("_P")


def launch_on_device(
    launch: Callable[Concatenate[Tensor, _P], Any],
) -> Callable[Concatenate[Tensor, _P], Any]:
    """Decorator: launches on the GPU of the first argument. Triton launches on the current GPU."""

    @functools.wraps(launch)
    def wrapper(t: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        with torch.cuda.device_of(t):
            return launch(t, *args, **kwargs)

    return wrapper


def pointer(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """Returns an argument of a kernel: the tensor, or `placeholder` for None.

    A kernel has no optional pointers. A flag tells it not to read or write the placeholder.
    """
    if tensor is None:
        return placeholder
    return tensor


def record_pointer(record: Tensor | None, placeholder: Tensor) -> Tensor:
    """Returns the bits of a running maximum, float32 [], as an argument of a kernel.

    There is no atomic maximum of floats. The bits of magnitudes are in the same order.
    """
    if record is None:
        return placeholder
    return record.view(torch.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _read_in_parts(
    t,
    amax,
    scales,
    output,
    count,
    REACH: tl.constexpr,
    ROLE: tl.constexpr,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    NAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads `t`, flat, in strides over all programs.

    Without COUNT each program stores the amax of its part in `output`. If SCALED and the scale is
    set, nobody needs the amaxes, and nothing is read. With COUNT the numbers of values that do not
    fit are added to `output`. If `amax` fits, nothing is read.
    """
    factor = 0.0
    if SCALED:
        factor = tl.load(scales + ROLE)
    if COUNT:
        tensor_amax = tl.load(amax)
        # Two ifs: Triton has no `and` of numbers that are loaded.
        if tensor_amax < float("inf"):  # noqa: SIM102
            if tensor_amax * factor <= REACH:
                return
    elif SCALED:  # noqa: SIM102, SCALED is known to the compiler, the scale is not
        if factor != 0:
            return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # A running result for each lane. They are reduced once, after the loop.
    largest = tl.zeros([BLOCK], tl.float32)
    clipped = tl.zeros([BLOCK], tl.float32)
    infinite = tl.zeros([BLOCK], tl.float32)
    while start < count:
        offsets = start + tl.arange(0, BLOCK)
        a = tl.abs(tl.load(t + offsets, mask=offsets < count, other=0.0).to(tl.float32))
        if COUNT:
            clipped += ((a < float("inf")) & (a * factor > REACH)).to(tl.float32)
            infinite += (a == float("inf")).to(tl.float32)
        else:
            is_larger = a > largest  # false for NaN, which is skipped
            if NAN:
                is_larger = is_larger | (a != a)
            largest = tl.where(is_larger, a, largest)
        start += tl.num_programs(0) * BLOCK
    if COUNT:
        if SCALED:
            tl.atomic_add(output, tl.sum(clipped, 0), sem="relaxed")
        tl.atomic_add(output + 1, tl.sum(infinite, 0), sem="relaxed")
    else:
        # As integers, the bits of magnitudes are in the same order, and NaN is above all of them. A
        # maximum of floats would skip NaN.
        tl.store(
            output + tl.program_id(0),
            tl.max(largest.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True),
        )


@triton.jit  # type: ignore[untyped-decorator]
def _cast(
    t,
    scales,
    history,
    parts,
    counts,
    data,
    transposed,
    scale_inv,
    rows,
    columns,
    count,
    target,
    LARGEST: tl.constexpr,
    REACH: tl.constexpr,
    ROLE: tl.constexpr,
    DELAYED: tl.constexpr,
    RECORD: tl.constexpr,
    COUNT: tl.constexpr,
    POWER_2: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantizes a tile of ROWS x COLUMNS. See `cast`."""
    # Each program computes the scale again. If the delayed scale is set, it reads no amaxes.
    stored_scale = 0.0
    if DELAYED:
        stored_scale = tl.load(scales + ROLE)
    part = tl.arange(0, PARTS)
    is_read = part < tl.where(stored_scale == 0, count, 0)
    amax = tl.max(tl.load(parts + part, mask=is_read, other=0.0))
    scale = _compute_scale(amax, target, 3.4028234663852886e38, POWER_2)
    scale = tl.where(stored_scale == 0, scale, stored_scale)

    tiles_across = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    row = (program // tiles_across) * ROWS + tl.arange(0, ROWS)
    column = (program % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    # 64 bits: a tensor may have more than 2^31 elements.
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    v = tl.load(t + offsets, mask=mask, other=0.0).to(tl.float32)

    # Under delayed scaling nobody has read the tensor yet, so the amax of this tile is recorded.
    # Under current scaling `amax` is the amax of the tensor already.
    if DELAYED and (RECORD or COUNT):
        a = tl.abs(v)
        amax = tl.max(tl.max(tl.where(a >= 0, a, 0.0), 1), 0)
        if COUNT:  # noqa: SIM102, COUNT is known to the compiler, the amax is not
            if amax * scale > REACH:
                _count(counts, a * scale > REACH, a == float("inf"))
    elif COUNT:
        _count_infinite(counts, v, amax)
    if RECORD:  # noqa: SIM102
        if DELAYED or program == 0:
            tl.atomic_max(history + ROLE, amax.to(tl.int32, bitcast=True), sem="relaxed")

    q = _saturate(v * scale, LARGEST).to(data.dtype.element_ty)
    tl.store(data + offsets, q, mask=mask)
    if TRANSPOSE:
        # cuBLAS contracts the last dimension of both operands. GEMMs that contract the rows read
        # this copy. tl.trans moves the tile through shared memory, so both stores are coalesced.
        mask_t = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(
            transposed + column[:, None].to(tl.int64) * rows + row[None, :],
            tl.trans(q),
            mask=mask_t,
        )
    if program == 0:
        tl.store(scale_inv, tl.div_rn(1.0, scale))


def num_parts(t: Tensor) -> int:
    """Returns the number of parts that `compute_part_amaxes` divides `t` into."""
    parts: int = min(PARTS, triton.cdiv(t.numel(), BLOCK))
    return parts


@launch_on_device
def compute_part_amaxes(
    t: Tensor, parts: Tensor, scales: Tensor | None = None, role: int = 0, keep_nan: bool = False
) -> Any:
    """Computes the amaxes of parts of a tensor.

    Args:
        t: Contiguous, not empty.
        parts: float32 [PARTS]. The first `num_parts(t)` elements are written.
        scales: Scales of delayed scaling. If `scales[role]` is not 0, nothing is read or written.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        keep_nan: Whether a NaN makes the amax of its part NaN. Otherwise NaN is skipped.

    Returns:
        The compiled kernel.
    """
    return _read_in_parts[(num_parts(t),)](
        t,
        parts,  # in the place of `amax`, which only COUNT reads
        pointer(scales, parts),
        parts,
        t.numel(),
        REACH=0.0,
        ROLE=role,
        SCALED=scales is not None,
        COUNT=False,
        NAN=keep_nan,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )


@launch_on_device
def count(t: Tensor, amax: Tensor, scale: Tensor | None, counts: Tensor, reach: float) -> Any:
    """Counts the values of a tensor that do not fit. The host waits for nothing.

    Args:
        t: Contiguous, not empty.
        amax: float32 []. No value of `t` is larger. If it fits, `t` is not read.
        scale: The scale of `t`, float32 []. None counts no finite values.
        counts: float32. Finite values above `reach` after scaling are added to the first element,
            infinite values to the second.
        reach: `Format.reach`.

    Returns:
        The compiled kernel.
    """
    return _read_in_parts[(num_parts(t),)](
        t,
        amax,
        pointer(scale, amax),
        counts,
        t.numel(),
        REACH=reach,
        ROLE=0,
        SCALED=scale is not None,
        COUNT=True,
        NAN=False,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )


@launch_on_device
def cast(
    t: Tensor,
    scales: Tensor | None,
    history: Tensor | None,
    role: int,
    target: float,
    largest: float,
    power_2: bool,
    data: Tensor,
    transposed: Tensor | None,
    scale_inv: Tensor,
    amaxes: Tensor | None = None,
    counts: Tensor | None = None,
    reach: float = 0.0,
) -> Any:
    """Quantizes a matrix with one scale.

    Args:
        t: Contiguous [R, C].
        scales: Scales of delayed scaling, float32 [3]. None under current scaling.
        history: Amax record, float32 [length, 3]. The amax is folded into row 0. None records
            nothing.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        target: `Scaling.scaled_max`. The scale moves the amax to it.
        largest: The largest value of the format.
        power_2: Whether to round the scale down to a power of two.
        data: [R, C], written. In float32 it receives the scaled values.
        transposed: [C, R], written.
        scale_inv: Inverse scale, float32 [], written.
        amaxes: Amaxes of parts if they are known, at most PARTS. Without parts, [0], the scale
            is 1. They are not read if a delayed scale is set.
        counts: The numbers of clipped and of infinite values are added to it. See `count`.
        reach: `Format.reach`.

    Returns:
        The compiled kernel.
    """
    rows, columns = t.shape
    if amaxes is None:
        parts = torch.empty(PARTS, dtype=torch.float32, device=t.device)
        compute_part_amaxes(t, parts, scales, role)
        num_amaxes = num_parts(t)
    else:
        parts = amaxes
        num_amaxes = amaxes.numel()
    step_amaxes = parts
    if history is not None:
        step_amaxes = history[0]
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    return _cast[(tiles,)](
        t,
        pointer(scales, parts),
        step_amaxes.view(torch.int32),  # as in `record_pointer`
        parts,
        pointer(counts, parts),
        data,
        pointer(transposed, data),
        scale_inv,
        rows,
        columns,
        num_amaxes,
        target,
        LARGEST=largest,
        REACH=reach,
        ROLE=role,
        DELAYED=scales is not None,
        RECORD=history is not None,
        COUNT=counts is not None,
        POWER_2=power_2,
        TRANSPOSE=transposed is not None,
        PARTS=PARTS,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )
