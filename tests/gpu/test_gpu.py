"""On a GPU: the same recipe, the same arithmetic through the hardware's products, and no more memory than planned."""

from __future__ import annotations

import pytest
import torch
from small import small, steps
from torch import nn

import fp8cfg
from fp8cfg.backends import native
from fp8cfg.numerics import FP8Linear, Region, Scaling, decode, fp8_linears
from fp8cfg.training.step import prove_engagement

pytestmark = pytest.mark.gpu
FP8 = ("precision=bf16_fp8", "precision=bf16_fp8_current")


def has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.parametrize("kind", ["delayed", "current"])
@pytest.mark.parametrize("tokens", [256, 100])
def test_the_hardwares_product_agrees_with_the_emulated_one(kind: str, tokens: int) -> None:
    if not has_fp8():
        pytest.skip("needs compute capability 8.9")
    torch.manual_seed(0)
    plain = nn.Linear(256, 384, bias=False, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) for n in (256, 384))
    found = []
    for product in ("emulate", "scaled_mm"):
        layer = FP8Linear.from_linear(plain, Scaling(kind=kind), Region(active=True), product=product)
        layer.weight = nn.Parameter(plain.weight.detach().clone())
        given = x.clone().requires_grad_()
        layer(given).backward(dy)
        found.append((layer(given).detach(), given.grad, layer.weight.grad))
        assert {decode(c).how for c in layer.gemms_ran.tolist()} == {"emulated" if product == "emulate" else "scaled_mm"}
    for a, b in zip(*found, strict=True):
        assert ((a.float() - b.float()).norm() / b.float().norm()).item() < 5e-3


@pytest.mark.parametrize("precision", ["precision=bf16", *FP8])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_runs_as_planned_and_follows_the_cpu(precision: str, compiled: bool) -> None:
    words = (precision, "model.num_layers=4")
    job = fp8cfg.build(small(*words, "trainer.accelerator=cuda"))
    if compiled:
        job.compile_model()
    got = [s.loss for s in steps(job, 6)]
    prove_engagement(job)
    want = [s.loss for s in steps(fp8cfg.build(small(*words, "trainer.accelerator=cpu")), 6)]
    assert got == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("precision", FP8)
def test_fp8_params_save_their_bytes(precision: str) -> None:
    words = (precision, "model.num_layers=4", "trainer.accelerator=cuda")
    held, kept = (fp8cfg.build(small(*words, f"fp8.params={p}")) for p in ("true", "false"))
    saved = native.weight_bytes(kept.model) - native.weight_bytes(held.model)
    assert saved == sum(layer.weight.numel() for layer in fp8_linears(held.model))
