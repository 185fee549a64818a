"""Overflow: under delayed scaling what the scale of the step before does not hold is clipped, and infinite values are counted under all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fp8cfg.numerics import (
    E2M1,
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
    seed_rounding,
    update_scales,
)
from fp8cfg.numerics.formats import round_in_steps
from fp8cfg.numerics.fp8_attention import FP8Attention
from fp8cfg.numerics.stored_state import stored_state_dict

DELAYED = Scaling(amax_history_len=4)


def net(scaling: Scaling = DELAYED) -> nn.Sequential:
    return nn.Sequential(
        *(
            FP8Linear.from_linear(nn.Linear(16, 16, bias=False), scaling, Region(True))
            for _ in range(2)
        )
    )


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
    assert (
        found is not None and found[:2] == (1, 0) and found.tensor == "1 grad_output"
    )  # what it gives on is small again
    assert (
        found.largest == pytest.approx(1e6 * E5M2.max / E5M2.reach, rel=1e-3)
        and lost.abs().max() < 2e-6 * want.abs().max()
    )
    step(model, x, 1e-3)
    assert overflow(model) == Overflow(1, 0, pytest.approx(1e6, rel=0.2), "0 grad_output")


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_values_within_half_a_step_of_the_largest_are_rounded_not_clipped(fmt: Format) -> None:
    below, above = round_in_steps(
        torch.tensor([1 - 1e-6, 1 + 1e-6]) * fmt.reach, fmt._replace(max=2 * fmt.max)
    )
    assert below == fmt.max < above


def test_infinite_values_are_counted_apart() -> None:
    model, x = net(), torch.ones(8, 16)
    step(model, x, 1.0)
    x[3, 3] = torch.inf
    step(model, x, 1.0)
    found = overflow(model)
    assert found is not None and (found.infinite, found.largest, found.tensor) == (
        1,
        torch.inf,
        "0 input",
    )


OF_ITSELF = {
    "current": Scaling("current"),
    "row": Scaling("current", granularity="row", power_2_scales=True),
    "mxfp8": Scaling("mxfp8", backward=E4M3),
    "block": Scaling("block", backward=E4M3, weights_2d=True),
    "nvfp4": Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True),
}


@pytest.mark.parametrize("kind", OF_ITSELF)
def test_infinite_values_are_counted_under_every_scaling(kind: str) -> None:
    """One step each: of an infinite input, gradient and weight, of finite tensors, and of NaN, which stays NaN."""
    model, x = net(OF_ITSELF[kind]), torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    seed_rounding(model, 1)
    spoilt = x.clone()
    spoilt[3, 3] = torch.inf
    step(model, spoilt, 1.0)
    found = overflow(model)
    assert (
        found is not None
        and found.infinite >= 1
        and (found.clipped, found.largest, found.tensor) == (0, torch.inf, "0 input")
    )
    if kind != "nvfp4":  # whose scale of the whole tensor is NaN beside NaN, and so is the loss
        spoilt[20, 3] = torch.nan
        step(model, spoilt, 1.0)
        found = overflow(model)
        assert found is not None and found.tensor == "0 input"
        spoilt[20, 3] = 0
    step(model, x, torch.inf)
    found = overflow(model)
    assert (
        found is not None
        and found.infinite >= 1
        and found.tensor in ("0 grad_output", "1 grad_output")
    )
    with torch.no_grad():
        model[1].weight[3, 3] = torch.inf
    step(model, x, 1.0)
    found = overflow(model)
    assert found is not None and found.tensor == (
        "0 grad_output" if kind == "mxfp8" else "1 weight"
    )  # whose products are infinite
    with torch.no_grad():
        model[1].weight[3, 3] = 0.1
    step(model, x, 1.0)
    assert overflow(model) == Overflow(0, 0, 0.0, "")
    spoilt[3, 3] = torch.nan
    assert step(model, spoilt, 1.0).isfinite().all() and overflow(model) == Overflow(0, 0, 0.0, "")
    assert model(spoilt)[3].isnan().all() and step(model, x, torch.nan).isnan().all()


def test_a_maximum_of_passes_is_counted_once_and_evaluations_are_not() -> None:
    model, x = net(Scaling("current")), torch.ones(8, 16)
    infinite = torch.full((8, 16), torch.inf)
    with torch.no_grad():
        model(infinite)
    step(model, x, 1.0)
    assert overflow(model) == Overflow(0, 0, 0.0, "")
    for microbatch in (x, infinite, infinite, x):
        model(microbatch).sum().backward()
    update_scales(fp8_linears(model))
    found = overflow(model)
    assert found is not None and (found.infinite, found.tensor) == (1, "0 input")


@pytest.mark.parametrize("kind", OF_ITSELF)
def test_an_infinite_weight_that_is_stored_is_counted_in_the_step_that_reads_it(kind: str) -> None:
    linear = nn.Linear(16, 16, bias=False)
    model = nn.Sequential(
        FP8Linear.from_linear(linear, OF_ITSELF[kind], Region(True), fp8_params=True)
    )
    seed_rounding(model, 1)
    state = stored_state_dict(model).keys()
    assert not any("amax" in name for name in state)
    master = torch.ones(16, 16)
    master[3, 3] = torch.inf
    model[0].set_weight(master)
    discard_amax(fp8_linears(model))  # a skipped step, after which the weight is the same
    step(model, torch.ones(32, 16), 1.0)
    found = overflow(model)
    assert found is not None and found.tensor == "0 weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"), [("current", "inductor"), ("block", "aot_eager"), ("nvfp4", "aot_eager")]
)
def test_infinite_values_are_counted_in_compiled_layers(kind: str, backend: str) -> None:
    model, x = net(OF_ITSELF[kind])[:1], torch.ones(32, 16)
    seed_rounding(model, 1)
    forward = torch.compile(model, fullgraph=True, backend=backend)
    for value, gradient, tensor in (
        (torch.inf, 1.0, "0 input"),
        (1.0, torch.inf, "0 grad_output"),
        (1.0, 1.0, ""),
    ):
        x[3, 3] = value
        forward(x.clone().requires_grad_()).backward(torch.full((32, 16), gradient))
        update_scales(fp8_linears(model))
        found = overflow(model)
        assert found is not None and (found.tensor, bool(found.infinite)) == (tensor, bool(tensor))


def test_infinite_values_of_attention_are_counted() -> None:
    layer = FP8Attention(Scaling("current"), Region(True))
    q, k, v = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).unbind()
    for tensor, value in (("", 1.0), (" qkv", torch.inf), (" do", torch.inf)):
        q[0, 0, 3, 3] = value if "qkv" in tensor else 1.0
        out = layer(q.requires_grad_(False).clone().requires_grad_(), k, v)
        out.backward(torch.full_like(out, value if "do" in tensor else 1.0))
        update_scales([layer])
        found = overflow(layer)
        assert found is not None and found.tensor == tensor and found.infinite == bool(tensor)


def test_a_skipped_step_has_none() -> None:
    for scaling in (DELAYED, Scaling("current")):
        model, x = net(scaling), torch.full((8, 16), torch.inf)
        step(model, x, 1.0)
        model(x).sum().backward()
        discard_amax(fp8_linears(model))
        assert overflow(model) is None
        step(model, torch.ones(8, 16), 1.0)
        assert overflow(model) == Overflow(0, 0, 0.0, "")
