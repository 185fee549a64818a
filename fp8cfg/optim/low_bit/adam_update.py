"""Adam update of quantized tensors, one piece at a time.

    moments   m' = beta1 m + (1 - beta1) g          v' = beta2 v + (1 - beta2) g g
    weight    w' = w (1 - lr decay) - lr / (1 - beta1^t) * m' / (sqrt(v') / sqrt(1 - beta2^t) + eps)

All values are float32. w' uses m' and v' before rounding. The update and its order of operations
follow MS-AMP. Adam instead of AdamW adds decay * w to g, also for the moments.

A per-tensor scale needs the amax of the new values. They are computed twice, in `find_amaxes` and
in `store_step`, so that only a piece of them is in float32 at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8cfg.numerics.amax import compute_amax_or_nan
from fp8cfg.numerics.codecs import EncodedTensor, write_encoded
from fp8cfg.numerics.formats import Start, derive_draw_key, square_root
from fp8cfg.optim.low_bit.columns import Columns

ROW = 4096
"""Elements per row in `find_row_amaxes`."""


class Slot(NamedTuple):
    """Stored tensors of one parameter, all flat.

    Attributes:
        source: The master, or the weight without one.
        weight: The weight, if there is a master.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        copy: The parameter, if it is neither of them. It gets the values of the weight.
        grad: Gradient.
    """

    source: EncodedTensor
    weight: EncodedTensor | None
    exp_avg: EncodedTensor
    exp_avg_sq: EncodedTensor
    copy: Tensor | None
    grad: EncodedTensor


class Scales(NamedTuple):
    """New inverse scales [] of the tensors in a slot. None if a tensor has no per-tensor scale."""

    source: Tensor | None = None
    weight: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None


Values = tuple[Tensor, Tensor, Tensor]
"""Weight and both moments after a step, float32."""


def step_factors(group: Mapping[str, Any], decoupled: bool, step: int, lr: float) -> list[float]:
    """Returns the nine factors of a step. `updated_values` reads a tenth, for the gradients.

    Args:
        group: Hyperparameters.
        decoupled: Whether weight decay is decoupled (AdamW).
        step: Number of the step, from 1.
        lr: Learning rate.
    """
    b1, b2 = group["betas"]
    decay = group["weight_decay"]
    # The factors are computed in double precision on the host and rounded to float32 once.
    if decoupled:
        decay = 1 - lr * decay
    return [
        decay,
        b1,
        1 - b1,
        b2,
        1 - b2,
        lr / (1 - b1**step),
        math.sqrt(1 - b2**step),
        group["eps"],
        float(step),
    ]


def derive_step_key(key: Tensor | None, factors: Tensor) -> Tensor | None:
    """Derives the random key of a step from the key of a tensor."""
    if key is None:
        return None
    step = factors[8].to(torch.int32)
    return derive_draw_key(key, step)


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raises ValueError for hyperparameters out of range."""
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise ValueError(f"{name}={group[name]} must not be negative")
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"betas={tuple(group['betas'])} must lie in [0, 1)")


def updated_values(columns: Columns, decoupled: bool, slot: Slot, factors: Tensor) -> Values:
    """Computes weight and moments after the step.

    Args:
        columns: Codecs of the slot.
        decoupled: Whether weight decay is decoupled (AdamW).
        slot: The stored tensors.
        factors: Factors of the step, float32 [10].
    """
    decay, b1, one_less_b1, b2, one_less_b2, lr, correction, eps, _, grad_factor = factors.unbind()
    # The order of operations decides the bits. Keep it equal to MS-AMP's.
    w = columns.source.decode(slot.source)
    g = columns.read.decode(slot.grad) * grad_factor
    if decoupled:
        w = w * decay
    else:
        g = g + decay * w
    m = b1 * columns.exp_avg.decode(slot.exp_avg) + one_less_b1 * g
    v = b2 * columns.exp_avg_sq.decode(slot.exp_avg_sq) + one_less_b2 * g * g
    return w - lr * (m / (square_root(v) / correction + eps)), m, v


def find_amaxes(columns: Columns, values: Values) -> Tensor:
    """Returns the amaxes of weight and moments, [3]. 0 for a column without a per-tensor scale."""
    amaxes = []
    for value, is_needed in zip(values, columns.needs_amax, strict=True):
        if is_needed:
            amaxes.append(compute_amax_or_nan(value))
        else:
            amaxes.append(value.new_zeros(()))
    return torch.stack(amaxes)


def scales_from_amaxes(columns: Columns, amaxes: Tensor) -> Scales:
    """Returns new scales from amaxes [3], or [3, tensors] for several tensors.

    Weight and master share the amax of the master before rounding.
    """
    scales: list[Tensor | None] = []
    for codec, i in zip(columns.written, (0, 0, 1, 2), strict=True):
        if codec is not None and codec.per_tensor:
            scales.append(codec.scale_inv(amaxes[i]))
        else:
            scales.append(None)
    return Scales(*scales)


def find_row_amaxes(columns: Columns, decoupled: bool, slot: Slot, factors: Tensor) -> list[Tensor]:
    """Returns the needed amaxes of `find_amaxes` for each row of ROW elements, each [rows].

    A tensor that ROW does not divide is a single row.
    """
    # Compiled code only reduces rows. The amaxes of rows are reduced in `_needed_amaxes`.
    values = updated_values(columns, decoupled, slot, factors)
    return [
        _row_amaxes(value)
        for value, is_needed in zip(values, columns.needs_amax, strict=True)
        if is_needed
    ]


def _row_amaxes(values: Tensor) -> Tensor:
    """Returns the amax of each row, [rows]."""
    if values.numel() % ROW == 0:
        return values.reshape(-1, ROW).abs().amax(1)
    return compute_amax_or_nan(values).view(1)


def scales_of_all(columns: Columns, decoupled: bool, amaxes: Tensor) -> Tensor:
    """Returns the new scales of several tensors, [tensors, 4, 4].

    The second dimension has the fields of Scales. The last one pads each scale to 16 bytes:
    Inductor copies inputs that are not aligned.

    Args:
        columns: Codecs of the slots.
        decoupled: Not used.
        amaxes: Needed amaxes, [tensors, amaxes].
    """
    needed = iter(amaxes.unbind(1))
    all_amaxes = []
    for is_needed in columns.needs_amax:
        all_amaxes.append(next(needed) if is_needed else amaxes.new_zeros(len(amaxes)))
    scales = scales_from_amaxes(columns, torch.stack(all_amaxes))
    # Nobody reads the columns without a scale. They have some values of the same shape.
    filled = [all_amaxes[0] if scale is None else scale for scale in scales]
    return F.pad(torch.stack(filled, 1)[:, :, None], (0, 3))


def store_step(
    columns: Columns,
    slot: Slot,
    values: Values,
    key: Tensor | None,
    new: Scales,
    skip: Tensor | None,
    start: Start = 0,
) -> None:
    """Writes the values of a step, but no per-tensor scales.

    Args:
        columns: Codecs of the slot.
        slot: The stored tensors.
        values: New weight and moments.
        key: Random key of the step.
        new: New per-tensor scales.
        skip: Whether to write nothing, bool [] on the device.
        start: Position of the first element in the full tensor, for random numbers.
    """
    w, m, v = values
    # The numbers 0 to 3 give each column its own random numbers.
    columns.source.write(w, slot.source, new.source, key, 0, start, skip)
    columns.exp_avg.write(m, slot.exp_avg, new.exp_avg, key, 1, start, skip)
    columns.exp_avg_sq.write(v, slot.exp_avg_sq, new.exp_avg_sq, key, 2, start, skip)
    weight, scale = slot.source, new.source
    if slot.weight is not None:
        # The weight is rounded from the rounded master, so that a restart gives the same weight.
        master = _with_scale(slot.source, new.source)
        if not columns.weight.block:
            master = _as_materialized(master)
        rounded = columns.source.decode(master)
        weight, scale = slot.weight, new.weight
        columns.weight.write(rounded, weight, scale, key, 3, start, skip)
    if slot.copy is not None:
        write_encoded(slot.copy, columns.weight.decode(_with_scale(weight, scale)), skip)


def store_scales(slot: Slot, new: Scales, skip: Tensor | None) -> None:
    """Writes per-tensor scales after all pieces, because decoding needs the old ones until then."""
    tensors = (slot.source, slot.weight, slot.exp_avg, slot.exp_avg_sq)
    for stored, scale in zip(tensors, new, strict=True):
        if stored is not None and scale is not None:
            write_encoded(stored[1], scale, skip)


def find_row_amaxes_of_several(
    columns: Columns, decoupled: bool, slots: Sequence[Slot], factors: Tensor
) -> list[list[Tensor]]:
    """Runs `find_row_amaxes` for each slot."""
    return [find_row_amaxes(columns, decoupled, slot, factors) for slot in slots]


def store_several(
    columns: Columns,
    decoupled: bool,
    slots: Sequence[Slot],
    factors: Tensor,
    keys: Sequence[Tensor | None],
    scales: Sequence[Scales],
    skip: Tensor | None,
    starts: Sequence[Start] | None = None,
) -> None:
    """Runs `store_step` for several full tensors or shards, as one function for the compiler.

    Args:
        columns: Codecs of the slots.
        decoupled: Whether weight decay is decoupled (AdamW).
        slots: The stored tensors.
        factors: Factors of the step, float32 [10].
        keys: Random key of each tensor.
        scales: New per-tensor scales.
        skip: Whether to write nothing, bool [].
        starts: Position of the first element of each tensor in the full tensor. None is 0.
    """
    if starts is None:
        starts = [0] * len(slots)
    for slot, key, new, start in zip(slots, keys, scales, starts, strict=True):
        values = updated_values(columns, decoupled, slot, factors)
        step_key = derive_step_key(key, factors)
        store_step(columns, slot, values, step_key, new, skip, start)


def _as_materialized(stored: EncodedTensor) -> EncodedTensor:
    """Returns `stored` as a strided view, so that Inductor treats it as a materialized tensor.

    Otherwise Inductor would inline its whole computation at each use, which compiles for minutes
    after two stochastic roundings. Not used for blocks: they read it twice, so it would stay in
    memory.
    """
    data = stored[0]
    return (data.as_strided(data.shape, data.stride()), *stored[1:])


def _with_scale(stored: EncodedTensor, scale_inv: Tensor | None) -> EncodedTensor:
    """Returns `stored` with a new per-tensor scale, if there is one."""
    if scale_inv is None:
        return stored
    return (stored[0], scale_inv)
