"""Values of fp8cfg's Triton kernels: what each launch writes, by the plain torch code that tests hold the kernels to.

Functions have the arguments of the kernels' launchers, CPU tensors; triton_launches.py calls them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8cfg.numerics import E2M1, E4M3, Format, Scaling
from fp8cfg.numerics.amax import compute_amax, compute_amax_or_nan, record_amax
from fp8cfg.numerics.formats import FORMAT_BY_DTYPE, RandomStream, cast
from fp8cfg.numerics.gemm import Operand, hardware_layout
from fp8cfg.numerics.quantize import quantize_tiles
from fp8cfg.numerics.scaling import (
    FLT_MAX,
    encode_e8m0,
    floor_to_power_of_2,
    global_scale_from_amax,
)

PARTS, BLOCK = 1024, 4096
"""Programs of `compute_part_amaxes` at most, and elements that each reads at a time (numerics/kernels/tensor.py)."""


def compute_part_amaxes(
    t: Tensor, parts: Tensor, scales: Tensor | None = None, role: int = 0, keep_nan: bool = False
) -> None:
    if scales is not None and scales[role] != 0:
        return
    a, count = t.flatten().float().abs(), min(PARTS, -(-t.numel() // BLOCK))
    a = a if keep_nan else a.nan_to_num(0.0, torch.inf)
    rounds = torch.zeros(-(-t.numel() // (BLOCK * count)) * count * BLOCK)
    rounds[: len(a)] = a
    parts[:count] = rounds.view(-1, count, BLOCK).amax((0, 2))


def cast_tensor(
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
) -> None:
    now, set_ = compute_amax(t), scales is not None and bool(scales[role] != 0)
    known = now if amaxes is None else torch.cat([amaxes, torch.zeros(1)]).amax()  # of none it is 0
    scale = scales[role].clone() if scales is not None and set_ else _scale(known, target, power_2)
    if counts is not None:
        infinite = t.isinf()
        counts[1] += infinite.sum()
        if scales is not None:
            counts[0] += ((t.float().abs() * scale > reach) & ~infinite).sum()
    if history is not None:
        record_amax(history[0, role], now if scales is not None else known)
    data.copy_(cast(t.float() * scale, FORMAT_BY_DTYPE[data.dtype]))
    if transposed is not None:
        transposed.copy_(data.t())
    scale_inv.copy_(scale.reciprocal())


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
) -> None:
    v = t.float()
    for axis, q, to, known in ((1, data, scale_inv, amaxes), (0, data_t, scale_inv_t, amaxes_t)):
        if q is not None and to is not None:
            amax = v.abs().nan_to_num(0.0, torch.inf).amax(axis) if known is None else known
            scale = _scale(amax, largest, power_2)
            made = cast(v * scale.unsqueeze(axis), FORMAT_BY_DTYPE[q.dtype])
            q.copy_(made.t() if axis == 0 and transpose else made)
            to.copy_(scale.reciprocal().view(to.shape))
    _infinite(t, record, counts)


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
) -> None:
    width, scaling = (
        mx or 128,
        Scaling("mxfp8", backward=E4M3) if mx else Scaling("block", power_2_scales=power_2),
    )
    for q, to, across in ((data, scale_inv, False), (data_t, scale_inv_t, True)):
        if q is not None and to is not None:
            _store(
                _tiles(t, width, square, across, FORMAT_BY_DTYPE[q.dtype], scaling),
                q,
                to,
                across,
                transpose,
            )
    _infinite(t, record, counts)


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
) -> None:
    now = compute_amax_or_nan(t) if amax is None else amax.view(())
    whole, scaling = global_scale_from_amax(now), Scaling("nvfp4", forward=E2M1, backward=E2M1)
    global_scale_inv.copy_(whole.reciprocal())
    draw = RandomStream(*random, lane) if random else None
    square = transpose == (data_t is not None)
    for q, to, across in ((data, scale_inv, False), (data_t, scale_inv_t, True)):
        if q is not None and to is not None:
            made = _tiles(t, 16, square, across, E2M1, scaling, whole, draw)
            if transpose:
                codes, scales = hardware_layout(made.t() if across else made)
                q.copy_(codes)
                to.copy_(scales)
            else:
                _store(made, q, to, across, transpose)
    if record is not None:
        record_amax(record, now)
    _infinite(t, None, None if now.isnan() else counts)


def count(t: Tensor, amax: Tensor, scale: Tensor | None, counts: Tensor, reach: float) -> None:
    if amax < torch.inf and (scale is None or amax * scale <= reach):
        return
    a, infinite = t.float().abs(), t.isinf()
    counts[1] += infinite.sum()
    if scale is not None:
        counts[0] += ((a * scale > reach) & ~infinite).sum()


def _tiles(
    t: Tensor,
    width: int,
    square: bool,
    across: bool,
    fmt: Format,
    scaling: Scaling,
    whole: Tensor | None = None,
    draw: RandomStream | None = None,
) -> Operand:
    tile = (width, width) if square else (width, 1) if across else (1, width)
    made = quantize_tiles(t, tile, fmt, scaling, fmt.dtype, whole, draw)
    return made._replace(data=made.data.contiguous())


def _store(made: Operand, data: Tensor, scale_inv: Tensor, across: bool, transpose: bool) -> None:
    """The operand `made` where products or `FP8Weight` read it, its transpose where it is contracted `across` its rows."""
    made = made.t() if across and transpose else made
    data.copy_(made.data)
    assert made.scale_inv is not None
    if scale_inv.dim() == 1:
        scale_inv.copy_(hardware_layout(made)[1])
    elif scale_inv.dtype == torch.uint8 and made.fmt != E2M1:
        scale_inv.copy_(encode_e8m0(made.scale_inv))
    else:
        scale_inv.copy_(made.scale_inv.to(scale_inv.dtype))


def _scale(amax: Tensor, target: float, power_2: bool) -> Tensor:
    scale = torch.div(torch.full_like(amax, target), amax)
    scale = torch.where(scale == torch.inf, FLT_MAX, scale)
    scale = torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)
    return floor_to_power_of_2(scale) if power_2 else scale


def _infinite(t: Tensor, record: Tensor | None, counts: Tensor | None) -> None:
    infinite = t.isinf().sum()
    if record is not None and infinite:
        record.fill_(torch.inf)
    if counts is not None:
        counts[1] += infinite
