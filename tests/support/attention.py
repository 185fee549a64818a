"""Inputs of attention, its scalings, and its output with the gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8cfg.numerics import Scaling

DELAYED, CURRENT = Scaling(amax_history_len=4), Scaling("current")


def qkv(
    seed: int,
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    groups: int = 2,
    tokens: int = 48,
    width: int = 16,
) -> list[Tensor]:
    """q, k, v that want gradients, and the gradient of the output."""
    g = torch.Generator().manual_seed(seed)
    shapes = [
        (2, heads, tokens, width),
        (2, groups, tokens, width),
        (2, groups, tokens, width),
        (2, heads, tokens, width),
    ]
    q, k, v, dy = (
        torch.randn(*shape, generator=g) * size
        for shape, size in zip(shapes, (1, 2, 0.7, 1e-3), strict=True)
    )
    return [*(t.to(dtype).requires_grad_() for t in (q, k, v)), dy.to(dtype)]


def both_ways(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dy: Tensor
) -> list[Tensor]:
    """The output and the three gradients."""
    y = attention(q, k, v)
    return [y, *torch.autograd.grad(y, (q, k, v), dy)]
