"""The Transformer Engine backend on a CPU: its genuine modules, quantizers, autocast and state, over a stand-in for its kernels."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.backends.gemm_plan import differences
from fp8cfg.backends.module_swap import replaced
from fp8cfg.backends.te import rules as te_rules
from fp8cfg.numerics import Region
from fp8cfg.numerics.stored_form import stored_state_dict
from fp8cfg.training.checkpoint import job_state
from fp8cfg.training.data import run_data
from fp8cfg.training.distributed.world import World
from fp8cfg.training.loop import train
from fp8cfg.training.train_step import evaluate, train_step
from tests.support import te_standin, te_tex
from tests.support.small import small, steps
from tests.support.te_small import converted, planned, tokens, transformer
from tests.support.te_table import node

TE = ("backend=te", "fp8={high_precision_at_start: 0, high_precision_at_end: 0, amax_history_len: 4}")
DELAYED = ("precision=bf16_fp8", *TE, "fp8.first_step=te")  # as native begins there
CURRENT = ("precision=bf16_fp8_current", TE[0], "fp8={high_precision_at_start: 0, high_precision_at_end: 0}")
BLOCK = ("precision=bf16_fp8_block", TE[0], "fp8={high_precision_at_start: 0, high_precision_at_end: 0}")
MXFP8 = ("precision=bf16_mxfp8", TE[0], "fp8={high_precision_at_start: 0, high_precision_at_end: 0}")
FP16 = (TE[0], "precision.loss_scale=1024", "fp8={high_precision_at_start: 0, high_precision_at_end: 0}", "fp8.params=true")
NVFP4 = ("precision=bf16_nvfp4", TE[0], "fp8={high_precision_at_start: 0, high_precision_at_end: 0}")
CASES = {"delayed": (*DELAYED, "fp8.params=false"), "delayed params": (*DELAYED, "fp8.params=true"),
         "block": (*BLOCK, "fp8.params=false"), "block params": (*BLOCK, "fp8.params=true"),
         "nvfp4": (*NVFP4, "fp8.params=false"), "nvfp4 params": (*NVFP4, "fp8.params=true"),
         "delayed params fp16": ("precision=fp16_fp8", *FP16, "fp8.amax_history_len=4", "fp8.first_step=te"), "block params fp16": ("precision=fp16_fp8_block", *FP16),
         "mxfp8": (*MXFP8, "fp8.params=false"), "mxfp8 params": (*MXFP8, "fp8.params=true"),
         "current O1": (*CURRENT, "opt_level=O1"), "current O2": (*CURRENT, "opt_level=O2"), "delayed O2": (*DELAYED, "opt_level=O2"),
         "current O3": (*CURRENT, "opt_level=O3"), "current": (*CURRENT, "fp8.params=false"), "current params": (*CURRENT, "fp8.params=true")}


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Transformer Engine as it would be on a GPU; the backend's gates, which test_te_keys.py tests, are open."""
    monkeypatch.setattr(te_rules, "_hardware_lacks", lambda precision, hardware: [])
    monkeypatch.setattr(te_rules, "unavailable", lambda: "")
    with te_standin.transformer_engine() as found:
        te_tex.CALLS.clear()
        yield found


def backend() -> Any:
    from fp8cfg.backends.te import backend as te

    return te


def restore(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if (plain := backend().plain(module)) is not None:
            replaced(model, name, plain)


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_a_job_trains_as_planned_and_is_observed(case: str, te: Any) -> None:
    job = fp8cfg.build(small(*CASES[case]))
    assert job.choice.backend == "te"
    losses = [s.loss for s in steps(job, 4)]
    assert losses[-1] < losses[0] - 0.05
    seen = job.prove()
    assert seen.layers_in_fp8 == 8
    ran = {call.split(" ", 1)[1] for call in te_tex.CALLS}
    kinds = {"e2m1 x e2m1"} if "nvfp4" in case else {"e4m3 x e4m3"} | ({"e5m2 x e4m3"} if job.recipe.fp8.format == "hybrid" else set())
    assert ran == kinds and len(te_tex.CALLS) == 4 * 3 * 8, "what the products' call site saw"


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_to_the_same_bits(case: str, te: Any) -> None:
    words = (*CASES[case], "trainer.micro_batch_size=4")
    whole = fp8cfg.build(small(*words))
    want = [s.loss for s in steps(whole, 4)]
    te.FP8GlobalStateManager.reset()
    first, batches = fp8cfg.build(small(*words)), run_data(whole.recipe)[0]
    assert [s.loss for s in steps(first, 2)] == want[:2]
    tensors, state = job_state.collect(first, batches, 2)
    plain = [t for group in tensors.values() for t in group.values()]
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in plain), "tensors that safetensors can hold"
    assert not any("extra_state" in name for group in tensors.values() for name in group)
    tensors = {group: {n: t.detach().clone() for n, t in found.items()} for group, found in tensors.items()}
    te.FP8GlobalStateManager.reset()
    second = fp8cfg.build(small(*words))
    assert job_state.restore(second, tensors, state, run_data(second.recipe)[0]) == 2
    assert [s.loss for s in steps(second, 2, first=2)] == want[2:]
    assert any(name.endswith("fp8_scale") for name in tensors.get("fp8", {})) == ("delayed" in case)


@pytest.mark.parametrize("case", ["current O2", "current O3"])
def test_only_stored_bytes_stay_from_step_to_step(case: str, te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = fp8cfg.build(small(*CASES[case]))
    list(steps(job, 1))
    layers = list(backend()._layers(job.model).values())
    owned = {id(p) for p in job.model.parameters()}
    kept = [t for engine in backend()._engines(job.model) for t in engine.module._parameters.values() if t is not None]
    assert len(kept) >= len(layers) and sum(t.nbytes for t in kept if id(t) not in owned) == 0
    decoded = []
    monkeypatch.setattr("fp8cfg.numerics.codecs.Codec.decode", lambda *_: decoded.append(1))
    assert not any(layer.fp8_params for layer in layers) or case == "current O3"
    assert len(backend().writers(job.model)) == (8 if case == "current O3" else 0) and not decoded, "a flag is asked of what is stored"


def test_weights_tied_to_an_embedding_stay_tied_under_a_level(te: Any) -> None:
    job = fp8cfg.build(small(*CASES["current O2"], "model.share_embeddings_and_output_weights=true", "fp8.output_layer=true"))
    found = [s.loss for s in steps(job, 4)]
    assert found[-1] < found[0] - 0.05 and job.model.output_layer._parameters["weight"] is job.model.embedding.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_under_a_level_comes_back_decoded(tied: bool, te: Any) -> None:
    job = fp8cfg.build(small(*CASES["current O2"], f"model.share_embeddings_and_output_weights={tied}", f"fp8.output_layer={tied}"))
    list(steps(job, 1))
    layer = job.model.layers[0].mlp.linear_fc1
    want, stored = layer.codec.decode(layer.in_codec), layer.parameter
    model = fp8cfg.convert_back(job.model)
    assert torch.equal(model.layers[0].mlp.linear_fc1.weight, want) and stored.dtype == torch.float16
    assert {type(m) for n, m in model.named_modules() if "linear" in n} == {nn.Linear} and {p.dtype for p in model.parameters()} == {torch.float32}
    assert (model.output_layer.weight is model.embedding.weight) == tied
    model(*(torch.zeros(1, 32, dtype=torch.int64),) * 2).backward()


NAMES = {"self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight", "self_attention.layernorm_qkv.weight": "self_attention.linear_qkv.weight",
         "self_attention.proj.weight": "self_attention.linear_proj.weight", "layernorm_mlp.layer_norm_weight": "pre_mlp_layernorm.weight",
         "layernorm_mlp.fc1_weight": "mlp.linear_fc1.weight", "layernorm_mlp.fc2_weight": "mlp.linear_fc2.weight"}
"""te.TransformerLayer's names of what our layer holds."""


class Handmade(nn.Module):
    """The model of the small recipe, written by hand with Transformer Engine's modules."""

    def __init__(self, te: Any, source: nn.Module) -> None:
        super().__init__()
        self.source = source
        self.parts = nn.ModuleList()
        for layer in source.layers:
            made = te.TransformerLayer(64, 128, 4, num_gqa_groups=2, hidden_dropout=0, attention_dropout=0, bias=False, normalization="RMSNorm", activation="swiglu",
                                       attn_input_format="bshd", fuse_qkv_params=True, params_dtype=torch.bfloat16, device="cpu")
            for mine, theirs in NAMES.items():
                made.get_parameter(mine).data.copy_(layer.get_parameter(theirs).data)
            self.parts.append(made)
        self.norm = te.RMSNorm(64, eps=1e-5, dtype=torch.bfloat16, device="cpu")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        from fp8cfg.models.rotary import rotary_tables

        h, (cos, sin) = self.source.embedding(x), rotary_tables(self.source.config, x.shape[1], x.device)
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
    masters = {n: (p if p.dtype == torch.float32 else p.detach().float().clone()) for n, p in hand.named_parameters()}
    originals = dict(fp8cfg.build(small("precision=fp32")).model.named_parameters())
    for i in range(2):
        for mine, theirs in NAMES.items():
            masters[f"parts.{i}.{mine}"] = originals[f"layers.{i}.{theirs}"].detach().clone()
    for name in ("embedding.weight", "output_layer.weight"):
        if f"source.{name}" in masters:
            masters[f"source.{name}"] = originals[name].detach().clone()
    used = {n: p for n, p in hand.named_parameters() if not n.startswith("source.layers") and n != "source.final_layernorm.weight"}
    inner = torch.optim.AdamW([masters[n] for n in used], betas=job.recipe.optim.betas, eps=job.recipe.optim.eps, weight_decay=0, fused=True)
    made = {"delayed": lambda: recipe.DelayedScaling(amax_history_len=4), "current": recipe.Float8CurrentScaling, "mxfp8": recipe.MXFP8BlockScaling, "nvfp4": recipe.NVFP4BlockScaling,
            "block": lambda: recipe.Float8BlockScaling(fp8_format=recipe.Format.HYBRID)}[case]()
    batches, want, got = run_data(job.recipe)[0], [], []
    for step in range(4):
        want.append(train_step(job, batches, step, World()).loss)
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


@pytest.mark.parametrize("params", [False, True])
def test_conversion_keeps_names_ties_and_freezing_and_goes_back(params: bool, te: Any) -> None:
    plain = transformer(tie_embeddings=True)
    plain.layers[0].mlp.linear_fc2.weight.requires_grad_(False)
    before = dict(plain.named_parameters())
    fp8 = node({"params": params, "output_layer": True, "scaling": "current"})
    backend().convert(plain, fp8, planned(fp8, plain), Region(), "scaled_mm")
    after = dict(plain.named_parameters())
    assert list(after) == list(before) and plain.output_layer.weight is plain.embedding.weight
    assert not after["layers.0.mlp.linear_fc2.weight"].requires_grad
    quantized = [n for n, p in after.items() if p is not before[n]]
    assert len(quantized) == (8 if params else 0) and len(backend().writers(plain)) == len(quantized)
    restore(plain)
    assert type(plain.layers[0].mlp).__name__ == "MLP" and type(plain.layers[1].input_layernorm).__name__ == "RMSNorm"
    assert {type(m) for n, m in plain.named_modules() if "linear" in n} == {nn.Linear}
    for name, p in plain.named_parameters():
        assert torch.allclose(p.float(), before[name], atol=2e-4 if name in quantized else 0, rtol=0.07 if name in quantized else 0), name
    assert not plain.layers[0].mlp.linear_fc2.weight.requires_grad and list(dict(plain.named_parameters())) == list(before)


def test_a_layer_whose_autocast_is_never_entered_is_found(te: Any) -> None:
    fp8 = node({"scaling": "current"})
    model = converted(fp8)
    loss = model(tokens(), tokens())
    loss.backward()
    lines = differences(planned(fp8, model), backend().observed(model))
    assert len([line for line in lines if "planned e4m3 x e4m3, ran high precision" in line]) == 8 and len(lines) == 24
    assert {c.split(" ", 1)[1] for c in te_tex.CALLS} == {"high precision x high precision"}
    with backend().autocast(model):
        model(tokens(), tokens())
    assert len(differences(planned(fp8, model), backend().observed(model))) == 16, "no backward pass, no dgrad and wgrad"
    with backend().autocast(model):
        model(tokens(), tokens()).backward()
    assert differences(planned(fp8, model), backend().observed(model)) == []
    backend().forget_observed(model)
    assert len(differences(planned(fp8, model), backend().observed(model))) == 24


def test_a_backward_pass_in_high_precision_is_what_runs(te: Any) -> None:
    fp8 = node({"scaling": "current", "override_linear_precision": {"dgrad": True, "wgrad": True}})
    model = converted(fp8)
    with backend().autocast(model):
        model(tokens(), tokens()).backward()
    assert differences(planned(fp8, model), backend().observed(model)) == []
    assert sorted({c for c in te_tex.CALLS}) == ["NN high precision x high precision", "NT high precision x high precision", "TN e4m3 x e4m3"]


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


@pytest.mark.parametrize("case", ["delayed", "delayed params"])
def test_a_jobs_weights_are_the_plain_models_and_its_optimizer_has_the_fp8_state(case: str, te: Any) -> None:
    job, plain = fp8cfg.build(small(*CASES[case])), fp8cfg.build(small("precision=bf16_mixed")).model
    list(steps(job, 2))
    weights, optimizer = ({k: t.clone() for k, t in job.model.state_dict().items()}, copy.deepcopy(job.optimizer.state_dict()))
    assert list(weights) == list(plain.state_dict()) and {(type(t), t.dtype) for t in weights.values()} == {(torch.Tensor, torch.bfloat16)}
    plain.load_state_dict(weights, strict=True)
    want = [s.loss for s in steps(job, 2, first=2)]
    te.FP8GlobalStateManager.reset()
    resumed = fp8cfg.build(small(*CASES[case]))
    resumed.model.load_state_dict(plain.state_dict(), strict=True)
    resumed.optimizer.load_state_dict(optimizer)
    assert [s.loss for s in steps(resumed, 2, first=2)] == want
    other = fp8cfg.build(small(*CASES[case]))
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict({k: v for k, v in optimizer.items() if k != "fp8"})
    with pytest.warns(RuntimeWarning, match="scales and amax histories started anew"):
        list(steps(other, 1))


@pytest.mark.parametrize("case", ["delayed params", "current params"])
def test_weights_held_in_fp8_are_natives_bit_for_bit(case: str, te: Any) -> None:
    mine, theirs = (stored_state_dict(fp8cfg.build(small(*[w for w in CASES[case] if w != "backend=te"], f"backend={b}")).model) for b in ("te", "native"))
    held = [n for n, t in theirs.items() if t.dtype == torch.float8_e4m3fn]
    assert len(held) == 8 and mine.keys() == theirs.keys()
    for name in (n for n, t in theirs.items() if n in held or "fp8_" in n):
        assert torch.equal(mine[name].reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)), name


def test_scales_move_as_native_moves_them(te: Any) -> None:
    """One microbatch a step, the same layer and inputs: histories equal native's, row for row."""
    words = [w for w in CASES["delayed"] if w != "backend=te"]
    a, b = fp8cfg.build(small(*CASES["delayed"])), fp8cfg.build(small(*words, "backend=native"))
    list(steps(a, 1))
    list(steps(b, 1))
    name = "layers.0.self_attention.linear_qkv.fp8_amax_history"
    mine, theirs = stored_state_dict(a.model)[name], stored_state_dict(b.model)[name]
    assert torch.equal(mine[:, 1], theirs[:, 1]), "the weight's amax"
    assert torch.allclose(mine[:, 0], theirs[:, 0], rtol=0.02), "the input's, whose norm is not rounded to bfloat16 in between"


def test_evaluation_leaves_no_trace(te: Any, recwarn: pytest.WarningsRecorder) -> None:
    for use in ("true", "false"):
        job = fp8cfg.build(small(*CASES["delayed params"], f"fp8.use_autocast_during_eval={use}"))
        list(steps(job, 1))
        before = {n: t.clone() for n, t in stored_state_dict(job.model).items()}
        te_tex.CALLS.clear()
        evaluate(job, [run_data(job.recipe)[0].batch(3)], World())
        assert ("e4m3 x e4m3" in te_tex.CALLS[0]) == (use == "true")
        assert all(torch.equal(t.reshape(-1).view(torch.uint8), before[n].reshape(-1).view(torch.uint8)) for n, t in stored_state_dict(job.model).items())


@pytest.mark.parametrize("case", ["delayed", "current params", "block"])
def test_recomputed_activations_change_nothing(case: str, te: Any) -> None:
    found = []
    for how in ("none", "full"):
        te.FP8GlobalStateManager.reset()
        job = fp8cfg.build(small(*CASES[case], f"model.recompute_granularity={how}"))
        found.append([s.loss for s in steps(job, 3)])
        job.prove()
    assert found[0] == found[1]


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_a_copy_of_a_model_is_a_model_of_its_own(scaling: str, te: Any) -> None:
    import copy

    model = converted(node({"scaling": scaling, "params": True}))
    other = copy.deepcopy(model)
    with backend().autocast(model):
        want = model(tokens(), tokens())
        want.backward()
    with backend().autocast(other):
        got = other(tokens(), tokens())
        got.backward()
    assert got == want and all(torch.equal(g, grads(other)[n]) for n, g in grads(model).items())
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    with torch.no_grad():
        other.layers[0].mlp.linear_fc1.set_weight(torch.zeros(256, 64))
    with backend().autocast(model):
        assert model(tokens(), tokens()) == want or scaling == "delayed", "scales have moved"


def test_weights_are_quantized_once_for_a_step(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count = {"quantized": 0}
    base = sys.modules["transformer_engine.pytorch.module.base"]
    for name in ("linear", "layernorm_linear", "layernorm_mlp"):
        module = sys.modules[f"transformer_engine.pytorch.module.{name}"]

        def counted(*, update_workspace: bool = True, **given: Any) -> Any:
            count["quantized"] += update_workspace
            return base.quantize_weight(update_workspace=update_workspace, **given)

        monkeypatch.setattr(module, "quantize_weight", counted)
    found = []
    for on in (False, True):
        model = converted(node({"scaling": "current"}))
        backend().cache_weights(model, on)
        for step in range(2):
            for microbatch in range(3):
                with backend().autocast(model):
                    model(tokens(microbatch), tokens(microbatch)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
            backend().after_step(model, None, step + 1)
        found.append(({n: p.clone() for n, p in model.named_parameters()}, count.pop("quantized")))
        count["quantized"] = 0
    (plain, every), (cached, once) = found
    assert (every, once) == (8 * 6, 8 * 2)
    assert all(torch.equal(plain[n], cached[n]) for n in plain)


@pytest.mark.parametrize(("accumulated", "want"), [(1, [None]), (4, [True, False, False, False])])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_run_quantizes_weights_in_the_first_microbatch_of_a_step(accumulated: int, want: list[bool | None], recompute: str, te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[bool | None]] = {"LayerNormLinear": [], "Linear": [], "LayerNormMLP": []}
    for name in seen:
        plain = getattr(te, name).forward

        def watched(self: Any, x: Any, plain: Any = plain, **options: Any) -> Any:
            if torch.is_grad_enabled():  # not an evaluation
                seen[type(self).__name__].append(options["is_first_microbatch"])
            return plain(self, x, **options)

        monkeypatch.setattr(getattr(te, name), "forward", watched)
    words = (*CASES["current"], f"trainer.micro_batch_size={8 // accumulated}", "trainer.global_batch_size=8", "trainer.max_steps=2",
             f"model.recompute_granularity={recompute}")
    train(fp8cfg.build(small(*words)))
    again = [w if w is None else False for w in want]
    passes = [x for w, a in zip(want, again, strict=True) for x in ([w] * 2 + [a] * 2 * (recompute == "full"))]  # two layers
    assert seen == dict.fromkeys(seen, passes * 2)


def test_a_pass_in_high_precision_keeps_no_weight_of_the_step_before(te: Any) -> None:
    model, found = converted(node({"scaling": "current"})), []
    for keep in (True, False):
        backend().cache_weights(model, keep)
        for enabled in (True, False, True):  # weights move after the first
            with backend().autocast(model, enabled):
                loss = model(tokens(), tokens())
                loss.backward()
            if keep and not found:
                with torch.no_grad():
                    [p.mul_(1.5) for p in model.parameters()]
                backend().after_step(model, None, 1)
            found.append(loss.item())
    assert found[2] == found[3] != found[0]


def test_weights_kept_over_microbatches_change_no_loss(te: Any) -> None:
    found = []
    for keep in (False, True):
        job = fp8cfg.build(small(*CASES["current"], "trainer.micro_batch_size=2", "model.recompute_granularity=full"))
        backend().cache_weights(job.model, keep)
        found.append([s.loss for s in steps(job, 3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("entry", ["quantized_model_init", "fp8_model_init"])
def test_weights_are_quantized_by_the_entry_point_that_is_there(entry: str, te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    genuine, signature = te.quantized_model_init, inspect.signature(getattr(te, entry))

    def recorded(**arguments: Any) -> Any:
        given.append(signature.bind(**arguments).arguments)
        return genuine(**arguments)

    monkeypatch.delattr(te, "quantized_model_init")
    monkeypatch.delattr(te, "__getattr__")  # mocks whatever a package of the stand-in lacks
    monkeypatch.setattr(te, entry, recorded, raising=False)
    model = converted(node({"scaling": "current", "params": True}))
    assert {type(layer.weight).__name__ for layer in backend()._layers(model).values()} == {"Float8Tensor"}
    assert {(g["enabled"], type(g["recipe"]).__name__) for g in given} == {(True, "Float8CurrentScaling")}


@pytest.mark.parametrize("entry", ["autocast", "fp8_autocast"])
@pytest.mark.parametrize("reduce_amax", [True, False])
def test_the_entry_point_that_is_there_gets_recipe_and_group(entry: str, reduce_amax: bool, te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8cfg.backends.te import engine as te_engine

    given: list[dict[str, Any]] = []
    genuine, signature = te.autocast, inspect.signature(getattr(te, entry))

    def recorded(**arguments: Any) -> Any:
        given.append(signature.bind(**arguments).arguments)
        return genuine(enabled=arguments["enabled"], recipe=arguments.get("recipe", arguments.get("fp8_recipe")))

    model = converted(node({"reduce_amax": reduce_amax}))
    monkeypatch.delattr(te, "autocast")
    monkeypatch.setattr(te, entry, recorded, raising=False)
    if entry == "fp8_autocast":
        monkeypatch.delattr(te, "__getattr__")  # mocks whatever a package of the stand-in lacks
    monkeypatch.setattr(te_engine.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(type(te_engine.dist.group), "WORLD", property(lambda self: "world"))
    with backend().autocast(model):
        pass
    group = "amax_reduction_group" if entry == "autocast" else "fp8_group"
    assert given[0][group] == ("world" if reduce_amax else None) and given[0]["enabled"]


def test_norms_are_transformer_engines_where_it_has_them(te: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(32), nn.RMSNorm(32, eps=1e-6), nn.LayerNorm(32, bias=False), nn.RMSNorm(32),
                                        nn.LayerNorm(32, elementwise_affine=False)])
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm in self.norms:
                x = norm(x)
            y: torch.Tensor = self.linear(x)
            return y

    from fp8cfg.backends.gemm_plan import PlannedLinear

    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, 32)
    want = model(x)
    want.pow(2).sum().backward()
    gradients = grads(model)
    model.zero_grad()
    names = list(stored_state_dict(model))
    kinds = ("e4m3", "e4m3")
    backend().convert(model, node({"scaling": "current"}), [PlannedLinear("linear", 32, 32, (kinds, kinds, kinds))], Region(), "scaled_mm")
    assert [type(n).__name__ for n in model.norms] == ["TENorm", "TENorm", "LayerNorm", "RMSNorm", "LayerNorm"]
    assert list(stored_state_dict(model)) == names
    got = model(x)  # outside of the autocast: high precision
    got.pow(2).sum().backward()
    assert torch.allclose(got, want, atol=1e-5) and all(torch.allclose(g, grads(model)[n], atol=1e-3) for n, g in gradients.items())
    with backend().autocast(model):
        assert 0 < (model(x) - want).abs().max() < 0.5
    restore(model)
    assert torch.equal(model(x), want)


class Odd(nn.Module):
    """Somebody's model: a gate that does not fit, biases, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.q, self.out = nn.LayerNorm(64), nn.Linear(64, 10), nn.Linear(64, 64), nn.Linear(64, 64)
        self.q.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(torch.relu(self.q(self.norm(x)))) + self.gate(x).sum(-1, keepdim=True)
        return y


@pytest.mark.parametrize("words", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_anyones_model_is_converted_proved_and_given_back(words: tuple[str, ...], te: Any) -> None:
    from fp8cfg.conversion.convert import convert_back, convert_model

    model, called = Odd(), []
    model.q.register_forward_hook(lambda module, args, out: called.append(type(module).__name__))
    x, parameters = torch.randn(16, 64, requires_grad=True), list(model.parameters())
    want = model(x)
    conversion = convert_model(model, fp8cfg.compose(["recipe=llama_tiny", *words, "fp8.params=false"]))
    assert [p.reason for p in conversion.plan] == ["out_features=10 is not a multiple of 16", "", ""]
    with conversion.autocast():
        got = model(x)
        got.sum().backward()
    assert 0 < (got - want).abs().max() < 0.5 and model.q.weight.grad is None and model.out.bias.grad is not None
    conversion.prove()
    conversion.step()
    assert called == ["Linear", "TELinear"]
    back = convert_back(model)
    assert torch.equal(back(x), want) and all(p is q for p, q in zip(parameters, back.parameters(), strict=True))


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_attention_is_asked_for_as_the_recipe_says(scaling: str, te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = node({"scaling": scaling, "dot_product_attention": True, "high_precision_at_start": 1, "amax_history_len": 8 if scaling == "delayed" else 1024,
                  "margin": 2 if scaling == "delayed" else 0})
    model = converted(given)
    first, second = (layer.self_attention.core_attention for layer in model.layers)
    assert type(first).__name__ == "CoreAttention" and type(second).__name__ == "TEAttention"
    module = second._beside[1]
    assert (module.qkv_format, module.attn_mask_type, module.attention_dropout if hasattr(module, "attention_dropout") else 0.0) == ("bshd", "causal", 0.0)
    dpa = module.fp8_meta["recipe"]
    assert dpa.fp8_dpa and dpa.delayed(), "S and dP are scaled by the past under current scaling too"
    assert (dpa.margin, dpa.amax_history_len) == ((2, 8) if scaling == "delayed" else (0, 1))
    state = stored_state_dict(model)
    name = "layers.1.self_attention.core_attention."
    columns = 15 if scaling == "delayed" else 5
    assert state[name + "fp8_scale"].shape == (columns,) and state[name + "fp8_amax_history"].shape == (dpa.amax_history_len, columns)
    state = {n: t.clone() for n, t in state.items()}
    state[name + "fp8_scale"] = torch.arange(1.0, columns + 1)
    model.load_state_dict(state)
    assert torch.equal(stored_state_dict(model)[name + "fp8_scale"], torch.arange(1.0, columns + 1))

    def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # cuDNN's, in high precision
        module.fp8 = te.FP8GlobalStateManager.is_fp8_enabled()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)

    monkeypatch.setattr(module, "forward", products)
    plain = transformer().to(torch.bfloat16)
    assert torch.allclose(model(tokens(), tokens()), plain(tokens(), tokens()), atol=1e-2)
    seen = backend().observed(model)[name[:-1]]
    assert set(seen.values()) == {None}, "no autocast, no FP8"
    with backend().autocast(model):
        model(tokens(), tokens()).backward()
    seen = backend().observed(model)[name[:-1]]
    assert [seen[g] for g in ("p", "o", "ds", "dq")] == [("e4m3", "e4m3")] * 2 + [("e5m2", "e4m3")] * 2
    restore(model)
    assert type(model.layers[1].self_attention.core_attention).__name__ == "CoreAttention"
