"""Rows of the low-precision chart through the whole way: recipe, build, training, bytes, checkpoint and resume."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.optim.low_bit.adam import LowBitTraining
from fp8cfg.planning import remarks
from fp8cfg.planning.gemm_memory import ELEMENT_BYTES
from fp8cfg.training import memory_measurement
from fp8cfg.training.data import run_data
from fp8cfg.training.step import StepResult
from tests.support import whole_checkpoints
from tests.support.small import small, steps
from tests.support.storage_rows import ROWS, after, equal, everything, words


@functools.cache
def trained(row: str) -> tuple[Job, list[StepResult]]:
    """Five steps of a row; not to be changed."""
    torch.manual_seed(0)
    job = fp8cfg.build(small(*words(row)))
    return job, list(steps(job, 5))


@functools.cache
def float32_losses() -> list[float]:
    return [s.loss for s in steps(fp8cfg.build(small("precision=fp32", "optim.lr=1e-3")), 5)]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_trains_beside_float32(row: str) -> None:
    job, done = trained(row)
    assert all(s.stepped for s in done) and job.prove()
    assert [s.loss for s in done] == pytest.approx(
        float32_losses(), abs=0.02 if "nvfp4" in row else 0.005
    )
    assert isinstance(job.optimizer, LowBitTraining) == (
        row not in ("FP16 AMP", "TE", "FP8 weights outside of FP8")
    )


@pytest.mark.parametrize("row", ROWS)
def test_stored_bytes_are_those_of_the_chart(row: str) -> None:
    """Of weights, masters, gradients and moments, each as the columns of its parameters say; without scales of whole tensors."""
    job, _ = trained(row)
    held = {
        **memory_measurement.persistent_tensors(job),
        "gradients": memory_measurement.gradient_tensors(job),
    }
    shapes = {name: p.numel() for name, p in job.model.named_parameters()}
    for kind, names in (
        ("weights", ["weight"]),
        ("masters", ["master_weight"]),
        ("gradients", ["weight_grad"]),
        ("moments", ["exp_avg", "exp_avg_sq"]),
    ):
        planned = sum(
            n * ELEMENT_BYTES[job.prepared.columns[name][column]]
            for name, n in shapes.items()
            for column in names
        )
        assert sum(t.nbytes for t in held[kind] if t.dim()) == pytest.approx(
            planned, rel=2e-3 if "block" in row else 0
        ), kind
    assert remarks.chart_row(job.recipe, job.prepared.state) == {
        "gemm": remarks.chart_row(job.recipe, job.prepared.state)["gemm"],
        **job.prepared.columns["layers.0.mlp.linear_fc1.weight"],
    }


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("O")])
def test_stored_gradients_are_freed(row: str) -> None:
    job, _ = trained(row)
    for name, p in job.model.named_parameters():
        stored = job.prepared.columns[name]["weight_grad"].startswith("fp8")
        assert (p.grad is None) == stored == (p in job.optimizer.stored_grads), name
        if stored:
            data, scale_inv = job.optimizer.stored_grads[p]
            assert (
                data.dtype == torch.float8_e4m3fn
                and data.abs().to(torch.float32).max() > 0
                and scale_inv.isfinite()
            )


@pytest.mark.parametrize(
    "more",
    [(), ("precision.fp8.enabled=true", "fp8.high_precision_at_start=1")],
    ids=["bf16", "fp8"],
)
def test_biases_are_float32_beside_weights_without_masters(more: tuple[str, ...]) -> None:
    job = fp8cfg.build(small("precision=bf16_adamw_fp8", "recipe=qwen2_tiny", *more))
    want = [s.loss for s in steps(fp8cfg.build(small("precision=bf16", "recipe=qwen2_tiny")), 3)]
    assert [s.loss for s in steps(job, 3)] == pytest.approx(want, abs=0.005)
    qkv = job.model.layers[0].self_attention.linear_qkv
    assert (qkv.weight.dtype, qkv.bias.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("output", ["false", "true"])
@pytest.mark.parametrize("row", ["O2, delayed", "O3, delayed", "O3, bf16"])
def test_tied_weights_stay_tied(row: str, output: str) -> None:
    fp8 = [f"fp8.output_layer={output}"] if "delayed" in row else []
    job = fp8cfg.build(small(*words(row), *fp8, "model.share_embeddings_and_output_weights=true"))
    start = job.model.embedding.weight.detach().clone()
    assert [s.stepped for s in steps(job, 2)] == [True, True]
    assert (
        job.model.output_layer.weight is job.model.embedding.weight
        and job.model.embedding.weight.dtype == torch.float32
    )
    assert "output_layer.weight" not in job.optimizer.names.values() and not torch.equal(
        start, job.model.embedding.weight
    )


class Foreign(nn.Module):
    """A model of someone else's: norms and linear layers with biases, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(272, 64), nn.LayerNorm(64)
        self.up, self.down, self.head = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 272)
        self.up.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


@pytest.mark.filterwarnings(
    "ignore:only .* ran in FP8:RuntimeWarning"
)  # the head is as large as the rest
@pytest.mark.parametrize(
    "row", ["O2, fp32", "O2, bf16", "O2, delayed", "O3, delayed", "O3, current", "bf16 moments"]
)
def test_frozen_weights_of_a_given_model_stay_and_have_no_state(row: str) -> None:
    model = Foreign()
    job = fp8cfg.build(small(*words(row)), model)
    frozen = {
        k: t.clone()
        for k, t in stored_state_dict(job.model).items()
        if k.startswith("up.") and "amax" not in k and k != "up.fp8_scale"
    }
    losses = [s.loss for s in steps(job, 6)]
    assert losses[-1] < losses[0] and job.model is model
    assert (
        equal(frozen, {k: stored_state_dict(job.model)[k] for k in frozen})
        and not model.up.weight.requires_grad
        and not model.up.bias.requires_grad
    )
    assert not any(
        name.startswith("up.")
        for name in [*job.optimizer.names.values(), *job.optimizer.state_tensors()]
    )
    assert model.up.weight.grad is None and model.up.weight not in getattr(
        job.optimizer, "stored_grads", {}
    )


@pytest.mark.parametrize("row", ROWS)
def test_resumed_bits_are_those_of_the_run_that_went_on(row: str, tmp_path: Path) -> None:
    want, done = trained(row)
    _, tensors, state = after(row, 2)
    path = whole_checkpoints.save(tmp_path, 2, tensors, state, keep=1)
    job = fp8cfg.build(small(*words(row)))
    assert job_state.restore(job, *whole_checkpoints.load(path), run_data(job.recipe)[0]) == 2
    assert list(steps(job, 3, first=2)) == done[2:]
    assert (
        equal(everything(job), everything(want))
        and job.optimizer.state_json() == want.optimizer.state_json()
    )


@pytest.mark.slow
def test_compiled_losses_are_the_eager_ones() -> None:
    """Compiled sums round differently, and FP8 passes that on: losses are equal to 1e-3."""
    job, eager = (
        fp8cfg.build(
            small(*words("O2, delayed"), "model.num_layers=1", "trainer.micro_batch_size=4")
        )
        for _ in range(2)
    )
    job.compile_model()
    job.optimizer.compiled = (
        False  # tests/optim/test_low_bit_memory.py holds its bits against the eager ones
    )
    assert [s.loss for s in steps(job, 3)] == pytest.approx(
        [s.loss for s in steps(eager, 3)], abs=1e-3
    )
    assert len(job.optimizer.stored_grads) == 5 and all(
        p.grad is None for p in job.optimizer.stored_grads
    )
