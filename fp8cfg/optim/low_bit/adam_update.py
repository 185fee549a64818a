"""Adam step on stored (quantized) tensors: the arithmetic, a piece at a time.

    moments   m' = beta1 m + (1 - beta1) g          v' = beta2 v + (1 - beta2) g g
    weight    w' = w (1 - lr decay) - lr / (1 - beta1^t) * m' / (sqrt(v') / sqrt(1 - beta2^t) + eps)

All of it is float32, and w' is made from m' and v' as they are before rounding. This is MS-AMP's update, in its order of
operations. Adam instead of AdamW adds decay x w to g, for the stored moments too.

A scale for a whole tensor needs the amax of what is about to be stored. The values are computed twice, for `find_amaxes` and for
`store_step`, so that no more than a piece of them is kept in float32.
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
"""Elements of a row of `find_row_amaxes`."""


class Slot(NamedTuple):
    """The stored tensors of one parameter, all flat. `source` is the master, or the weight where there is none; `weight` is the
    weight where there is a master; `copy`, the parameter where it is neither of them, receives the values of the weight.
    """

    source: EncodedTensor
    weight: EncodedTensor | None
    exp_avg: EncodedTensor
    exp_avg_sq: EncodedTensor
    copy: Tensor | None
    grad: EncodedTensor


class Scales(NamedTuple):
    """New inverse scales, [], of the columns of a slot whose scale is for the whole tensor."""

    source: Tensor | None = None
    weight: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None


Moved = tuple[Tensor, Tensor, Tensor]
"""Weight and moments after a step, in float32."""


def hyper(group: Mapping[str, Any], decoupled: bool, step: int, lr: float) -> list[float]:
    """The factors of step number `step`, from 1 on, of a parameter group, and `step`: nine numbers in double precision. What a step
    reads has a tenth: what gradients are multiplied by."""
    decay, (b1, b2) = group["weight_decay"], group["betas"]
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
    """The key of this step of a tensor whose own is `key`."""
    return None if key is None else derive_draw_key(key, hyper[8].to(torch.int32))


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raise ValueError for hyperparameters outside their range."""
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise ValueError(f"{name}={group[name]} must not be negative")
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"betas={tuple(group['betas'])} must lie in [0, 1)")


def moved(columns: Columns, decoupled: bool, slot: Slot, hyper: Tensor) -> Moved:
    """Weight and moments after the step."""
    decay, b1, one_less_b1, b2, one_less_b2, lr, correction, eps, _, grad_factor = hyper.unbind()
    w, g = columns.source.decode(slot.source), columns.read.decode(slot.grad) * grad_factor
    if decoupled:
        w = w * decay
    else:
        g = g + decay * w
    m = b1 * columns.exp_avg.decode(slot.exp_avg) + one_less_b1 * g
    v = b2 * columns.exp_avg_sq.decode(slot.exp_avg_sq) + one_less_b2 * g * g
    return w - lr * (m / (square_root(v) / correction + eps)), m, v


def find_amaxes(columns: Columns, values: Moved) -> Tensor:
    """The amaxes of weight and moments for scales of whole tensors, [3]; 0 for a column without such a scale."""
    return torch.stack(
        [
            compute_amax_or_nan(x) if wanted else x.new_zeros(())
            for x, wanted in zip(values, columns.amaxes, strict=True)
        ]
    )


def scales_from(columns: Columns, amaxes: Tensor) -> Scales:
    """The new scales of a tensor from its amaxes, [3], or of several, [3, tensors]. A weight and its master share the amax, which
    is that of the master's value before rounding."""
    return Scales(
        *[
            codec.scale_inv(amaxes[what]) if codec is not None and codec.per_tensor else None
            for codec, what in zip(columns.written, (0, 0, 1, 2), strict=True)
        ]
    )


def find_row_amaxes(columns: Columns, decoupled: bool, slot: Slot, hyper: Tensor) -> list[Tensor]:
    """What `find_amaxes` gives, of each row of ROW elements where these divide the tensor; [rows] for each amax that is wanted."""
    values = zip(moved(columns, decoupled, slot, hyper), columns.amaxes, strict=True)
    return [_row_amaxes(x) for x, wanted in values if wanted]


def _row_amaxes(x: Tensor) -> Tensor:
    return (
        x.reshape(-1, ROW).abs().amax(1) if x.numel() % ROW == 0 else compute_amax_or_nan(x).view(1)
    )


def scales_of_all(columns: Columns, decoupled: bool, amaxes: Tensor) -> Tensor:
    """The new scales of any number of tensors from the amaxes that are wanted, [tensors, amaxes]: [tensors, 4, 4], the fields of
    Scales, each at the beginning of 16 bytes, for compiled code copies what lies elsewhere."""
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
    """Write the result of the step, unless `skip`, a bool [], is true; `start` is the first element of this piece in its tensor.
    `store_scales` writes the scales of whole tensors.
    """
    c, (w, m, v) = columns, values
    c.source.write(w, slot.source, new.source, key, 0, start, skip)
    c.exp_avg.write(m, slot.exp_avg, new.exp_avg, key, 1, start, skip)
    c.exp_avg_sq.write(v, slot.exp_avg_sq, new.exp_avg_sq, key, 2, start, skip)
    weight, scale = slot.source, new.source
    if slot.weight is not None:
        source = _rescaled(slot.source, new.source)
        rounded = c.source.decode(source if c.weight.block else _as_written(source))
        weight, scale = slot.weight, new.weight
        c.weight.write(rounded, weight, scale, key, 3, start, skip)
    if slot.copy is not None:
        write_encoded(slot.copy, c.weight.decode(_rescaled(weight, scale)), skip)


def store_scales(slot: Slot, new: Scales, skip: Tensor | None) -> None:
    """Writes the scales of whole tensors, after all pieces: the old ones are needed until then."""
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
    """`store_step` of a tensor in one piece, whose own key is `key`, but for the scales of the whole tensor; of a shard that begins
    with element `first` of the whole."""
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
    """`find_row_amaxes` of each slot."""
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
    """`store_whole` of each slot."""
    for slot, key, scales, first in zip(slots, keys, new, firsts or [0] * len(slots), strict=True):
        store_whole(columns, decoupled, slot, hyper, key, scales, skip, first)


def _as_written(stored: EncodedTensor) -> EncodedTensor:
    """`stored` by its strides: a tensor to Inductor, which else would trace all that it was computed from anew for each use, for
    minutes after two stochastic roundings. Blocks read it twice, for their scales too: it would be kept in memory.
    """
    data = stored[0]
    return (data.as_strided(data.shape, data.stride()), *stored[1:])


def _rescaled(stored: EncodedTensor, scale_inv: Tensor | None) -> EncodedTensor:
    return stored if scale_inv is None else (stored[0], scale_inv)
