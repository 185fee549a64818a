"""Overflow of delayed scaling: what was clipped is what the scale of the step before does not hold."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fp8cfg.numerics import (
    E4M3,
    E5M2,
    Format,
    FP8Linear,
    Overflow,
    Region,
    Scaling,
    discard_amax,
    fp8_linears,
    overflow,
    round_to_grid,
    update_scales,
)

DELAYED = Scaling(amax_history_len=4)


def net(scaling: Scaling = DELAYED) -> nn.Sequential:
    return nn.Sequential(*(FP8Linear.from_linear(nn.Linear(16, 16, bias=False), scaling, Region(True)) for _ in range(2)))


def step(model: nn.Module, x: Tensor, gradient: float) -> Tensor:
    """dx of a step whose gradients have that size; then scales move."""
    x = x.clone().requires_grad_()
    model(x).backward(torch.full((len(x), 16), gradient))
    update_scales(fp8_linears(model), step=1)
    assert x.grad is not None
    return x.grad


def test_a_jump_of_gradients_is_clipped_and_counted() -> None:
    """Three steps of gradients near 1e-9 and then 1e-3: the E5M2 scale of the first ones holds a millionth of it."""
    model, x = net(), torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    assert overflow(model) is None
    for _ in range(3):
        step(model, x, 1e-9)
        assert overflow(model) == Overflow(0, 0, 0.0, "")
    exact = copy.deepcopy(model)
    for layer in fp8_linears(exact):
        layer.high_precision = (False, True, True)
    lost, want = step(model, x, 1e-3), step(exact, x, 1e-3)
    found = overflow(model)
    assert found is not None and found[:2] == (1, 0) and found.tensor == "1 grad_output"  # what it gives on is small again
    assert found.largest == pytest.approx(1e6 * E5M2.max / E5M2.reach, rel=1e-3) and lost.abs().max() < 2e-6 * want.abs().max()
    step(model, x, 1e-3)
    assert overflow(model) == Overflow(1, 0, pytest.approx(1e6, rel=0.2), "0 grad_output")


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_values_within_half_a_step_of_the_largest_are_rounded_not_clipped(fmt: Format) -> None:
    below, above = round_to_grid(torch.tensor([1 - 1e-6, 1 + 1e-6]) * fmt.reach, fmt._replace(max=2 * fmt.max))
    assert below == fmt.max < above


def test_infinite_values_are_counted_apart() -> None:
    model, x = net(), torch.ones(8, 16)
    step(model, x, 1.0)
    x[3, 3] = torch.inf
    step(model, x, 1.0)
    found = overflow(model)
    assert found is not None and (found.infinite, found.largest, found.tensor) == (1, torch.inf, "0 input")


def test_a_skipped_step_and_current_scaling_have_none() -> None:
    model, x = net(), torch.ones(8, 16)
    step(model, x, 1.0)
    discard_amax(fp8_linears(model))
    assert overflow(model) is None
    current = net(Scaling("current"))
    step(current, x, 1.0)
    assert overflow(current) is None
