"""Rows of the low-precision chart through the whole way: recipe, build, training, bytes, checkpoint and resume."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.job import Job
from fp8cfg.numerics.codecs import codec
from fp8cfg.numerics.stored_form import stored_state_dict
from fp8cfg.numerics.weight_access import plain
from fp8cfg.optim.low_bit.training import LowBitTraining
from fp8cfg.report import chart
from fp8cfg.report.memory.operands import CODEC
from fp8cfg.training import memory_measurement
from fp8cfg.training.checkpoint import checkpoint, job_state, resume_rules
from fp8cfg.training.data import run_data
from fp8cfg.training.distributed.world import World
from fp8cfg.training.train_step import Step, train_step
from tests.support import sharded_checkpoints
from tests.support.ranks import on_ranks
from tests.support.small import small, steps

FP8, OWN = "precision=bf16_fp8", "fp8.params=false"
CURRENT = "precision=bf16_fp8_current fp8.high_precision_at_start=0 fp8.high_precision_at_end=0"
SCALE = "precision.initial_loss_scale=65536"
ROWS = {
    "FP16 AMP": f"precision=fp16 storage.weight=fp32 {SCALE}",
    "TE": f"{FP8} {OWN} storage.weight=fp32",
    **{f"{level}, {name}": f"{words} opt_level={level}" for level in ("O1", "O2", "O3") for name, words in (
        ("fp32", "precision=fp32"), ("bf16", "precision=bf16"), ("delayed", FP8), ("current", CURRENT), ("block", "precision=bf16_fp8_block"),
        ("mxfp8", "precision=bf16_mxfp8"), ("fp16", f"precision=fp16 {SCALE}"))},
    "O3, nvfp4": "precision=bf16_nvfp4 opt_level=O3",
    "O3, fp16_fp8": f"precision=fp16_fp8 opt_level=O3 {SCALE}",
    "O2, powers of two": f"{FP8} opt_level=O2 storage.weight_grad=fp8_pow2 storage.comm=fp8_pow2 storage.exp_avg=fp8_pow2",
    "O2, FP8 attention": f"{FP8} opt_level=O2 fp8.dot_product_attention=true",
    "O2, recomputed": f"{FP8} opt_level=O2 model.recompute_granularity=full trainer.micro_batch_size=2",
    "bf16 weights without masters": "precision=bf16 storage.master_weight=none storage.rounding=stochastic",
    "bf16 weights without masters, FP8": f"{FP8} {OWN} storage.master_weight=none storage.rounding=stochastic",
    "fp16 weights without masters": f"precision=fp16 storage.master_weight=none storage.rounding=stochastic {SCALE}",
    "bf16 moments": "precision=bf16 storage.exp_avg=bf16 storage.exp_avg_sq=bf16",
    "block moments": f"{FP8} storage.exp_avg=fp8_block storage.exp_avg_sq=fp8_block",
    "FP8 weights outside of FP8": "precision=bf16 storage.weight=fp8",
    "gradients in bf16 of float32 weights": "precision=fp32 storage.weight_grad=bf16",
    "gradients in scaled fp16": "precision=bf16 storage.weight_grad=fp16_scaled",
    "gradients in blocks": "precision=bf16 storage.weight_grad=fp8_block",
}
FEW = ("O1, fp32", "O2, delayed", "O3, delayed", "O2, fp16", "O3, mxfp8", "O3, bf16", "bf16 weights without masters", "gradients in blocks")


def words(row: str) -> list[str]:
    return [*ROWS[row].split(), "optim.lr=1e-3"]


@functools.cache
def trained(row: str) -> tuple[Job, list[Step]]:
    """Five steps of a row; not to be changed."""
    torch.manual_seed(0)
    job = fp8cfg.build(small(*words(row)))
    return job, list(steps(job, 5))


@functools.cache
def float32_losses() -> list[float]:
    return [s.loss for s in steps(fp8cfg.build(small("precision=fp32", "optim.lr=1e-3")), 5)]


def one_backward(job: Job, step: int = 0) -> None:
    """The gradients of a step, not stored yet."""
    tokens, targets = run_data(job.recipe)[0].batch(step)
    with job.autocast():
        job.backward(job.model(tokens, targets))


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(t.dtype == b[k].dtype and torch.equal(bits(t), bits(b[k])) for k, t in a.items())


def everything(job: Job) -> dict[str, Tensor]:
    state = {f"state {k}": t for k, t in job.optimizer.state_tensors().items()}
    return {k: t.clone() for k, t in {**stored_state_dict(job.model), **state}.items()}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_trains_beside_float32(row: str) -> None:
    job, done = trained(row)
    assert all(s.stepped for s in done) and job.prove()
    assert [s.loss for s in done] == pytest.approx(float32_losses(), abs=0.02 if "nvfp4" in row else 0.005)
    assert isinstance(job.optimizer, LowBitTraining) == (row not in ("FP16 AMP", "TE", "FP8 weights outside of FP8"))


@pytest.mark.parametrize("row", ROWS)
def test_stored_bytes_are_those_of_the_chart(row: str) -> None:
    """Of weights, masters, gradients and moments, each as the columns of its parameters say; without scales of whole tensors."""
    job, _ = trained(row)
    held = {**memory_measurement.stored(job), "gradients": memory_measurement.gradients(job)}
    shapes = {name: p.numel() for name, p in job.model.named_parameters()}
    for kind, names in (("weights", ["weight"]), ("masters", ["master_weight"]), ("gradients", ["weight_grad"]), ("moments", ["exp_avg", "exp_avg_sq"])):
        planned = sum(n * CODEC[job.prepared.columns[name][column]] for name, n in shapes.items() for column in names)
        assert sum(t.nbytes for t in held[kind] if t.dim()) == pytest.approx(planned, rel=2e-3 if "block" in row else 0), kind
    assert chart.row(job.recipe) == {"gemm": chart.row(job.recipe)["gemm"], **job.prepared.columns["layers.0.mlp.linear_fc1.weight"]}


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("O")])
def test_stored_gradients_are_freed(row: str) -> None:
    job, _ = trained(row)
    for name, p in job.model.named_parameters():
        stored = job.prepared.columns[name]["weight_grad"].startswith("fp8")
        assert (p.grad is None) == stored == (p in job.optimizer.stored_grads), name
        if stored:
            data, scale_inv = job.optimizer.stored_grads[p]
            assert data.dtype == torch.float8_e4m3fn and data.abs().to(torch.float32).max() > 0 and scale_inv.isfinite()


@pytest.mark.parametrize("micro", [8, 2])
def test_gradients_are_added_up_and_then_rounded_once(micro: int) -> None:
    """The bits of one rounding of what a run with float32 gradients adds up."""
    common = [*words("O2, delayed"), f"trainer.micro_batch_size={micro}"]
    job, wide = fp8cfg.build(small(*common)), fp8cfg.build(small(*common, "storage.weight_grad=fp32"))
    list(steps(job, 1)), list(steps(wide, 1))
    theirs = {name: p.grad for name, p in wide.model.named_parameters()}
    assert len(job.optimizer.stored_grads) == 9
    for p, stored in job.optimizer.stored_grads.items():
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(stored, codec("fp8").encode(theirs[job.optimizer.names[p]]), strict=True))


def test_clipping_is_that_of_the_decoded_gradients() -> None:
    job = fp8cfg.build(small(*words("O2, delayed"), "trainer.gradient_clip_val=0.01"))
    other = fp8cfg.build(small(*words("O2, delayed"), "trainer.gradient_clip_val=0", "storage.weight_grad=fp32"))
    one_backward(job)
    job.optimizer.store_grads()
    for p, q in zip(job.model.parameters(), other.model.parameters(), strict=True):
        q.grad = codec("fp8").decode(job.optimizer.stored_grads[p]) if p in job.optimizer.stored_grads else p.grad.clone()
    norm = nn.utils.clip_grad_norm_(other.model.parameters(), 0.01)
    with other.autocast(enabled=False):  # a step without a pass in FP8, on purpose
        assert job.optimizer.step() and other.optimizer.step()
    assert job.optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-6) and norm > 1
    theirs = other.optimizer.state_tensors()
    for name, t in job.optimizer.state_tensors().items():
        apart = (t.float() - theirs[name].float()).abs().max()
        assert apart <= t.float().abs().max() * (2**-3 if t.dtype.itemsize == 1 else 1e-3), "at most the next FP8 code"
    for p, q in zip(job.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(plain(p).float(), plain(q).float(), rtol=2**-10, atol=1e-7)


@pytest.mark.parametrize(("name", "moved"), [("adam", True), ("adamw", False)])
def test_weight_decay_is_in_the_moments_of_adam_and_not_of_adamw(name: str, moved: bool) -> None:
    """With gradients of 0, which FP8 stores: Adam adds the decay to them, AdamW takes it off the weights."""
    job = fp8cfg.build(small(*words("O2, delayed"), f"optim.name={name}", "optim.weight_decay=1"))
    for p in job.model.parameters():
        p.grad = torch.zeros(p.shape)
    weight = job.model.layers[0].mlp.linear_fc1.in_codec
    before = codec("fp16_scaled").decode(weight)
    with job.autocast(enabled=False):  # a step without a pass in FP8, on purpose
        assert job.optimizer.step() and not torch.equal(before, codec("fp16_scaled").decode(weight))
    found = job.optimizer.state_tensors()["layers.0.mlp.linear_fc1.weight.exp_avg"]
    assert bool(found.float().any()) == moved


def test_a_loss_scale_changes_no_bit_of_a_clipped_step() -> None:
    """A power of two, which FP8 gradients carry in their scales."""
    found = []
    for scale in (1, 1024):
        job = fp8cfg.build(small("precision=fp16", "opt_level=O2", f"precision.loss_scale={scale}", "trainer.gradient_clip_val=0.01"))
        for i, p in enumerate(job.model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * scale
        assert job.optimizer.step() and job.optimizer.grad_norm > 1
        found.append((job.optimizer.grad_norm, everything(job)))
    assert found[0][0] == found[1][0] and equal(found[0][1], found[1][1])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("row", FEW)
def test_a_gradient_that_is_not_finite_skips_the_step_and_changes_nothing(row: str, bad: float) -> None:
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
    assert equal({k: t for k, t in after.items() if k not in histories}, {k: t for k, t in before.items() if k not in histories})
    assert {k: v for k, v in job.optimizer.state_json().items() if k != "loss_scale"} == {k: v for k, v in json.items() if k != "loss_scale"}
    assert scale is None or job.loss_scaler.scale == scale / 2
    assert next(steps(job, 1, first=2)).stepped


def test_a_loss_scale_that_is_too_large_skips_steps_until_it_fits() -> None:
    job = fp8cfg.build(small("precision=fp16", "opt_level=O2", "optim.lr=1e-3", "precision.initial_loss_scale=1048576", "precision.hysteresis=1"))
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


@pytest.mark.parametrize("output", ["false", "true"])
@pytest.mark.parametrize("row", ["O2, delayed", "O3, delayed", "O3, bf16"])
def test_tied_weights_stay_tied(row: str, output: str) -> None:
    fp8 = [f"fp8.output_layer={output}"] if "delayed" in row else []
    job = fp8cfg.build(small(*words(row), *fp8, "model.share_embeddings_and_output_weights=true"))
    start = job.model.embedding.weight.detach().clone()
    assert [s.stepped for s in steps(job, 2)] == [True, True]
    assert job.model.output_layer.weight is job.model.embedding.weight and job.model.embedding.weight.dtype == torch.float32
    assert "output_layer.weight" not in job.optimizer.names.values() and not torch.equal(start, job.model.embedding.weight)


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


@pytest.mark.filterwarnings("ignore:only .* ran in FP8:RuntimeWarning")  # the head is as large as the rest
@pytest.mark.parametrize("row", ["O2, fp32", "O2, bf16", "O2, delayed", "O3, delayed", "O3, current", "bf16 moments"])
def test_frozen_weights_of_a_given_model_stay_and_have_no_state(row: str) -> None:
    model = Foreign()
    job = fp8cfg.build(small(*words(row)), model)
    frozen = {k: t.clone() for k, t in stored_state_dict(job.model).items() if k.startswith("up.") and "amax" not in k and k != "up.fp8_scale"}
    losses = [s.loss for s in steps(job, 6)]
    assert losses[-1] < losses[0] and job.model is model
    assert equal(frozen, {k: stored_state_dict(job.model)[k] for k in frozen}) and not model.up.weight.requires_grad and not model.up.bias.requires_grad
    assert not any(name.startswith("up.") for name in [*job.optimizer.names.values(), *job.optimizer.state_tensors()])
    assert model.up.weight.grad is None and model.up.weight not in getattr(job.optimizer, "stored_grads", {})


def after(row: str, done: int) -> tuple[Job, checkpoint.Tensors, dict[str, Any]]:
    torch.manual_seed(0)
    job = fp8cfg.build(small(*words(row)))
    list(steps(job, done))
    return job, *job_state.collect(job, run_data(job.recipe)[0], done)


@pytest.mark.parametrize("row", ROWS)
def test_resumed_bits_are_those_of_the_run_that_went_on(row: str, tmp_path: Path) -> None:
    want, done = trained(row)
    _, tensors, state = after(row, 2)
    path = checkpoint.save(tmp_path, 2, tensors, state, keep=1)
    job = fp8cfg.build(small(*words(row)))
    assert job_state.restore(job, *checkpoint.load(path), run_data(job.recipe)[0]) == 2
    assert list(steps(job, 3, first=2)) == done[2:]
    assert equal(everything(job), everything(want)) and job.optimizer.state_json() == want.optimizer.state_json()


@pytest.mark.parametrize(("before", "now", "line"), [
    (f"{FP8}", "opt_level=O2", "opt_level=O2: this run was started with None; start a new run"),
    (f"{FP8} opt_level=O2", "storage.exp_avg=fp8_pow2", "storage.exp_avg=fp8_pow2: this run was started with auto; start a new run"),
    (f"{FP8} opt_level=O2", "opt_level=O1", "opt_level=O1: this run was started with O2; start a new run"),
    (f"{FP8} opt_level=O2", "opt_level=O3", "opt_level=O3: this run was started with O2; start a new run"),
    (f"{FP8} opt_level=O3", "fp8.exclude=['*linear_fc2']", "fp8.exclude=('*linear_fc2',): this run was started with (); start a new run"),
    (f"{FP8} storage.exp_avg=bf16", "fp8.params=false", "fp8.params=False: this run was started with True; start a new run"),
    (f"{FP8} precision.compute=fp32", "fp8.params=false", "fp8.params=False: this run was started with True; start a new run"),
    (f"{FP8} precision.compute=fp32", "fp8.exclude=['*linear_fc2']", "fp8.exclude=('*linear_fc2',): this run was started with (); start a new run"),
])
def test_a_resumed_run_keeps_the_state_it_has(before: str, now: str, line: str) -> None:
    recipe = small(*before.split())
    with pytest.raises(fp8cfg.ConfigError) as e:
        resume_rules.refuse_changes(recipe, fp8cfg.compose([now], base=recipe), [])
    assert e.value.problems == [line]
    if "new run" in line:
        with pytest.raises(fp8cfg.ConfigError, match="start a new run"):
            resume_rules.refuse_changes(recipe, fp8cfg.compose([now], base=recipe), [now.partition("=")[0]])


@pytest.mark.parametrize(("before", "now", "key"), [
    (f"{FP8} opt_level=O2", "fp8.exclude=['*linear_fc2']", "fp8.exclude"), (f"{FP8} opt_level=O3", "fp8.margin=1", "fp8.margin"),
    (f"{FP8} opt_level=O3", "fp8.scaling=current", "fp8.scaling"), (f"{FP8} opt_level=O1", "storage.rounding=stochastic", "storage.rounding"),
    ("precision=bf16 storage.weight=fp8", "storage.weight=bf16", "storage.weight"), ("precision=bf16", "storage.weight=fp8", "storage.weight"),
    (f"{FP8} {OWN} opt_level=O2", "storage.weight_grad=fp32", "storage.weight_grad"),
    (f"{FP8} opt_level=O3 model.share_embeddings_and_output_weights=true", "fp8.output_layer=true", "fp8.output_layer"),
])
def test_an_allowed_change_then_fits(before: str, now: str, key: str) -> None:
    recipe = small(*before.split(), "optim.lr=1e-3")
    other = fp8cfg.compose([now], base=recipe)
    with pytest.raises(fp8cfg.ConfigError, match=f"resume it with --allow {key}"):
        resume_rules.refuse_changes(recipe, other, [])
    resume_rules.refuse_changes(recipe, other, [key])
    job, changed = fp8cfg.build(recipe), fp8cfg.build(other)
    list(steps(job, 3))
    tensors, state = job_state.collect(job, run_data(recipe)[0], 3)
    job_state.restore(changed, tensors, state, run_data(recipe)[0])
    assert [s.loss for s in steps(changed, 2, first=3)] == pytest.approx([s.loss for s in steps(job, 2, first=3)], abs=5e-3)


def test_other_codecs_in_a_checkpoint_are_one_line() -> None:
    _, tensors, state = after("O2, delayed", 1)
    job = fp8cfg.build(small(*words("O2, powers of two")))
    with pytest.raises(fp8cfg.ConfigError) as e:
        job_state.restore(job, tensors, state, run_data(job.recipe)[0])
    assert e.value.problems == ["the checkpoint does not fit this recipe: optimizer state: embedding.weight is stored as exp_avg e4m3 exact, exp_avg_sq fp16 pow2, "
                                "expected exp_avg e4m3 pow2, exp_avg_sq fp16 pow2"]


@pytest.mark.slow
def test_compiled_losses_are_the_eager_ones() -> None:
    """Compiled sums round differently, and FP8 passes that on: losses are equal to 1e-3."""
    job, eager = (fp8cfg.build(small(*words("O2, delayed"), "model.num_layers=1", "trainer.micro_batch_size=4")) for _ in range(2))
    job.compile_model()
    job.optimizer.compiled = False  # tests/optim/test_low_bit_memory.py holds its bits against the eager ones
    assert [s.loss for s in steps(job, 3)] == pytest.approx([s.loss for s in steps(eager, 3)], abs=1e-3)
    assert len(job.optimizer.stored_grads) == 5 and all(p.grad is None for p in job.optimizer.stored_grads)


# Two ranks over gloo, all cases in one pair of processes.

RANKED = {
    "O2": f"{FP8} opt_level=O2", "O3": f"{FP8} opt_level=O3", "O3, mxfp8": "precision=bf16_mxfp8 opt_level=O3", "O2, fp16": f"precision=fp16 opt_level=O2 {SCALE}",
    "O3, summed in float32": f"{FP8} opt_level=O3 storage.comm=fp32", "bf16 moments": "precision=bf16 storage.master_weight=fp16_scaled storage.exp_avg=bf16 storage.exp_avg_sq=bf16",
    "float32 masters": "precision=bf16 storage.weight_grad=fp8 storage.comm=fp8",
    "O3, tied": f"{FP8} opt_level=O3 fp8.output_layer=true model.share_embeddings_and_output_weights=true",
    # What FSDP2 does not gather as a rank alone stores it (tests/training/test_zero_shards.py has the rest).
    "FP8 weights": "precision=bf16_mxfp8 storage.master_weight=fp16_scaled", "FP8 weights outside of FP8": "precision=bf16 storage.weight=fp8 storage.weight_grad=fp8 storage.comm=fp8",
    "momentum": "precision=bf16 storage.weight=fp8 storage.comm=fp8 optim.name=sgd optim.momentum=0.9 optim.lr=0.1 trainer.gradient_clip_val=0.5",
}
SHARDS = ("none", "zero1", "zero2")
RESUMED = [("O2", "none", "zero2"), ("O2", "zero1", "zero1"), ("O3", "zero2", "zero2"), ("O3", "zero2", "none"), ("O3", "none", "zero1"), ("O3, tied", "zero1", "zero2"),
           ("FP8 weights outside of FP8", "zero1", "none"), ("FP8 weights", "none", "zero1"), ("FP8 weights", "zero2", "zero2"), ("momentum", "none", "zero1")]
SENT = ("fp32", "bf16", "fp8")
SPOILED = ("layers.0.mlp.linear_fc1.weight", "final_layernorm.weight")


def ranked_job(*words: str) -> Job:
    return fp8cfg.build(small(*words, "model.num_layers=1", "trainer.micro_batch_size=2", "optim.lr=1e-3"))


def run(job: Job, world: World, first: int, last: int) -> list[list[float]]:
    batches, _ = run_data(job.recipe)
    return [[s.loss, s.grad_norm] for s in (train_step(job, batches, step, world) for step in range(first, last))]


def state(job: Job, world: World) -> dict[str, Tensor]:
    return {k: t.clone() for k, t in {**stored_state_dict(job.model), **sharded_checkpoints.whole(job, world)["optimizer"]}.items()}


def spoil(p: Tensor) -> None:
    p.grad.view(-1)[0] = float("inf")


def save(job: Job, world: World, path: Path) -> None:
    sharded_checkpoints.saved(job, world, path, 2)


def load(job: Job, path: Path) -> None:
    assert job_state.restore(job, *checkpoint.load(path / "step-00000002"), run_data(job.recipe)[0]) == 2


def on_two(folder: Path, world: World) -> dict[str, Any]:
    """What a rank has of each row and way to shard it, of runs that were saved and go on, and of gradients sent in each codec."""
    found: dict[str, Any] = {}
    for row, its in RANKED.items():
        for shard in SHARDS:
            job = ranked_job(*its.split(), f"storage.shard={shard}")
            assert not job.prepared.fsdp2, "whole tensors have owners"
            losses = run(job, world, 0, 2)
            save(job, world, folder / f"{row} {shard}")
            world.traffic.clear()
            losses += run(job, world, 2, 3)
            sent = dict(world.traffic.bytes)
            losses += run(job, world, 3, 4)
            kept = [sum(t.nbytes for t in held if t.dim()) for held in (memory_measurement.stored(job)["masters"] + memory_measurement.stored(job)["moments"], memory_measurement.gradients(job))]
            found[f"{row} {shard}"] = {"losses": losses, "sent": sent, "kept": kept, "state": state(job, world), "json": job.optimizer.state_json()}
    for row, before, now in RESUMED:
        job = ranked_job(*RANKED[row].split(), f"storage.shard={now}")
        load(job, folder / f"{row} {before}")
        found[f"{row} {before} {now}"] = {"losses": run(job, world, 2, 4), "state": state(job, world)}
    job = ranked_job("precision=bf16_fp8_block", "fp8.params=true", "opt_level=O3", "storage.shard=zero1")
    load(job, folder / "O3 zero1")
    found["other scaling"] = {k: t.clone() for k, t in stored_state_dict(job.model).items()}
    for shard in SHARDS:
        for name in SPOILED:
            job = ranked_job(*RANKED["O3"].split(), f"storage.shard={shard}")
            run(job, world, 0, 1)
            before = state(job, world)
            if world.rank == 1:
                job.model.get_parameter(name).register_post_accumulate_grad_hook(spoil)
            stepped = train_step(job, run_data(job.recipe)[0], 1, world).stepped
            found[f"{name} {shard}"] = {"stepped": stepped, "before": before, "after": state(job, world)}
    for name in SENT:
        job = ranked_job("precision=bf16", f"storage.comm={name}", "storage.shard=none")
        world.traffic.clear()
        found[name] = {"losses": run(job, world, 0, 3), "sent": world.traffic.bytes["gradients"]}
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, functools.partial(on_two, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("row", RANKED)
def test_sharded_runs_have_the_bits_of_the_unsharded_one(row: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = two
    whole = ranks[0][f"{row} none"]
    if row != "momentum":  # whose steps are small beside the differences of batches
        assert whole["losses"][-1][0] < whole["losses"][0][0]
    for shard in SHARDS:
        first, second = (found[f"{row} {shard}"] for found in ranks)
        if (row, shard) == ("momentum", "zero2"):  # whose sums, sent in FP8 from float32, are rounded once less
            assert first["losses"] == second["losses"] != whole["losses"]
            assert [loss for loss, _ in first["losses"]] == pytest.approx([loss for loss, _ in whole["losses"]], rel=1e-3)
            continue
        assert first["losses"] == second["losses"] == whole["losses"] and first["json"] == second["json"] == whole["json"]
        assert equal(first["state"], whole["state"]), "a checkpoint of the sharded run is that of the unsharded one"
        model = {k: t for k, t in whole["state"].items() if k in second["state"]}
        assert equal({k: t for k, t in second["state"].items() if k in model}, model)
        (state, grads), (other_state, other_grads) = first["kept"], second["kept"]
        share = {"none": (2, 2), "zero1": (1, 2), "zero2": (1, 1)}[shard]
        assert (state + other_state, grads + other_grads) == (share[0] * whole["kept"][0], share[1] * whole["kept"][1])
        split, other_split = (state, other_state) if shard == "zero1" else (state + grads, other_state + other_grads)
        assert abs(split - other_split) < 0.2 * split
        assert ("weights" in first["sent"]) == (shard != "none")
    stored = row in ("O2", "O3", "O2, fp16")
    sent = {shard: sum(found[f"{row} {shard}"]["sent"]["gradients"] for found in ranks) for shard in SHARDS}
    assert not stored or sent["zero2"] < 0.55 * sent["none"] == 0.55 * sent["zero1"]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "before", "now"), RESUMED)
def test_two_ranks_resume_bit_for_bit_sharded_like_before_or_not(row: str, before: str, now: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    whole, resumed = two[1][0][f"{row} none"], two[1][0][f"{row} {before} {now}"]
    assert resumed["losses"] == whole["losses"][2:] == two[1][1][f"{row} {before} {now}"]["losses"]
    assert equal(resumed["state"], whole["state"])


@pytest.mark.slow
@pytest.mark.parametrize("row", ["O2", "O3"])
def test_one_rank_goes_on_from_the_checkpoint_of_two(row: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = two
    job = ranked_job(*RANKED[row].split(), "storage.shard=zero2")
    load(job, folder / f"{row} zero2")
    tensors, _ = checkpoint.load(folder / f"{row} none" / "step-00000002")
    assert equal(state(job, World()), {k: t for group in ("model", "optimizer", "fp8") for k, t in tensors[group].items()})
    want = [loss for loss, _ in ranks[0][f"{row} none"]["losses"][2:]]
    assert [loss for loss, _ in run(job, World(), 2, 4)] == pytest.approx(want, abs=2e-3)


@pytest.mark.slow
def test_weights_in_another_scaling_are_those_of_their_owners_on_all_ranks(two: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (found["other scaling"] for found in two[1])
    assert equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", SPOILED)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(name: str, shard: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in (ranks[f"{name} {shard}"] for ranks in two[1]):
        assert not found["stepped"]
        assert all(torch.equal(bits(t), bits(found["after"][k])) for k, t in found["before"].items() if "amax_history" not in k)


@pytest.mark.slow
def test_bytes_on_the_wire_are_those_of_the_comm_column(two: tuple[Path, list[dict[str, Any]]]) -> None:
    sent = {name: two[1][0][name]["sent"] for name in SENT}
    assert sent["fp32"] == 2 * sent["bf16"] and sent["fp8"] < 0.5 * sent["fp32"]  # embeddings and norms stay in float32
    for name in SENT:
        assert [loss for loss, _ in two[1][0][name]["losses"]] == pytest.approx([loss for loss, _ in two[1][0]["fp32"]["losses"]], abs=1e-3)
