"""The Transformer Engine backend on a CPU: its genuine modules, quantizers, autocast and state, over a stand-in for its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.backends.gemm_plan import plan_differences
from fp8cfg.checkpoint import job_state
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.parallel.process_group import World
from fp8cfg.training import loop, runs
from fp8cfg.training.data import run_data
from fp8cfg.training.evaluation import evaluate
from fp8cfg.training.step import train_step
from tests.support import te_tex, whole_checkpoints
from tests.support.small import small, steps
from tests.support.te_cases import CASES, backend
from tests.support.te_small import converted, planned, tokens
from tests.support.te_table import node


@pytest.mark.parametrize("case", CASES)
def test_a_job_trains_as_planned_and_is_observed(case: str, te: Any) -> None:
    job = fp8cfg.build(small(*CASES[case]))
    assert job.choice.backend == "te"
    losses = [s.loss for s in steps(job, 4)]
    assert losses[-1] < losses[0] - 0.05
    seen = job.prove()
    assert seen.layers_in_fp8 == 8
    ran = {call.split(" ", 1)[1] for call in te_tex.CALLS}
    kinds = (
        {"e2m1 x e2m1"}
        if "nvfp4" in case
        else {"e4m3 x e4m3"} | ({"e5m2 x e4m3"} if job.recipe.fp8.format == "hybrid" else set())
    )
    assert ran == kinds and len(te_tex.CALLS) == 4 * 3 * 8, "what the products' call site saw"


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_to_the_same_bits(case: str, te: Any) -> None:
    words = (*CASES[case], "trainer.micro_batch_size=4")
    whole = fp8cfg.build(small(*words))
    want = [s.loss for s in steps(whole, 4)]
    te.FP8GlobalStateManager.reset()
    first, batches = fp8cfg.build(small(*words)), run_data(whole.recipe)[0]
    assert [s.loss for s in steps(first, 2)] == want[:2]
    tensors, state = whole_checkpoints.collect(first, batches, 2)
    plain = [t for group in tensors.values() for t in group.values()]
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in plain), (
        "tensors that safetensors can hold"
    )
    assert not any("extra_state" in name for group in tensors.values() for name in group)
    tensors = {
        group: {n: t.detach().clone() for n, t in found.items()} for group, found in tensors.items()
    }
    te.FP8GlobalStateManager.reset()
    second = fp8cfg.build(small(*words))
    assert job_state.restore(second, tensors, state, run_data(second.recipe)[0]) == 2
    assert [s.loss for s in steps(second, 2, first=2)] == want[2:]
    assert any(name.endswith("fp8_scale") for name in tensors.get("fp8", {})) == ("delayed" in case)


@pytest.mark.parametrize(
    "case",
    ["delayed params", "current O2", "block params fp16", "delayed params fp16", "delayed fp16"],
)
def test_steps_launched_ahead_are_those_taken_one_at_a_time(
    case: str, te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a loss scale steps are finished at once; there skipped steps, in which TE moves scales too, change no weight."""
    words, found = (
        CASES[case]
        if case in CASES
        else [w.replace("params=true", "params=false") for w in CASES["delayed params fp16"]],
        [],
    )
    for ahead in (True, False):
        te.FP8GlobalStateManager.reset()
        monkeypatch.setattr(
            loop,
            "can_run_ahead",
            lambda job, ahead=ahead: job.optimizer.can_defer and ahead and job.loss_scaler is None,
        )
        job, seen = (
            fp8cfg.build(
                small(*words, "trainer.val_check_interval=0", "checkpoint.every_n_steps=0")
            ),
            [0],
        )
        assert job.optimizer.can_defer

        def hook(gradient: torch.Tensor, seen: list[int] = seen) -> torch.Tensor:
            seen[0] += 1
            return gradient * torch.inf if seen[0] in (3, 4) and "fp16" in case else gradient

        job.model.final_layernorm.weight.register_hook(hook)
        result = runs.train_job(job, say=lambda _: None)
        state = stored_state_dict(job.model) | job.optimizer.state_tensors()
        found.append((result.loss, job.optimizer.steps, job.optimizer.grad_norm, state))
    assert found[0][:3] == found[1][:3] and found[0][1] == (4 if "fp16" in case else 6)
    assert all(
        torch.equal(t.float(), found[1][3][k].float())
        for k, t in found[0][3].items()
        if isinstance(t, torch.Tensor)
    )


NAMES = {
    "self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.layernorm_qkv.weight": "self_attention.linear_qkv.weight",
    "self_attention.proj.weight": "self_attention.linear_proj.weight",
    "layernorm_mlp.layer_norm_weight": "pre_mlp_layernorm.weight",
    "layernorm_mlp.fc1_weight": "mlp.linear_fc1.weight",
    "layernorm_mlp.fc2_weight": "mlp.linear_fc2.weight",
}
"""te.TransformerLayer's names of what our layer holds."""


class Handmade(nn.Module):
    """The model of the small recipe, written by hand with Transformer Engine's modules."""

    def __init__(self, te: Any, source: nn.Module) -> None:
        super().__init__()
        self.source = source
        self.parts = nn.ModuleList()
        for layer in source.layers:
            made = te.TransformerLayer(
                64,
                128,
                4,
                num_gqa_groups=2,
                hidden_dropout=0,
                attention_dropout=0,
                bias=False,
                normalization="RMSNorm",
                activation="swiglu",
                attn_input_format="bshd",
                fuse_qkv_params=True,
                params_dtype=torch.bfloat16,
                device="cpu",
            )
            for mine, theirs in NAMES.items():
                made.get_parameter(mine).data.copy_(layer.get_parameter(theirs).data)
            self.parts.append(made)
        self.norm = te.RMSNorm(64, eps=1e-5, dtype=torch.bfloat16, device="cpu")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        from fp8cfg.models.attention import rotary_tables

        h, (cos, sin) = (
            self.source.embedding(x),
            rotary_tables(self.source.config, torch.arange(x.shape[1])),
        )
        angles = torch.atan2(sin, cos)
        for layer in self.parts:
            h = layer(h, rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None])
        logits = self.source.output_layer(self.norm(h))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


@pytest.mark.parametrize("case", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_losses_are_those_of_a_hand_written_loop(case: str, te: Any) -> None:
    from transformer_engine.common import recipe

    job = fp8cfg.build(small(*CASES[case], "trainer.gradient_clip_val=0", "optim.weight_decay=0"))
    plain = fp8cfg.build(small("precision=bf16"))
    hand = Handmade(te, plain.model)
    masters = {
        n: (p if p.dtype == torch.float32 else p.detach().float().clone())
        for n, p in hand.named_parameters()
    }
    originals = dict(fp8cfg.build(small("precision=fp32")).model.named_parameters())
    for i in range(2):
        for mine, theirs in NAMES.items():
            masters[f"parts.{i}.{mine}"] = originals[f"layers.{i}.{theirs}"].detach().clone()
    for name in ("embedding.weight", "output_layer.weight"):
        if f"source.{name}" in masters:
            masters[f"source.{name}"] = originals[name].detach().clone()
    used = {
        n: p
        for n, p in hand.named_parameters()
        if not n.startswith("source.layers") and n != "source.final_layernorm.weight"
    }
    inner = torch.optim.AdamW(
        [masters[n] for n in used],
        betas=job.recipe.optim.betas,
        eps=job.recipe.optim.eps,
        weight_decay=0,
        fused=True,
    )
    made = {
        "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
        "current": recipe.Float8CurrentScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "nvfp4": recipe.NVFP4BlockScaling,
        "block": lambda: recipe.Float8BlockScaling(fp8_format=recipe.Format.HYBRID),
    }[case]()
    batches, want, got = run_data(job.recipe)[0], [], []
    for step in range(4):
        want.append(train_step(job, batches, step, World()).wait().loss)
    te.FP8GlobalStateManager.reset()
    for step in range(4):
        x, y = batches.batch(step, 0, 1, 0, 1)
        with te.autocast(enabled=True, recipe=made):
            loss = hand(x, y)
        loss.backward()
        got.append(loss.item())
        for n, p in used.items():
            masters[n].grad = p.grad.float()
            p.grad = None
        for group in inner.param_groups:
            group["lr"] = job.schedule.lr_at(step)
        inner.step()
        with torch.no_grad():
            for n, p in used.items():
                p.copy_(masters[n])
    assert got == want


def test_a_backward_pass_in_high_precision_is_what_runs(te: Any) -> None:
    fp8 = node({"scaling": "current", "override_linear_precision": {"dgrad": True, "wgrad": True}})
    model = converted(fp8)
    with backend().autocast(model):
        model(tokens(), tokens()).backward()
    assert plan_differences(planned(fp8, model), backend().observed(model)) == []
    assert sorted({c for c in te_tex.CALLS}) == [
        "NN high precision x high precision",
        "NT high precision x high precision",
        "TN e4m3 x e4m3",
    ]


def test_state_goes_between_native_and_te(te: Any) -> None:
    words = [w for w in CASES["delayed"] if w != "backend=te"]
    native = fp8cfg.build(small(*words, "backend=native"))
    list(steps(native, 2))
    mine = fp8cfg.build(small(*CASES["delayed"]))
    mine.model.load_state_dict(stored_state_dict(native.model))
    for name, tensor in stored_state_dict(mine.model).items():
        assert torch.equal(tensor, stored_state_dict(native.model)[name]), name
    fresh = {n: t for n, t in stored_state_dict(native.model).items() if "fp8_" not in n}
    mine.model.load_state_dict(fresh, strict=True)
    scales = [t for n, t in stored_state_dict(mine.model).items() if n.endswith("fp8_scale")]
    assert scales and all((t == 1).all() for t in scales), "new weights, no memory of the old ones"


def test_scales_move_as_native_moves_them(te: Any) -> None:
    """One microbatch a step, the same layer and inputs: histories equal native's, row for row."""
    words = [w for w in CASES["delayed"] if w != "backend=te"]
    a, b = fp8cfg.build(small(*CASES["delayed"])), fp8cfg.build(small(*words, "backend=native"))
    list(steps(a, 1))
    list(steps(b, 1))
    name = "layers.0.self_attention.linear_qkv.fp8_amax_history"
    mine, theirs = stored_state_dict(a.model)[name], stored_state_dict(b.model)[name]
    assert torch.equal(mine[:, 1], theirs[:, 1]), "the weight's amax"
    assert torch.allclose(mine[:, 0], theirs[:, 0], rtol=0.02), (
        "the input's, whose norm is not rounded to bfloat16 in between"
    )


def test_evaluation_leaves_no_trace(te: Any, recwarn: pytest.WarningsRecorder) -> None:
    for use in ("true", "false"):
        job = fp8cfg.build(small(*CASES["delayed params"], f"fp8.use_autocast_during_eval={use}"))
        list(steps(job, 1))
        before = {n: t.clone() for n, t in stored_state_dict(job.model).items()}
        te_tex.CALLS.clear()
        evaluate(job, [run_data(job.recipe)[0].batch(3)], World())
        assert ("e4m3 x e4m3" in te_tex.CALLS[0]) == (use == "true")
        assert all(
            torch.equal(t.reshape(-1).view(torch.uint8), before[n].reshape(-1).view(torch.uint8))
            for n, t in stored_state_dict(job.model).items()
        )


@pytest.mark.parametrize("case", ["delayed", "current params", "block"])
def test_recomputed_activations_change_nothing(case: str, te: Any) -> None:
    found = []
    for how, repeats in (("none", True), ("full", True), ("selective", False), ("selective", True)):
        te.FP8GlobalStateManager.reset()
        job = fp8cfg.build(small(*CASES[case], f"model.recompute_granularity={how}"))
        for module in job.model.modules():
            if how == "selective" and hasattr(module, "selective"):
                module.selective = repeats
        found.append([s.loss for s in steps(job, 3)])
        job.prove()
        fused = [m.obstacle for m in job.model.modules() if hasattr(m, "obstacle")]
        assert fused and all(
            ("selective" in obstacle) == (how == "selective") for obstacle in fused
        ), "which fuses no norms"
    assert found[0] == found[1] and found[2] == found[3]
