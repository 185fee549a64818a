"""Steps of jobs with stored tensors: what is rounded, clipped, unscaled and skipped, against plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.numerics.codecs import get_codec
from fp8cfg.numerics.fp8_weights import plain
from fp8cfg.training.data import run_data
from tests.support.small import small, steps
from tests.support.storage_rows import bits, equal, everything, words

FEW = (
    "O1, fp32",
    "O2, delayed",
    "O3, delayed",
    "O2, fp16",
    "O3, mxfp8",
    "O3, bf16",
    "bf16 weights without masters",
    "gradients in blocks",
)


def one_backward(job: Job, step: int = 0) -> None:
    """The gradients of a step, not stored yet."""
    tokens, targets = run_data(job.recipe)[0].batch(step)
    with job.autocast():
        job.backward(job.model(tokens, targets))


@pytest.mark.parametrize("micro", [8, 2])
def test_gradients_are_added_up_and_then_rounded_once(micro: int) -> None:
    """The bits of one rounding of what a run with float32 gradients adds up."""
    common = [*words("O2, delayed"), f"trainer.micro_batch_size={micro}"]
    job, wide = (
        fp8cfg.build(small(*common)),
        fp8cfg.build(small(*common, "storage.weight_grad=fp32")),
    )
    list(steps(job, 1)), list(steps(wide, 1))
    theirs = {name: p.grad for name, p in wide.model.named_parameters()}
    assert len(job.optimizer.stored_grads) == 9
    for p, stored in job.optimizer.stored_grads.items():
        assert all(
            torch.equal(bits(a), bits(b))
            for a, b in zip(
                stored, get_codec("fp8").encode(theirs[job.optimizer.names[p]]), strict=True
            )
        )


def test_clipping_is_that_of_the_decoded_gradients() -> None:
    job = fp8cfg.build(small(*words("O2, delayed"), "trainer.gradient_clip_val=0.01"))
    other = fp8cfg.build(
        small(*words("O2, delayed"), "trainer.gradient_clip_val=0", "storage.weight_grad=fp32")
    )
    one_backward(job)
    job.optimizer.store_grads()
    for p, q in zip(job.model.parameters(), other.model.parameters(), strict=True):
        q.grad = (
            get_codec("fp8").decode(job.optimizer.stored_grads[p])
            if p in job.optimizer.stored_grads
            else p.grad.clone()
        )
    norm = nn.utils.clip_grad_norm_(other.model.parameters(), 0.01)
    with other.autocast(enabled=False):  # a step without a pass in FP8, on purpose
        assert job.optimizer.step() and other.optimizer.step()
    assert job.optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-6) and norm > 1
    theirs = other.optimizer.state_tensors()
    for name, t in job.optimizer.state_tensors().items():
        apart = (t.float() - theirs[name].float()).abs().max()
        assert apart <= t.float().abs().max() * (2**-3 if t.dtype.itemsize == 1 else 1e-3), (
            "at most the next FP8 code"
        )
    for p, q in zip(job.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(plain(p).float(), plain(q).float(), rtol=2**-10, atol=1e-7)


@pytest.mark.parametrize(("name", "moved"), [("adam", True), ("adamw", False)])
def test_weight_decay_is_in_the_moments_of_adam_and_not_of_adamw(name: str, moved: bool) -> None:
    """With gradients of 0, which FP8 stores: Adam adds the decay to them, AdamW takes it off the weights."""
    job = fp8cfg.build(small(*words("O2, delayed"), f"optim.name={name}", "optim.weight_decay=1"))
    for p in job.model.parameters():
        p.grad = torch.zeros(p.shape)
    weight = job.model.layers[0].mlp.linear_fc1.codec_tensors
    before = get_codec("fp16_scaled").decode(weight)
    with job.autocast(enabled=False):  # a step without a pass in FP8, on purpose
        assert job.optimizer.step() and not torch.equal(
            before, get_codec("fp16_scaled").decode(weight)
        )
    found = job.optimizer.state_tensors()["layers.0.mlp.linear_fc1.weight.exp_avg"]
    assert bool(found.float().any()) == moved


def test_a_loss_scale_changes_no_bit_of_a_clipped_step() -> None:
    """A power of two, which FP8 gradients carry in their scales."""
    found = []
    for scale in (1, 1024):
        job = fp8cfg.build(
            small(
                "precision=fp16",
                "opt_level=O2",
                f"precision.loss_scale={scale}",
                "trainer.gradient_clip_val=0.01",
            )
        )
        for i, p in enumerate(job.model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * scale
        assert job.optimizer.step() and job.optimizer.grad_norm > 1
        found.append((job.optimizer.grad_norm, everything(job)))
    assert found[0][0] == found[1][0] and equal(found[0][1], found[1][1])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("row", FEW)
def test_a_gradient_that_is_not_finite_skips_the_step_and_changes_nothing(
    row: str, bad: float
) -> None:
    job = fp8cfg.build(small(*words(row), *(["precision.hysteresis=1"] if "fp16" in row else [])))
    list(steps(job, 2))
    job.optimizer.zero_grad()
    before, json = everything(job), job.optimizer.state_json()
    one_backward(job)
    p = job.model.layers[0].mlp.linear_fc1.weight
    p.grad[0, 0] = bad
    scale = job.loss_scaler and job.loss_scaler.scale
    assert job.optimizer.step() is False and job.optimizer.steps == 2
    after = everything(job)
    histories = [k for k in after if "amax_history" in k]
    assert equal(
        {k: t for k, t in after.items() if k not in histories},
        {k: t for k, t in before.items() if k not in histories},
    )
    assert {k: v for k, v in job.optimizer.state_json().items() if k != "loss_scale"} == {
        k: v for k, v in json.items() if k != "loss_scale"
    }
    assert scale is None or job.loss_scaler.scale == scale / 2
    assert next(steps(job, 1, first=2)).stepped


def test_a_loss_scale_that_is_too_large_skips_steps_until_it_fits() -> None:
    job = fp8cfg.build(
        small(
            "precision=fp16",
            "opt_level=O2",
            "optim.lr=1e-3",
            "precision.initial_loss_scale=1048576",
            "precision.hysteresis=1",
        )
    )
    before, done = everything(job), []
    for step in steps(job, 4):
        done.append((step.stepped, job.loss_scaler.scale))
        assert equal(everything(job), before) != step.stepped
        before = everything(job)
    assert done == [(False, 2.0**19), (False, 2.0**18), (True, 2.0**18), (True, 2.0**18)]


def test_small_gradients_are_unscaled_in_float32() -> None:
    """Gradients of 1e-8, which the loss scale brings into the range of fp16, are not flushed to 0 as they are read."""
    job = fp8cfg.build(small(*words("fp16 weights without masters"), "trainer.gradient_clip_val=0"))
    p = job.model.layers[0].mlp.linear_fc1.weight
    p.grad = torch.full_like(p, 1e-8 * job.loss_scaler.scale)
    assert p.grad.dtype == torch.float16 and job.optimizer.step()
    found = job.optimizer.state_tensors()["layers.0.mlp.linear_fc1.weight.exp_avg"]
    assert torch.allclose(found, torch.full_like(found, 1e-9), rtol=1e-3)
