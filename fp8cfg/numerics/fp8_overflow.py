"""Overflow of FP8 tensors: values beyond what a delayed scale brings into FP8's range, and infinite ones of any scaling.

A delayed scale is that of past amaxes: a tensor that grows between two steps does not fit, and its largest values become the
format's largest. Under the other scalings finite values always fit. An infinite value becomes a finite one, without a sign in the
loss, but for MXFP8 and the Hadamard transform of NVFP4; NaN stays NaN. Amax and scale of the step tell, and both are there when
scales move: no tensor is read once more, nothing waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8cfg.numerics.attention import FP8Attention
from fp8cfg.numerics.quantization_statistics import TENSORS

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
    """Amaxes of a step as multiples of what fitted, float32 [tensors], on the device, and whose they are: to be looked at later. Of
    finite tensors whose scale was their own it is 0."""

    ratios: Tensor
    names: list[str]


def ranges_used(model: nn.Module) -> RangesUsed | None:
    """Those of the last step, of modules that have `range_used`: FP8 layers of ours since the last call of `update_scales`, and of
    Transformer Engine under delayed scaling. None where `model` has none. It waits for nothing."""
    every = ((name, m, vars(m).get("range_used")) for name, m in model.named_modules())
    layers = [(name, m, used) for name, m, used in every if used is not None]
    if not layers:
        return None
    names = [
        f"{name} {column}"
        for name, m, _ in layers
        for column in COLUMNS[isinstance(m, FP8Attention)]
    ]
    return RangesUsed(torch.cat([ratio for _, _, ratio in layers]), names)


def overflow_of(used: RangesUsed | None) -> Overflow | None:
    """What did not fit. Where the ratios are on an accelerator it waits for that, once."""
    if used is None:
        return None
    found, names = used.ratios.cpu(), used.names
    infinite = found.isinf()
    if not (beyond := infinite | (found > 1)).any():
        return Overflow(0, 0, 0.0, "")
    worst = int(found.argmax())
    return Overflow(
        int((beyond & ~infinite).sum()), int(infinite.sum()), found[worst].item(), names[worst]
    )


def overflow(model: nn.Module) -> Overflow | None:
    """What did not fit in the step that ended with the last call of `update_scales`; None where `model` has no FP8 layer of ours,
    or there was none yet. It waits as `overflow_of` does."""
    return overflow_of(ranges_used(model))
