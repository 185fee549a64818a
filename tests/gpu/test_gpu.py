"""On a GPU: the same recipe, the same arithmetic through the hardware's products, and no more memory than planned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.backends.choice import BLOCK_CUDA
from fp8cfg.numerics import E4M3, FP8Linear, Region, Scaling, decode_gemm_record, fp8_linears
from fp8cfg.numerics.statistics import Statistics, collect_statistics
from fp8cfg.training.data import run_data
from tests.support.small import small, steps, weight_bytes

pytestmark = pytest.mark.gpu
EVERYWHERE = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
FP8 = {
    "delayed": ("precision=bf16_fp8",),
    "current": ("precision=bf16_fp8_current", EVERYWHERE),
    "row": ("precision=bf16_fp8_current", EVERYWHERE, "fp8.granularity=row"),
    "block": ("precision=bf16_fp8_block", "fp8.format=e4m3", "fp8.params=true"),
}
SCALINGS = {
    "delayed": Scaling(),
    "current": Scaling("current"),
    "row": Scaling("current", granularity="row"),
    "block": Scaling("block", backward=E4M3, power_2_scales=True, weights_2d=True),
    "block float32": Scaling("block", backward=E4M3, weights_2d=True),
    "block 1x128": Scaling("block", backward=E4M3, power_2_scales=True),
}
SHAPE = (
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=256",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
)
"""Every linear layer is a multiple of 128 wide, which block scaling divides."""


def needs(name: str) -> None:
    """Skips where the GPU cannot multiply under the scaling of that name."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip("needs compute capability 8.9")
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if name.startswith("block") and (capability[0] != 9 or cuda < BLOCK_CUDA):
        pytest.skip("needs compute capability 9.x and CUDA 12.9")


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("tokens", [256, 100])
def test_the_hardwares_product_agrees_with_the_emulated_one(name: str, tokens: int) -> None:
    needs(name)
    torch.manual_seed(0)
    plain = nn.Linear(256, 384, bias=False, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) for n in (256, 384))
    found = []
    for product in ("emulate", "scaled_mm"):
        layer = FP8Linear.from_linear(plain, SCALINGS[name], Region(active=True), product=product)
        layer.weight = nn.Parameter(plain.weight.detach().clone())
        given = x.clone().requires_grad_()
        layer(given).backward(dy)
        found.append((layer(given).detach(), given.grad, layer.weight.grad))
        assert {decode_gemm_record(c).execution for c in layer.gemms_ran.tolist()} == {
            "emulated" if product == "emulate" else "scaled_mm"
        }
    for a, b in zip(*found, strict=True):
        assert ((a.float() - b.float()).norm() / b.float().norm()).item() < 5e-3


@pytest.mark.parametrize("name", ["bf16", *FP8])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_runs_as_planned_and_follows_the_cpu(name: str, compiled: bool) -> None:
    needs(name)
    words = (*FP8.get(name, ("precision=bf16",)), *SHAPE)
    job = fp8cfg.build(small(*words, "trainer.accelerator=cuda"))
    if compiled:
        job.compile_model()
    got = [s.loss for s in steps(job, 6)]
    job.prove()
    want = [s.loss for s in steps(fp8cfg.build(small(*words, "trainer.accelerator=cpu")), 6)]
    assert got == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_fp8_params_save_their_bytes(name: str) -> None:
    needs(name)
    words = (*FP8[name], *SHAPE, "trainer.accelerator=cuda")
    held, kept = (fp8cfg.build(small(*words, f"fp8.params={p}")) for p in ("true", "false"))
    saved = weight_bytes(kept) - weight_bytes(held)
    assert saved == sum(layer.weight.numel() for layer in fp8_linears(held.model))


def collected(*words: str) -> tuple[fp8cfg.Job, list[Statistics]]:
    job = fp8cfg.build(small(*words))
    tokens, targets = (t.to(job.device) for t in run_data(job.recipe)[0].batch(0))

    def run() -> None:
        with job.autocast():
            job.backward(job.model(tokens, targets))

    return job, collect_statistics(job.model, run, job.optimizer.masters)


@pytest.mark.parametrize("name", FP8)
def test_statistics_are_those_of_the_cpu_and_leave_no_trace(name: str) -> None:
    needs(name)
    random = torch.cuda.get_rng_state()
    job, got = collected(*FP8[name], *SHAPE, "trainer.accelerator=cuda")
    _, want = collected(*FP8[name], *SHAPE, "trainer.accelerator=cpu")
    assert [s[:3] for s in got] == [s[:3] for s in want]
    assert [s.amax for s in got] == pytest.approx([s.amax for s in want], rel=0.2)
    assert [s.error for s in got] == pytest.approx([s.error for s in want], rel=0.2)
    assert torch.equal(random, torch.cuda.get_rng_state()) and all(
        p.grad is None for p in job.model.parameters()
    )
    for layer in fp8_linears(job.model):
        assert not layer.gemms_ran.any()
        assert layer.fp8_amax_history is None or not (
            layer.fp8_amax_history[0, 0] or layer.fp8_backward_amax.any()
        )
