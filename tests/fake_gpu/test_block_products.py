"""Products with 1x128 weights of few outputs on Hopper: strides of their scales that torch 2.11 takes as well; on a real GPU values are
those of emulation.

Runs where torch has a CUDA device of compute capability 9.x, also a fake one (tools/fake_gpu), which computes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("no CUDA device of compute capability 9.x, not even a fake one", allow_module_level=True)

from fp8cfg.numerics import E4M3, FP8Linear, Region, Scaling
from tools.fake_gpu.recorder import is_fake


def passes(outputs: int, tokens: int, fp8_params: bool, compiled: bool, product: str) -> tuple[Tensor, Tensor, Tensor]:
    """The output and both gradients of a layer."""
    torch.manual_seed(0)
    linear = nn.Linear(256, outputs, device="cuda", dtype=torch.bfloat16)
    scaling = Scaling("block", backward=E4M3, power_2_scales=True)
    layer = FP8Linear.from_linear(linear, scaling, Region(active=True), product=product, fp8_params=fp8_params)  # type: ignore[arg-type]
    if compiled:
        torch._dynamo.reset()
        layer.compile(fullgraph=True, dynamic=False)
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None and layer.parameter.grad is not None
    return y.detach(), x.grad, layer.parameter.grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fp8_params", [False, True])
@pytest.mark.parametrize("tokens", [256, 100])
@pytest.mark.parametrize("outputs", [128, 64, 16])
def test_few_outputs(outputs: int, tokens: int, fp8_params: bool, compiled: bool) -> None:
    got = passes(outputs, tokens, fp8_params, compiled, "scaled_mm")
    assert [tuple(t.shape) for t in got] == [(tokens, outputs), (tokens, 256), (outputs, 256)]
    if not is_fake():
        for a, b in zip(got, passes(outputs, tokens, fp8_params, False, "emulate"), strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-5 * b.abs().max().item())
