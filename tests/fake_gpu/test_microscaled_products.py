"""MXFP8 and NVFP4 on Blackwell: torch's C++ takes every product of a layer and of a training step, eager and compiled; on a real GPU
values are those of emulation.

Runs where torch has a CUDA device of compute capability 10.0 or more, also a fake one (tools/fake_gpu, FAKE_CC=100), which computes
nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0):
    pytest.skip("no CUDA device of compute capability 10.0, not even a fake one", allow_module_level=True)

import fp8cfg
from fp8cfg.numerics import E2M1, E4M3, FP8Linear, Region, Scaling, seed_rounding
from tools.fake_gpu.recorder import is_fake

SCALINGS = {
    "mxfp8": Scaling("mxfp8", backward=E4M3), "mxfp8 squares": Scaling("mxfp8", backward=E4M3, weights_2d=True),
    "nvfp4": Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fp8_params", "compiled"), [
    *((name, fp8_params, False) for name in SCALINGS for fp8_params in (False, True)), ("mxfp8", False, True), ("nvfp4", False, True)])
def test_every_product_of_a_layer(name: str, fp8_params: bool, compiled: bool) -> None:
    for tokens, width, out, dtype in ((300, 256, 128, torch.bfloat16), (37, 80, 48, torch.float32))[:1 if compiled else 2]:
        found = []
        for product in ("scaled_mm",) if is_fake() else ("scaled_mm", "emulate"):
            torch.manual_seed(0)
            linear = nn.Linear(width, out, device="cuda", dtype=dtype)
            layer = FP8Linear.from_linear(linear, SCALINGS[name], Region(active=True), product=product, fp8_params=fp8_params)  # type: ignore[arg-type]
            seed_rounding(layer, 1)
            if compiled:
                torch._dynamo.reset()
                layer.compile(fullgraph=True, dynamic=False)
            x = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
            y = layer(x)
            y.backward(torch.ones_like(y))
            assert y.shape == (tokens, out) and x.grad is not None and layer.parameter.grad is not None
            assert layer.parameter.grad.shape == (out, width)
            found.append((y.detach(), x.grad, layer.parameter.grad))
        if not is_fake():
            for got, want in zip(*found, strict=True):
                torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-5 * want.abs().max().item())


@pytest.mark.parametrize("words", ["precision=bf16_mxfp8", "precision=bf16_mxfp8 fp8.enable_2d_quantization=true", "precision=bf16_nvfp4"])
def test_a_training_step(words: str) -> None:
    recipe = fp8cfg.compose(["recipe=llama_tiny", "data=tiny", "backend=native", "trainer.accelerator=cuda", "trainer.devices=1", *words.split()])
    job = fp8cfg.build(recipe)
    assert (job.choice.backend, job.choice.product) == ("native", "scaled_mm")
    tokens = torch.zeros(2, recipe.model.seq_length, dtype=torch.int64, device="cuda")
    with job.autocast():
        loss = job.model(tokens, tokens)
    job.backward(loss)
    if not is_fake():  # whose records of products stay what their memory was
        job.optimizer.step()
