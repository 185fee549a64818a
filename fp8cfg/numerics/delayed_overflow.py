"""Overflow of delayed scaling: tensors with values beyond the largest that their scale brings into FP8's range, which are clipped.

A delayed scale is that of past amaxes: a tensor that grows between two steps does not fit, and its largest values become the
format's largest, infinite ones too, without a sign in the loss. The step's amax and scale tell, and both are there when scales
move: no tensor is read once more, nothing waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8cfg.numerics.attention import FP8Attention
from fp8cfg.numerics.quantization_statistics import TENSORS
from fp8cfg.numerics.scale_update import FP8Layer

COLUMNS = {False: tuple(TENSORS.values()), True: ("qkv", "s", "o", "do", "dp", "dqkv")}
"""Names of a layer's tensors: of a linear one, and of attention."""


class Overflow(NamedTuple):
    """Overflow of the last step. `clipped` is how many tensors had finite values beyond their scale's range, `infinite` how many
    had infinite ones; `largest` is the greatest of their amaxes as a multiple of what fits, and `tensor` whose it is, such as
    layers.0.mlp.linear_fc1 grad_output; 0 and empty where all fit."""

    clipped: int
    infinite: int
    largest: float
    tensor: str


class RangesUsed(NamedTuple):
    """Amaxes of a step as multiples of what fitted, float32 [tensors], on the device, and whose they are: to be looked at later."""

    ratios: Tensor
    names: list[str]


def ranges_used(model: nn.Module) -> RangesUsed | None:
    """Those of the last step that moved scales; None where no layer of `model` has delayed scaling, or none has moved its scales
    yet. It waits for nothing."""
    layers = [(name, m, m.range_used) for name, m in model.named_modules() if isinstance(m, FP8Layer) and m.range_used is not None]
    if not layers:
        return None
    names = [f"{name} {column}" for name, m, _ in layers for column in COLUMNS[isinstance(m, FP8Attention)]]
    return RangesUsed(torch.cat([ratio for _, _, ratio in layers]), names)


def overflow_of(used: RangesUsed | None) -> Overflow | None:
    """What did not fit, of ratios that the host has."""
    if used is None:
        return None
    found, names = used
    infinite = found.isinf()
    if not (beyond := infinite | (found > 1)).any():
        return Overflow(0, 0, 0.0, "")
    worst = int(found.argmax())
    return Overflow(int((beyond & ~infinite).sum()), int(infinite.sum()), found[worst].item(), names[worst])


def overflow(model: nn.Module) -> Overflow | None:
    """What did not fit in the last step that moved scales; None where no layer of `model` has delayed scaling, or none has moved
    its scales yet. On an accelerator it waits for the device, once."""
    used = ranges_used(model)
    return overflow_of(used and used._replace(ratios=used.ratios.cpu()))
