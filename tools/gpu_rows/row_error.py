"""Error of a row of tools/bench_gpu.py, beside a float32 run, and how large one of each scaling may be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Found = dict[str, list[Tensor]]
"""Tensors by what they are."""
PIECE = 1 << 26
"""Elements that are compared at once: two models stand on the GPU beside them, and the largest gradient takes 2 GiB in float32."""


def error(found: Found, want: Found) -> float:
    """The largest relative rms error of any of the groups of tensors."""

    def of(name: str) -> float:
        pieces = (
            zip(*(t.reshape(-1).split(PIECE) for t in pair), strict=True)
            for pair in zip(found[name], want[name], strict=True)
        )
        pairs = ((a.float(), b.to(a.device)) for pair in pieces for a, b in pair)
        wrong, every = torch.stack(
            [torch.stack([(a - b).square().sum(), b.square().sum()]) for a, b in pairs]
        ).sum(0)
        return (wrong / every).sqrt().item()

    errors = [of(name) for name in want]
    return math.nan if any(map(math.isnan, errors)) else max(errors)  # max(0.0, nan) is 0.0


LIMITS = {"bf16": 0.05, "nvfp4": 0.7}
"""The largest error of a row that is right. Emulated on a CPU, a linear layer, a block and models of 1 to 16 layers have at most 0.009
in BF16, 0.10 in FP8, whose gradients in E5M2 have 0.06 in the linear layer alone, and 0.34 in NVFP4, each with 16 layers. An output that
is not computed has 1, one of another tensor 1.4, one of the other sign 2."""
LIMIT_FP8 = 0.3


def right(wrong: float, scaling: str) -> float:
    """The error `wrong` of a row under `scaling`. Raises ArithmeticError where that is more than its limit, or no number."""
    limit = LIMITS.get(scaling, LIMIT_FP8)
    if not wrong <= limit:
        raise ArithmeticError(
            f"error {wrong:.1e}, beside a float32 run, is above {limit:g}, the limit of {scaling}: its speed means nothing"
        )
    return wrong
