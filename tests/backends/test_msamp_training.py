"""backend=msamp at work: conversion and training over a stand-in of MS-AMP's public API, and traps of MS-AMP's. The real
package, with its kernels on a GPU, has never run here."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.backends.choice import Choice
from fp8cfg.backends.protocol import BackendError
from fp8cfg.models.weight_init import init_std
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.training.trained_model import RunWeights
from tests.support import msamp_standin
from tests.support.msamp_standin import WORDS
from tests.support.small import small, steps


def job(*words: str) -> fp8cfg.Job:
    return fp8cfg.build(small(*WORDS, *words))


def test_a_job_trains_and_proves_it(anywhere: None) -> None:
    made = job("fp8.output_layer=true")
    seen = [step.loss for step in steps(made, 6)]
    assert seen[-1] < seen[0] - 0.5 and all(map(math.isfinite, seen))
    assert made.prove().share > 0.8 and made.choice == Choice(
        "msamp", "scaled_mm", "asked for; MS-AMP's products on the GPU"
    )
    layer = made.model.get_submodule("layers.0.mlp.linear_fc1")
    assert layer.gemm_kinds == {
        "fprop": ("e4m3", "e4m3"),
        "dgrad": ("e5m2", "e4m3"),
        "wgrad": ("e5m2", "e4m3"),
    }
    assert {p.dtype for p in made.model.parameters() if isinstance(p, torch.Tensor)} == {
        torch.float32
    }  # the others are MS-AMP's


@torch.no_grad()
def drawn_by_one_generator(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        p.fill_(1.0) if p.dim() == 1 else p.copy_(
            torch.empty(p.shape).normal_(0.0, init_std(model.config, name), generator=generator)
        )


@pytest.mark.parametrize(
    ("words", "losses"),
    [
        ((), [5.598284, 5.459199, 5.282907, 5.068811]),
        (("opt_level=O1",), [5.598284, 5.459199, 5.283199, 5.068778]),
        (("trainer.micro_batch_size=4",), [5.598284, 5.459215, 5.283157, 5.068799]),
        (
            ("fp8.output_layer=true", "fp8.high_precision_at_start=1"),
            [5.597814, 5.458796, 5.282085, 5.069376],
        ),
    ],
)
def test_losses_are_those_of_ms_amps_own_python(
    anywhere: None, words: tuple[str, ...], losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which MS-AMP 0.4, with weights drawn by one generator, gave through this backend on a CPU, with its kernels emulated; here it is the stand-in. With AMX, where bf16
    products are summed in another order, the fourth was 5.4e-5 off; with AVX2 and AVX-512 on the same CPU it was not."""
    from fp8cfg.models.transformer import Transformer

    monkeypatch.setattr(Transformer, "init_weights", drawn_by_one_generator)
    monkeypatch.setattr(
        "fp8cfg.data.corpus._find_cut", lambda _, length, held_out, __: length - held_out
    )  # which was not at a document's beginning
    found = [step.loss for step in steps(job(*words), 4)]
    assert found[:3] == pytest.approx(losses[:3], rel=2e-5) and found[3] == pytest.approx(
        losses[3], rel=1e-4
    )


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_native_row_follows_it(anywhere: None, level: str) -> None:
    """One weight for a few steps on the same gradients: the update and the storage are those of the native row."""
    from fp8cfg.optim.low_bit.adam import LowBitAdamW
    from fp8cfg.optim.low_bit.columns import named_columns

    made = job(f"opt_level={level}", "trainer.gradient_clip_val=0")
    name = "layers.0.mlp.linear_fc1.weight"
    theirs: Any = dict(made.model.named_parameters())[name]
    moments = {} if level == "O1" else {"exp_avg": "fp8_pow2", "exp_avg_sq": "fp16_scaled"}
    mine = nn.Parameter(theirs.float())
    o = made.recipe.optim
    native = LowBitAdamW(
        [(name, mine)],
        columns=named_columns("fp16_scaled", "none", "fp8_pow2", **moments),
        lr=o.lr,
        betas=o.betas,
        eps=o.eps,
        weight_decay=o.weight_decay,
    )
    for _ in steps(made, 4):
        grad = theirs.grad
        native.param_groups[0]["lr"] = made.optimizer.param_groups[0]["lr"]
        native.stored_grads[mine] = (
            grad.value.view(torch.float8_e4m3fn),
            grad.meta.scale_inv.clone(),
        )
        native.step()
        native.zero_grad()
        weight = native.state[mine]["weight"]
        assert torch.equal(weight[0], theirs.value) and torch.equal(
            weight[1], theirs.meta.scale_inv
        )
    state = made.optimizer.state_tensors()
    for moment in ("exp_avg", "exp_avg_sq"):
        for kept, suffix in zip(native.state[mine][moment], ("", ".scale_inv"), strict=False):
            other = state[f"{name}.{moment}{suffix}"]
            assert kept.dtype == other.dtype and torch.equal(kept.float(), other.float())


@pytest.mark.parametrize("words", [(), ("opt_level=O1",), ("precision=fp16_fp8",)])
def test_resume_is_bit_for_bit(anywhere: None, words: tuple[str, ...]) -> None:
    words = (*words, *(WORDS[1:] if words[:1] == ("precision=fp16_fp8",) else ()))
    first = job(*words)
    before = [s.loss for s in steps(first, 3)]
    model = {k: v.clone() for k, v in stored_state_dict(first.model).items()}
    tensors, json = (
        {k: v.clone() for k, v in first.optimizer.state_tensors().items()},
        first.optimizer.state_json(),
    )
    assert (
        all(isinstance(v, torch.Tensor) for v in model.values())
        and "layers.0.mlp.linear_fc1.fp8_input_amax" in model
    )
    after = [s.loss for s in steps(first, 3, first=3)]
    second = job(*words)
    assert [s.loss for s in steps(second, 1)] == before[:1]
    second.model.load_state_dict(model)
    second.optimizer.load_state(tensors, json)
    assert [s.loss for s in steps(second, 3, first=3)] == after
    with pytest.raises(ValueError, match="the saved state is of Other"):
        second.optimizer.load_state(tensors, {**json, "optimizer": "Other"})
    with pytest.raises(RuntimeError, match="Missing key"):
        second.model.load_state_dict({k: v for k, v in model.items() if "fp8_input_amax" not in k})


def test_its_weights_are_the_plain_models_and_its_optimizer_has_the_fp8_state(
    anywhere: None,
) -> None:
    first = job()
    list(steps(first, 2))
    weights, optimizer = (
        {k: v.clone() for k, v in first.model.state_dict().items()},
        copy.deepcopy(first.optimizer.state_dict()),
    )
    plain = fp8cfg.build(small("precision=bf16_mixed")).model
    assert (
        list(weights) == list(plain.state_dict())
        and weights["layers.0.mlp.linear_fc1.weight"].dtype == torch.bfloat16
    )
    plain.load_state_dict(weights, strict=True)
    after = [s.loss for s in steps(first, 2, first=2)]
    second = job()
    second.model.load_state_dict(weights, strict=True)
    assert torch.equal(
        second.model.state_dict()["layers.0.mlp.linear_fc1.weight"],
        weights["layers.0.mlp.linear_fc1.weight"],
    )
    second.optimizer.load_state_dict(optimizer)
    assert [s.loss for s in steps(second, 2, first=2)] == after


def test_layers_in_high_precision_and_evaluation(anywhere: None) -> None:
    made = job("fp8.high_precision_at_start=1")
    list(steps(made, 2))
    first, second = (made.model.get_submodule(f"layers.{n}.mlp.linear_fc1") for n in (0, 1))
    assert (
        type(second).__name__ == "MSAMPLinear"
        and first.weight.dtype == torch.float32
        and first.weight.grad is not None
    )
    tokens = torch.zeros(2, 32, dtype=torch.long)
    amax = second.scaling_metas["input"].amax.clone()
    with torch.no_grad():
        outside = made.model(tokens, tokens)
        with made.autocast():
            inside = made.model(tokens, tokens)
    assert (
        inside != outside
        and torch.allclose(inside, outside, rtol=0.05)
        and torch.equal(amax, second.scaling_metas["input"].amax)
    )
    with pytest.raises(RuntimeError, match="layers train inside of the autocast context"):
        made.model(tokens, tokens)


def test_a_step_with_gradients_that_are_not_finite_is_skipped(anywhere: None) -> None:
    made = job(
        "precision=fp16_fp8",
        *WORDS[1:],
        "precision.initial_loss_scale=1024",
        "precision.hysteresis=1",
    )
    list(steps(made, 1))
    before = {k: v.clone() for k, v in stored_state_dict(made.model).items()}
    weight: Any = made.model.get_submodule("layers.0.mlp.linear_fc1").weight
    for p in made.optimizer.names:  # type: ignore[union-attr]
        p.grad = None
    weight.grad = msamp_standin.cast(
        torch.full(weight.shape, math.inf), msamp_standin.Dtypes.kfloat8_e4m3
    )
    assert (
        weight.grad.float().isfinite().all() and not made.optimizer.step()
    )  # the bytes show nothing
    assert (
        all(torch.equal(v, before[k]) for k, v in stored_state_dict(made.model).items())
        and made.loss_scaler
        and made.loss_scaler.scale == 512
    )


def test_clipping(anywhere: None) -> None:
    made = job("trainer.gradient_clip_val=0.01")
    list(steps(made, 1))
    clipped = math.sqrt(
        sum(
            float(p.grad.to(torch.float32).norm()) ** 2
            for p in made.optimizer.names
            if p.grad is not None
        )
    )
    assert made.optimizer.grad_norm > 0.05 and clipped == pytest.approx(0.01, rel=1e-3)


# Traps of MS-AMP's.


def test_trap_frozen_weights_stay_frozen(anywhere: None) -> None:
    from fp8cfg.models.transformer import Transformer
    from fp8cfg.planning.layer_plan import transformer_config

    recipe = small(*WORDS)
    model = Transformer(transformer_config(recipe))
    model.init_weights(0)
    model.get_submodule("layers.0.mlp.linear_fc1").weight.requires_grad = False
    made = fp8cfg.build(recipe, model=model)
    frozen: Any = made.model.get_submodule("layers.0.mlp.linear_fc1").weight
    before = frozen.value.clone()
    list(steps(made, 2))
    assert (
        frozen.requires_grad is False and torch.equal(frozen.value, before) and frozen.grad is None
    )
    assert "layers.0.mlp.linear_fc1.weight" not in set(made.optimizer.names.values())


def test_trap_tied_weights(anywhere: None) -> None:
    words = ("model.share_embeddings_and_output_weights=true",)
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"MS-AMP would untie the weight of output_layer, which another module has too; set fp8\.exclude=\[output_layer\]",
    ):
        job(*words, "fp8.output_layer=true")
    made = job(*words)
    list(steps(made, 1))
    assert (
        made.model.get_submodule("output_layer").weight
        is made.model.get_submodule("embedding").weight
    )


def test_trap_plain_parameters_in_half_precision_are_refused(anywhere: None) -> None:
    made = job()
    made.model.get_submodule("embedding").weight.data = made.model.get_submodule(
        "embedding"
    ).weight.data.bfloat16()
    from fp8cfg.backends.msamp import backend

    with pytest.raises(
        BackendError, match=r"embedding\.weight is torch\.bfloat16: MS-AMP never updates it"
    ):
        backend.optimizer(made.prepared, made.recipe.precision, made.recipe.optim, 1.0, None)


@pytest.mark.parametrize(("name", "decoupled"), [("adamw", "LBAdamW"), ("adam", "LBAdam")])
def test_trap_the_optimizer_is_the_one_that_was_asked_for(
    anywhere: None, name: str, decoupled: str
) -> None:
    """msamp.initialize takes AdamW for Adam since torch 2.7, where it is a subclass."""
    assert issubclass(torch.optim.AdamW, torch.optim.Adam)
    made = job(f"optim.name={name}", f"optim.weight_decay={0.1 if name == 'adamw' else 0}")
    assert type(made.optimizer.inner).__name__ == decoupled  # type: ignore[union-attr]
    assert {len(g["params"]) > 0 and g["weight_decay"] for g in made.optimizer.param_groups} == (
        {0.1, 0.0} if name == "adamw" else {0}
    )


def test_trap_a_gpu_that_ms_amp_does_not_know(
    anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(msamp_standin.Device, "supported", False)
    with pytest.raises(fp8cfg.ConfigError, match="only on GPUs with H100 in their name"):
        job()


def test_coverage_sees_products_that_are_not_fp8(
    anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job()
    monkeypatch.setattr(msamp_standin.Device, "supported", False)
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8 before this step"):
        list(steps(made, 1))
    with pytest.raises(fp8cfg.NotFP8Error, match="planned e4m3 x e4m3, ran high precision"):
        made.prove()


def test_converting_alone_is_refused(anywhere: None) -> None:
    with pytest.raises(fp8cfg.ConfigError, match=r"use fp8cfg.build\(recipe, model=model\)"):
        fp8cfg.convert_model(nn.Sequential(nn.Linear(32, 32)), small(*WORDS, "fp8.params=false"))


def test_back_to_linear_layers(anywhere: None) -> None:
    made = job()
    weight = made.model.get_submodule("layers.0.mlp.linear_fc1").weight.float()
    back = fp8cfg.convert_back(made.model)
    layer = back.get_submodule("layers.0.mlp.linear_fc1")
    assert type(layer) is nn.Linear and torch.equal(layer.weight.float(), weight)


def test_weights_of_a_run_are_read_without_its_library(anywhere: None, tmp_path: Path) -> None:
    job = fp8cfg.build(
        small(*WORDS, "trainer.max_steps=1", "trainer.val_check_interval=0", "optim.warmup_steps=0")
    )
    fp8cfg.fit(job, folder=tmp_path / "run")
    weight, scale = RunWeights(tmp_path / "run", print).read("layers.0.mlp.linear_fc1.weight")
    assert torch.equal(weight, job.model.layers[0].mlp.linear_fc1.weight.float()) and scale is None
