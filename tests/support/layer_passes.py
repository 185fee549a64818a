"""Passes of one native layer on a GPU, also a fake one, under a product that torch multiplies or emulation. Eager passes have values on
the fake GPU too (tools/fake_gpu/values.py)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from fp8cfg.numerics import FP8Linear, Region, Scaling, seed_rounding
from tools.fake_gpu.recorder import is_fake
from tools.fake_gpu.values import computed

Passes = tuple[Tensor, Tensor, Tensor]


def check_passes(
    scaling: Scaling,
    tokens: int,
    width: int,
    outputs: int,
    dtype: torch.dtype,
    fp8_params: bool,
    compiled: bool,
) -> None:
    """Output and gradients have their shapes and the values of emulation; those of compiled code on a real GPU alone."""
    with computed() if is_fake() and not compiled else nullcontext():
        got = _passes(scaling, tokens, width, outputs, dtype, fp8_params, compiled, "scaled_mm")
        assert [tuple(t.shape) for t in got] == [
            (tokens, outputs),
            (tokens, width),
            (outputs, width),
        ]
        if not is_fake() or not compiled:
            want = _passes(scaling, tokens, width, outputs, dtype, fp8_params, False, "emulate")
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-5 * b.abs().max().item())


def _passes(
    scaling: Scaling,
    tokens: int,
    width: int,
    outputs: int,
    dtype: torch.dtype,
    fp8_params: bool,
    compiled: bool,
    product: Literal["scaled_mm", "emulate"],
) -> Passes:
    """The output and both gradients."""
    torch.manual_seed(0)
    linear = nn.Linear(width, outputs, device="cuda", dtype=dtype)
    layer = FP8Linear.from_linear(
        linear, scaling, Region(active=True), product=product, fp8_params=fp8_params
    )
    seed_rounding(layer, 1)
    if compiled:
        torch._dynamo.reset()
        layer.compile(fullgraph=True, dynamic=False)
    x = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    y = layer(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None and layer.parameter.grad is not None
    return y.detach(), x.grad, layer.parameter.grad
