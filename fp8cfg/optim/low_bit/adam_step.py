"""The arithmetic of one step of Adam on a piece of stored tensors.

    moments   m' = beta1 m + (1 - beta1) g          v' = beta2 v + (1 - beta2) g g
    weight    w' = w (1 - lr decay) - lr / (1 - beta1^t) * m' / (sqrt(v') / sqrt(1 - beta2^t) + eps)

All of it is float32, and w' is made from m' and v' as they are before rounding. This is MS-AMP's update, in its order of
operations. Adam instead of AdamW adds decay x w to g, for the stored moments too.

A scale for a whole tensor needs the amax of what is about to be stored. `step_at_once` keeps the values of a tensor till then;
of large ones `find_amaxes` and `store_step` compute them twice, the one to find amaxes, the other to store.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp8cfg.numerics.codecs import FP32, Codec, Rounding, Stored, codec
from fp8cfg.numerics.exact_float32 import largest, square_root


class Columns(NamedTuple):
    """The codecs of one parameter, a column of the low-precision chart each. `grad` is that of gradients stored apart from
    `.grad`; None leaves them where autograd puts them."""

    weight: Codec = Codec(FP32)
    master: Codec | None = None
    grad: Codec | None = None
    exp_avg: Codec = Codec(FP32)
    exp_avg_sq: Codec = Codec(FP32)

    @property
    def source(self) -> Codec:
        """The codec of what a step moves: the master, or the weight where there is none."""
        return self.master or self.weight

    @property
    def read(self) -> Codec:
        """The codec that gradients are read with."""
        return self.grad or Codec(FP32)

    @property
    def written(self) -> tuple[Codec | None, ...]:
        """The codecs that a step writes, in the order of `Slot`; None for the weight where it is the source."""
        return (self.source, None if self.master is None else self.weight, self.exp_avg, self.exp_avg_sq)

    @property
    def per_tensor(self) -> bool:
        """Whether a scale waits for the amax of a whole tensor."""
        return any(codec is not None and codec.per_tensor for codec in self.written)

    @property
    def block(self) -> int:
        """Elements of which a piece needs a multiple, unless it is the last."""
        return max(codec.block or 1 for codec in (*self.written, self.read) if codec is not None)


def named_columns(
    weight: str = "fp32", master_weight: str = "none", weight_grad: str = "fp32", exp_avg: str = "fp32", exp_avg_sq: str = "fp32",
    rounding: Rounding = "nearest",
) -> Columns:  # fmt: skip
    """The columns by the names that the storage keys take. `rounding` is that of weights and masters. Gradients without a scale
    stay where autograd puts them. Raises ValueError for an unknown name."""

    def updated(name: str) -> Codec:
        return codec(name, "nearest" if name == "fp32" else rounding)

    grad = codec(weight_grad)
    return Columns(
        updated(weight), None if master_weight == "none" else updated(master_weight), None if grad.scaling == "none" else grad,
        codec(exp_avg), codec(exp_avg_sq, second_moment=True))  # fmt: skip


class Slot(NamedTuple):
    """The stored tensors of one parameter, all flat. `source` is the master, or the weight where there is none; `weight` is the
    weight where there is a master; `copy`, the parameter where it is neither of them, receives the values of the weight.

    Or those of several of equal length, as rows: data [parameters, elements], scales [parameters, 1], keys [parameters, 2]."""

    source: Stored
    weight: Stored | None
    exp_avg: Stored
    exp_avg_sq: Stored
    copy: Tensor | None
    grad: Stored


Values = tuple[Tensor, Tensor, Tensor]
"""Weight and moments, float32."""


class Scales(NamedTuple):
    """New inverse scales, [], of the columns of a slot that have one for the whole tensor."""

    source: Tensor | None = None
    weight: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None


def hyper(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool, step: int, device: torch.device,
    grad_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """What step number `step`, from 1 on, multiplies by: float32 [9], each computed in double precision first."""
    b1, b2 = betas
    decay = 1 - lr * weight_decay if decoupled else weight_decay
    values = (decay, b1, 1 - b1, b2, 1 - b2, lr / (1 - b1**step), math.sqrt(1 - b2**step), eps, grad_factor)
    return torch.tensor(values, dtype=torch.float32, device=device)


def moved(columns: Columns, decoupled: bool, slot: Slot, hyper: Tensor) -> Values:
    """Weight and moments after the step."""
    decay, b1, one_less_b1, b2, one_less_b2, lr, correction, eps, grad_factor = hyper.unbind()
    w, g = columns.source.decode(slot.source), columns.read.decode(slot.grad) * grad_factor
    if decoupled:
        w = w * decay
    else:
        g = g + decay * w
    m = b1 * columns.exp_avg.decode(slot.exp_avg) + one_less_b1 * g
    v = b2 * columns.exp_avg_sq.decode(slot.exp_avg_sq) + one_less_b2 * g * g
    return w - lr * (m / (square_root(v) / correction + eps)), m, v


def find_amaxes(columns: Columns, decoupled: bool, slot: Slot, hyper: Tensor) -> Tensor:
    """The amaxes of weight and moments that a scale waits for, [3]; 0 for what none waits for."""
    source, weight, *moments = (codec is not None and codec.per_tensor for codec in columns.written)
    values = zip(moved(columns, decoupled, slot, hyper), (source or weight, *moments), strict=True)
    return torch.stack([largest(x) if waits else hyper.new_zeros(()) for x, waits in values])


def scales_from(columns: Columns, amaxes: Tensor) -> list[Scales]:
    """The new scales from amaxes [parameters, 3]. A weight and its master share the amax, which is that of the master's value
    before rounding."""
    of_column = [
        codec.scale_inv(amaxes[:, what]).unbind() if codec is not None and codec.per_tensor else [None] * len(amaxes)
        for codec, what in zip(columns.written, (0, 0, 1, 2), strict=True)
    ]
    return [Scales(*scales) for scales in zip(*of_column, strict=True)]


def step_at_once(columns: Columns, decoupled: bool, slot: Slot, hyper: Tensor, key: Tensor | None) -> None:
    """Write what the step gives to a whole tensor, or to rows."""
    w, m, v = moved(columns, decoupled, slot, hyper)
    rows = slot.source[0].dim() == 2 and columns.block == 1

    def scale_of(codec: Codec | None, x: Tensor) -> Tensor | None:
        if codec is None or not codec.per_tensor:
            return None
        return _kept(codec.scale_inv(x.abs().amax(-1, keepdim=True) if rows else largest(x)))

    scales = [scale_of(codec, x) for codec, x in zip(columns.written, (w, w, m, v), strict=True)]
    _store(columns, slot, (w, m, v), key, Scales(*scales))


def _kept(x: Tensor) -> Tensor:
    """`x`, which a compiler then has in memory; it would compute it again for every element that is divided by it."""
    return x.as_strided(x.shape, x.stride())


def store_step(
    columns: Columns, decoupled: bool, slot: Slot, hyper: Tensor, key: Tensor | None, new: Scales,
    start: int = 0, last: bool = True,
) -> None:  # fmt: skip
    """Write what the step gives; `start` is the first element of this piece in its tensor. The scales of whole tensors are
    written with the last piece, for the old ones are needed till then."""
    _store(columns, slot, moved(columns, decoupled, slot, hyper), key, new, start, last)


def _store(c: Columns, slot: Slot, values: Values, key: Tensor | None, new: Scales, start: int = 0, last: bool = True) -> None:
    w, m, v = values
    c.source.write(w, slot.source, new.source, key, 0, start)
    c.exp_avg.write(m, slot.exp_avg, new.exp_avg, key, 1, start)
    c.exp_avg_sq.write(v, slot.exp_avg_sq, new.exp_avg_sq, key, 2, start)
    weight, scale = slot.source, new.source
    if slot.weight is not None:
        rounded = c.source.decode(_rescaled(slot.source, new.source))
        weight, scale = slot.weight, new.weight
        c.weight.write(rounded, weight, scale, key, 3, start)
    if slot.copy is not None:
        slot.copy.copy_(c.weight.decode(_rescaled(weight, scale)))
    if last:
        for stored, scale in zip((slot.source, slot.weight, slot.exp_avg, slot.exp_avg_sq), new, strict=True):
            if stored is not None and scale is not None:
                stored[1].copy_(scale)


def _rescaled(stored: Stored, scale_inv: Tensor | None) -> Stored:
    return stored if scale_inv is None else (stored[0], scale_inv)
