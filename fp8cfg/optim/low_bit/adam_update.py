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


Moved = tuple[Tensor, Tensor, Tensor]
"""Weight and both moments after a step, float32."""


def hyper(group: Mapping[str, Any], decoupled: bool, step: int, lr: float) -> list[float]:
    """Returns the nine factors of a step. `moved` reads a tenth, the factor of the gradients.

    Args:
        group: Hyperparameters.
        decoupled: Whether weight decay is decoupled (AdamW).
        step: Number of the step, from 1.
        lr: Learning rate.
    """
    decay, (b1, b2) = group["weight_decay"], group["betas"]
    # The factors are computed in double precision on the host and rounded to float32 once.
    decay = 1 - lr * decay if decoupled else decay
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


def key_of_step(key: Tensor | None, hyper: Tensor) -> Tensor | None:
    """Derives the random key of a step from the key of a tensor."""
    return None if key is None else derive_draw_key(key, hyper[8].to(torch.int32))


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raises ValueError for hyperparameters out of range."""
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise ValueError(f"{name}={group[name]} must not be negative")
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"betas={tuple(group['betas'])} must lie in [0, 1)")


def moved(columns: Columns, decoupled: bool, slot: Slot, hyper: Tensor) -> Moved:
    """Computes weight and moments after the step.

    Args:
        columns: Codecs of the slot.
        decoupled: Whether weight decay is decoupled (AdamW).
        slot: The stored tensors.
        hyper: Factors of the step, float32 [10].
    """
    decay, b1, one_less_b1, b2, one_less_b2, lr, correction, eps, _, grad_factor = hyper.unbind()
    # The order of operations decides the bits. Keep it equal to MS-AMP's.
    w, g = columns.source.decode(slot.source), columns.read.decode(slot.grad) * grad_factor
    if decoupled:
        w = w * decay
    else:
        g = g + decay * w
    m = b1 * columns.exp_avg.decode(slot.exp_avg) + one_less_b1 * g
    v = b2 * columns.exp_avg_sq.decode(slot.exp_avg_sq) + one_less_b2 * g * g
    return w - lr * (m / (square_root(v) / correction + eps)), m, v


def find_amaxes(columns: Columns, values: Moved) -> Tensor:
    """Returns the amaxes of weight and moments, [3]. 0 for a column without a per-tensor scale."""
    return torch.stack(
        [
            compute_amax_or_nan(x) if wanted else x.new_zeros(())
            for x, wanted in zip(values, columns.amaxes, strict=True)
        ]
    )


def scales_from(columns: Columns, amaxes: Tensor) -> Scales:
    """Returns new scales from amaxes [3], or [3, tensors] for several tensors.

    Weight and master share the amax of the master before rounding.
    """
    return Scales(
        *[
            codec.scale_inv(amaxes[what]) if codec is not None and codec.per_tensor else None
            for codec, what in zip(columns.written, (0, 0, 1, 2), strict=True)
        ]
    )


def find_row_amaxes(columns: Columns, decoupled: bool, slot: Slot, hyper: Tensor) -> list[Tensor]:
    """Returns the needed amaxes of `find_amaxes` for each row of ROW elements, each [rows].

    A tensor that ROW does not divide is a single row.
    """
    # Compiled code only reduces rows. The amaxes of rows are reduced in `_wanted_amaxes`.
    values = zip(moved(columns, decoupled, slot, hyper), columns.amaxes, strict=True)
    return [_row_amaxes(x) for x, wanted in values if wanted]


def _row_amaxes(x: Tensor) -> Tensor:
    """Returns the amax of each row, [rows]."""
    return (
        x.reshape(-1, ROW).abs().amax(1) if x.numel() % ROW == 0 else compute_amax_or_nan(x).view(1)
    )


def scales_of_all(columns: Columns, decoupled: bool, amaxes: Tensor) -> Tensor:
    """Returns the new scales of several tensors, [tensors, 4, 4].

    The second dimension has the fields of Scales. The last one pads each scale to 16 bytes:
    Inductor copies inputs that are not aligned.

    Args:
        columns: Codecs of the slots.
        decoupled: Not used.
        amaxes: Needed amaxes, [tensors, amaxes].
    """
    found = iter(amaxes.unbind(1))
    each = [next(found) if wanted else amaxes.new_zeros(len(amaxes)) for wanted in columns.amaxes]
    scales = [
        each[0] if scale is None else scale for scale in scales_from(columns, torch.stack(each))
    ]
    return F.pad(torch.stack(scales, 1)[:, :, None], (0, 3))


def store_step(
    columns: Columns,
    slot: Slot,
    values: Moved,
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
    c, (w, m, v) = columns, values
    # The numbers 0 to 3 give each column its own random numbers.
    c.source.write(w, slot.source, new.source, key, 0, start, skip)
    c.exp_avg.write(m, slot.exp_avg, new.exp_avg, key, 1, start, skip)
    c.exp_avg_sq.write(v, slot.exp_avg_sq, new.exp_avg_sq, key, 2, start, skip)
    weight, scale = slot.source, new.source
    if slot.weight is not None:
        # The weight is rounded from the rounded master, so that a restart gives the same weight.
        source = _rescaled(slot.source, new.source)
        rounded = c.source.decode(source if c.weight.block else _as_written(source))
        weight, scale = slot.weight, new.weight
        c.weight.write(rounded, weight, scale, key, 3, start, skip)
    if slot.copy is not None:
        write_encoded(slot.copy, c.weight.decode(_rescaled(weight, scale)), skip)


def store_scales(slot: Slot, new: Scales, skip: Tensor | None) -> None:
    """Writes per-tensor scales after all pieces, because decoding needs the old ones until then."""
    columns = (slot.source, slot.weight, slot.exp_avg, slot.exp_avg_sq)
    for stored, scale in zip(columns, new, strict=True):
        if stored is not None and scale is not None:
            write_encoded(stored[1], scale, skip)


def store_whole(
    columns: Columns,
    decoupled: bool,
    slot: Slot,
    hyper: Tensor,
    key: Tensor | None,
    new: Scales,
    skip: Tensor | None,
    first: Start = 0,
) -> None:
    """Runs `store_step` for a whole tensor or shard, as one function for the compiler.

    Args:
        columns: Codecs of the slot.
        decoupled: Whether weight decay is decoupled (AdamW).
        slot: The stored tensors.
        hyper: Factors of the step, float32 [10].
        key: Random key of the tensor.
        new: New per-tensor scales.
        skip: Whether to write nothing, bool [].
        first: Position of the first element in the full tensor.
    """
    store_step(
        columns,
        slot,
        moved(columns, decoupled, slot, hyper),
        key_of_step(key, hyper),
        new,
        skip,
        first,
    )


def find_row_amaxes_of_several(
    columns: Columns, decoupled: bool, slots: Sequence[Slot], hyper: Tensor
) -> list[list[Tensor]]:
    """Runs `find_row_amaxes` for each slot."""
    return [find_row_amaxes(columns, decoupled, slot, hyper) for slot in slots]


def store_several(
    columns: Columns,
    decoupled: bool,
    slots: Sequence[Slot],
    hyper: Tensor,
    keys: Sequence[Tensor | None],
    new: Sequence[Scales],
    skip: Tensor | None,
    firsts: Sequence[Start] | None = None,
) -> None:
    """Runs `store_whole` for each slot."""
    for slot, key, scales, first in zip(slots, keys, new, firsts or [0] * len(slots), strict=True):
        store_whole(columns, decoupled, slot, hyper, key, scales, skip, first)


def _as_written(stored: EncodedTensor) -> EncodedTensor:
    """Returns `stored` as a strided view, so that Inductor treats it as a materialized tensor.

    Otherwise Inductor would inline its whole computation at each use, which compiles for minutes
    after two stochastic roundings. Not used for blocks: they read it twice, so it would stay in
    memory.
    """
    data = stored[0]
    return (data.as_strided(data.shape, data.stride()), *stored[1:])


def _rescaled(stored: EncodedTensor, scale_inv: Tensor | None) -> EncodedTensor:
    """Returns `stored` with a new per-tensor scale, if there is one."""
    return stored if scale_inv is None else (stored[0], scale_inv)
