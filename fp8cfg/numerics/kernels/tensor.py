"""Triton kernels of quantization: casts with their transposes, amaxes and scales in one read of a tensor.

    amaxes_of_parts   the amaxes of parts of a tensor; `cast` needs none where a delayed scale is set, and it returns at once
    count             the same kernel, of values that did not fit into FP8 where plain operations quantized them
    cast              scale, saturate and round to FP8, row-major and, if asked, transposed; folds the amax into a running maximum

Scales of blocks are made by blocks.py, those of rows by rows.py.

Delayed scaling reads a tensor once, current scaling and a scale that was never set twice. The scale is made in the kernel, so that
no launch stands between. The formulas are those of scaling.py and formats.py, division and reciprocal rounded to
nearest, products and sums never fused: bit for bit the same scaled float32 values, amaxes and scales; the conversion to FP8 is the
hardware's cvt.rn.satfinite.

Parts that the kernels share, and why they are written as they are: tensor.py.
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
    scale = tl.div_rn(target, amax)
    scale = tl.where(scale == float("inf"), highest, scale)
    scale = tl.where(amax > 0, tl.where(amax < float("inf"), scale, 1.0), 1.0)
    if POWER_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _record_infinite(seen, amax):
    """Infinity into `seen`, the bits of a float32 number, where that is the `amax`; other programs write nothing."""
    tl.atomic_max(seen, amax.to(tl.int32, bitcast=True), mask=amax == float("inf"), sem="relaxed")


@triton.jit
def _count(counts, beyond, infinite):
    """The elements of a tile that are finite and `beyond` what fits, and those that are `infinite`, added to `counts`. It is called
    where there are some."""
    n = tl.sum(tl.sum(infinite.to(tl.float32), 1), 0)
    tl.atomic_add(counts, tl.sum(tl.sum(beyond.to(tl.float32), 1), 0) - n, sem="relaxed")
    tl.atomic_add(counts + 1, n, sem="relaxed")


@triton.jit
def _count_infinite(counts, v, amax):
    """The infinite elements of the tile `v`, where the `amax` says that there may be some, added to `counts`."""
    if amax == float("inf"):
        tl.atomic_add(
            counts + 1,
            tl.sum(tl.sum((tl.abs(v) == float("inf")).to(tl.float32), 1), 0),
            sem="relaxed",
        )


@triton.jit  # type: ignore[untyped-decorator]
def _saturate(v, LARGEST: tl.constexpr):
    v = tl.where(v > LARGEST, LARGEST, v)
    return tl.where(v < -LARGEST, -LARGEST, v)


@triton.jit  # type: ignore[untyped-decorator]
def _store_columnwise(to, q, at, inside, at_t, inside_t, TRANSPOSE: tl.constexpr):
    if TRANSPOSE:
        tl.store(to + at_t, tl.trans(q), mask=inside_t)
    else:
        tl.store(to + at, q, mask=inside)


PARTS = 1024
"""Programs of `compute_part_amaxes`, and numbers that each program of `cast` reads where it makes a scale."""
BLOCK = 4096
ROWS, COLUMNS = 64, 64
"""The tile of `cast`."""
_P = ParamSpec("_P")


def launch_on_device(
    launch: Callable[Concatenate[Tensor, _P], Any],
) -> Callable[Concatenate[Tensor, _P], Any]:
    """`launch`, on the GPU of its first argument: Triton launches a kernel on the current one, whichever has the tensors."""

    @functools.wraps(launch)
    def on_its_device(t: Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        with torch.cuda.device_of(t):
            return launch(t, *args, **kwargs)

    return on_its_device


@triton.jit  # type: ignore[untyped-decorator]
def _read_in_parts(
    t,
    amax,
    scales,
    to,
    count,
    REACH: tl.constexpr,
    ROLE: tl.constexpr,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    NAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of the parts of `t` their amaxes into `to`, none where there is a scale that is set; or with COUNT what does not fit is added
    to `to`, and nothing is read where the `amax` fits."""
    factor = tl.load(scales + ROLE) if SCALED else 0.0
    if COUNT:
        most = tl.load(amax)
        if most < float("inf"):  # noqa: SIM102, Triton has no `and` of numbers that are loaded
            if most * factor <= REACH:
                return
    elif SCALED:  # noqa: SIM102, one is decided as this is compiled, the other as it runs
        if factor != 0:
            return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    largest, clipped, infinite = (
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK], tl.float32),
        tl.zeros([BLOCK], tl.float32),
    )
    while start < count:
        at = start + tl.arange(0, BLOCK)
        a = tl.abs(tl.load(t + at, mask=at < count, other=0.0).to(tl.float32))
        if COUNT:
            clipped += ((a < float("inf")) & (a * factor > REACH)).to(tl.float32)
            infinite += (a == float("inf")).to(tl.float32)
        else:
            larger = a > largest  # no NaN is
            if NAN:
                larger = larger | (a != a)
            largest = tl.where(larger, a, largest)
        start += tl.num_programs(0) * BLOCK
    if COUNT:
        if SCALED:
            tl.atomic_add(to, tl.sum(clipped, 0), sem="relaxed")
        tl.atomic_add(to + 1, tl.sum(infinite, 0), sem="relaxed")
    else:  # numbers that are not negative, and NaN above them, are in the order of their bits
        tl.store(
            to + tl.program_id(0),
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
    old = tl.load(scales + ROLE) if DELAYED else 0.0
    of = tl.arange(0, PARTS)
    amax = tl.max(tl.load(parts + of, mask=of < tl.where(old == 0, count, 0), other=0.0))
    scale = _compute_scale(amax, target, 3.4028234663852886e38, POWER_2)
    scale = tl.where(old == 0, scale, old)
    across = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    row = (program // across) * ROWS + tl.arange(0, ROWS)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    v = tl.load(t + at, mask=inside, other=0.0).to(tl.float32)
    if DELAYED and (RECORD or COUNT):
        a = tl.abs(v)
        amax = tl.max(tl.max(tl.where(a >= 0, a, 0.0), 1), 0)
        if COUNT:  # noqa: SIM102, one is decided as this is compiled, the other as it runs
            if amax * scale > REACH:
                _count(counts, a * scale > REACH, a == float("inf"))
    elif COUNT:
        _count_infinite(counts, v, amax)
    if RECORD:  # noqa: SIM102
        if (
            DELAYED or program == 0
        ):  # float32 numbers that are not negative are in the order of their bits
            tl.atomic_max(history + ROLE, amax.to(tl.int32, bitcast=True), sem="relaxed")
    q = _saturate(v * scale, LARGEST).to(data.dtype.element_ty)
    tl.store(data + at, q, mask=inside)
    if TRANSPOSE:
        across_inside = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(
            transposed + column[:, None].to(tl.int64) * rows + row[None, :],
            tl.trans(q),
            mask=across_inside,
        )
    if program == 0:
        tl.store(scale_inv, tl.div_rn(1.0, scale))


def num_parts(t: Tensor) -> int:
    """Into how many parts `compute_part_amaxes` divides `t`."""
    count: int = min(PARTS, triton.cdiv(t.numel(), BLOCK))
    return count


@launch_on_device
def compute_part_amaxes(
    t: Tensor, parts: Tensor, scales: Tensor | None = None, role: int = 0, keep_nan: bool = False
) -> Any:
    """The amaxes of parts of contiguous `t`, any shape but an empty one, NaN skipped or else kept, in the first elements of
    `parts`, float32; under delayed scaling none where `scales[role]` is not 0. Returns the compiled kernel.
    """
    of = parts if scales is None else scales
    return _read_in_parts[(num_parts(t),)](
        t,
        parts,
        of,
        parts,
        t.numel(),
        0.0,
        role,
        scales is not None,
        False,
        keep_nan,
        BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )


@launch_on_device
def count(t: Tensor, amax: Tensor, scale: Tensor | None, counts: Tensor, reach: float) -> Any:
    """Add to `counts`, float32, how many values of contiguous `t`, any shape but an empty one, are finite and beyond `reach`, times
    the `scale`, float32 [], and how many are infinite, where plain operations quantized it. No value of `t` is larger than `amax`,
    float32 []: where that fits `t` is not read, and the host waits for nothing. Without a `scale` no finite value is counted.
    Returns the compiled kernel."""
    factor = amax if scale is None else scale
    return _read_in_parts[(num_parts(t),)](
        t,
        amax,
        factor,
        counts,
        t.numel(),
        reach,
        0,
        scale is not None,
        True,
        False,
        BLOCK,
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
    """Quantize the contiguous matrix `t` into `data`, `transposed` and `scale_inv`. `scales` and `history` are those of delayed
    scaling, None under current scaling; `history` also where no amax is recorded. `target` is what the amax is brought to,
    `largest` the format's maximum. `amaxes`, PARTS at most, are those of parts, where they are known, and the scale of none is 1;
    none is read where a delayed scale is set. How many finite values are beyond `reach`, once scaled, and how many are infinite, is
    added to `counts`, if given. `data` in float32 receives the scaled values. Returns the compiled kernel.
    """
    (rows, columns), parts, count = t.shape, amaxes, 0 if amaxes is None else amaxes.numel()
    if parts is None:
        parts, count = torch.empty(PARTS, dtype=torch.float32, device=t.device), num_parts(t)
        compute_part_amaxes(t, parts, scales, role)
    of, seen = (
        parts if scales is None else scales,
        (parts if history is None else history[0]).view(torch.int32),
    )
    other = data if transposed is None else transposed
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    return _cast[(tiles,)](
        t,
        of,
        seen,
        parts,
        parts if counts is None else counts,
        data,
        other,
        scale_inv,
        rows,
        columns,
        count,
        target,
        largest,
        reach,
        role,
        scales is not None,
        history is not None,
        counts is not None,
        power_2,
        transposed is not None,
        PARTS,
        ROWS,
        COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )
