"""The proof that a given model ran in FP8: what ran outside of the context, how much each layer multiplied, what is no linear layer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8cfg
from fp8cfg.conversion.convert import Conversion
from tests.support.convert_models import BACKENDS, recipe
from tests.support.traced import TRACE

OUTSIDE = (r"layers\.1 \(fprop, dgrad, wgrad\): planned in FP8, ran in high precision, outside of the autocast context; layers\.2 .* "
           "and 6 more")


class Ten(nn.Module):
    """Ten linear layers, or so many, of which the first alone runs in FP8, in one of three ways."""

    def __init__(self, way: str = "", layers: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.way = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers)), way
        self.fp8: Any = None

    def rest(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.way == "disabled":
            with self.fp8.autocast(False):
                return self.rest(x)
        return x if self.way == "left out" else self.rest(x)


def ten(backend: str, way: str = "", *words: str, layers: int = 10) -> tuple[Ten, Conversion, Tensor]:
    model = Ten(way, layers)
    model.fp8 = fp8cfg.convert_model(model, recipe(*words, backend=backend))
    return model, model.fp8, torch.randn(16, 32, requires_grad=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["outside", "disabled"])
def test_a_layer_that_ran_outside_of_the_context_is_named(backend: str, way: str) -> None:
    model, fp8, x = ten(backend, way)
    with fp8.autocast():
        y = model.layers[0](x) if way == "outside" else model(x)
    (model.rest(y) if way == "outside" else y).sum().backward()
    with pytest.raises(fp8cfg.NotFP8Error, match=OUTSIDE):
        fp8.prove()
    assert str(fp8cfg.coverage(model)).count("high precision: ran outside of the autocast context") == 9
    model.way = ""
    with fp8.autocast():
        model(x).sum().backward()
    fp8.prove()


@pytest.mark.parametrize("backend", BACKENDS)
def test_autowrap_finds_it_out_too(backend: str) -> None:
    model, _, x = ten(backend, "disabled")
    fp8cfg.apply_fp8_autowrap(model, recipe(backend=backend))
    model(x).sum().backward()
    with pytest.raises(fp8cfg.NotFP8Error, match=r"layers\.1 \(fprop, dgrad, wgrad\): planned in FP8, ran in high precision"):
        model(x)


def test_autowrap_finds_it_out_under_a_wrappers_names() -> None:
    model, _, x = ten("native", "disabled")
    wrapper = nn.Sequential(model)
    fp8cfg.apply_fp8_autowrap(wrapper, recipe())
    wrapper(x).sum().backward()
    with pytest.raises(fp8cfg.NotFP8Error, match=r"0\.layers\.1 \(fprop"):
        wrapper(x)


def test_a_jobs_model_is_found_out_too() -> None:
    job = fp8cfg.build(recipe("precision.compute=fp32"), model=Ten("disabled"))
    job.model.fp8 = job
    with job.autocast():
        job.backward(job.model(torch.randn(16, 32, requires_grad=True)).sum())
    with pytest.raises(fp8cfg.NotFP8Error, match=r"layers\.1 \(fprop, dgrad, wgrad\): planned in FP8"):
        job.prove()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["no_grad", "eval", "eval and no_grad", "left out"])
def test_evaluations_and_layers_left_out_are_no_failure(backend: str, way: str) -> None:
    model, fp8, x = ten(backend)
    with fp8.autocast():
        (model.layers[0](x) if way == "left out" else model(x)).sum().backward()
    model.train("eval" not in way)
    if way != "left out":
        with torch.set_grad_enabled("no_grad" not in way):
            model(x)
    fp8.prove()
    found = fp8cfg.coverage(model).linears
    assert [bool(p.gemms[0]) for p in found] == [True] + [way != "left out"] * 9
    assert way != "left out" or found[1].gemms == (None, None, None), "did not run, which is not high precision"


def test_training_in_evaluation_mode_shows_in_its_backward_pass() -> None:
    model, fp8, x = ten("native", "disabled")
    model.eval()
    with fp8.autocast():
        model(x).sum().backward()
    with pytest.raises(fp8cfg.NotFP8Error, match=r"layers\.1 \(dgrad, wgrad\): planned in FP8, ran in high precision"):
        fp8.prove()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_it_is_found_out_and_nothing_is_compiled_anew(backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, fp8, x = ten(backend, layers=3)
    run = TRACE(model)
    for _ in range(3):
        with fp8.autocast():
            run(x).sum().backward()
    fp8.prove()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [p.rows for p in fp8cfg.coverage(model).linears] == [None] * 3, "sizes alone are known"
    with fp8.autocast():
        y = model.layers[0](x).detach().requires_grad_()
    TRACE(model.rest)(y).sum().backward()
    with pytest.raises(fp8cfg.NotFP8Error, match=r"layers\.1 \(fprop, dgrad, wgrad\)"):
        fp8.prove()
    torch._dynamo.reset()


# How much each layer multiplies.

def patches(backend: str = "native", *words: str) -> tuple[nn.ModuleList, Conversion]:
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(512, 512)])
    return model, fp8cfg.convert_model(model, recipe("fp8.exclude=['0']", *words, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_weighs_as_much_as_it_multiplied(backend: str) -> None:
    model, fp8 = patches(backend, "fp8.min_coverage=0.5")
    assert "98.5% of the linear layers' FLOPs" in str(fp8), "nothing ran yet: sizes alone are known"
    for _ in range(2):
        with fp8.autocast():
            (model[0](input=torch.randn(4, 2048, 64)).sum() + model[1](torch.randn(8, 512, requires_grad=True)).sum()).backward()
    seen = fp8cfg.coverage(model)
    assert [p.rows for p in seen.linears] == [16384, 16] and seen.share == pytest.approx(16 * 512**2 / (16 * 512**2 + 16384 * 64**2))
    with pytest.raises(fp8cfg.NotFP8Error, match=r"fp8\.min_coverage=0\.5: 5\.9% of the linear layers' FLOPs ran in FP8"):
        fp8.prove()


def test_what_is_done_again_or_evaluated_does_not_count() -> None:
    model, fp8 = patches()
    x, y = torch.randn(16, 64, requires_grad=True), torch.randn(16, 512, requires_grad=True)
    with fp8.autocast():
        for reentrant in (False, True):
            (checkpoint(model[0], x, use_reentrant=reentrant).sum() + model[1](y).sum()).backward()
        model.eval()
        with torch.no_grad():
            model[0](x)
    assert [p.rows for p in fp8cfg.coverage(model).linears] == [32, 32]


def test_a_layer_that_nobody_saw_weighs_as_the_one_that_saw_most() -> None:
    model, fp8 = patches()
    with fp8.autocast():
        model[1](torch.randn(16, 512, requires_grad=True)).sum().backward()
    assert fp8cfg.coverage(model).share == pytest.approx(512**2 / (512**2 + 64**2))


def test_converted_back_nothing_of_it_is_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv1d(64, 64, 1), nn.Linear(64, 10))
    fp8cfg.convert_model(model, recipe())
    assert model[2]._forward_pre_hooks and model[1]._forward_hooks
    fp8cfg.convert_back(model)
    assert not any(hooks for m in model for hooks in (m._forward_pre_hooks, m._forward_hooks, m._forward_pre_hooks_with_kwargs))


# What multiplies beside linear layers.

class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(48, 64), nn.Linear(64, 64)
        self.attention, self.conv = nn.MultiheadAttention(64, 4, add_zero_attn=True), nn.Conv2d(3, 64, 4, stride=4)
        self.experts, self.token = nn.Parameter(torch.randn(4, 64, 64)), nn.Parameter(torch.randn(1, 1, 64))
        self.normed, self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.LayerNorm((8, 64))
        self.rnn, self.lm_head = nn.GRU(64, 64), nn.Linear(64, 48, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.tied = nn.Module()
        self.tied.weight = self.up.weight


def test_what_is_no_linear_layer_is_listed_and_counted() -> None:
    model = Beside()
    fp8 = fp8cfg.convert_model(model, recipe("fp8.min_coverage=0.9"))
    found = {p.name: (p.weights, p.reason) for p in fp8cfg.coverage(model).beside}
    assert found == {
        "the model itself": (4 * 64 * 64, "Beside is no linear layer"), "attention": (3 * 64 * 64, "MultiheadAttention is no linear layer"),
        "conv": (3 * 64 * 16, "Conv2d is no linear layer"), "rnn": (2 * 3 * 64 * 64, "GRU is no linear layer")}
    elements = sum(n for n, _ in found.values()) + 3 * 64 * 64 + 64 * 48  # up, out_proj and normed; lm_head
    assert fp8cfg.coverage(nn.Linear(64, 64)).beside == [] and "of the FLOPs of all weights" in str(fp8)
    with fp8.autocast():
        model.up(torch.randn(16, 64, requires_grad=True)).sum().backward()
    assert fp8cfg.coverage(model).share == pytest.approx(64 * 64 / elements) and "high precision: MultiheadAttention is no" in str(fp8)
    with pytest.raises(fp8cfg.NotFP8Error, match=r"fp8\.min_coverage=0\.9: 5\.7% of the FLOPs of all weights ran in FP8"):
        fp8.prove()


def test_a_convolution_weighs_as_many_places_as_it_computes() -> None:
    model = nn.ModuleList([nn.Conv2d(3, 16, 3, padding=1), nn.ConvTranspose1d(16, 16, 2, stride=2), nn.Linear(64, 64)])
    fp8 = fp8cfg.convert_model(model, recipe())
    with fp8.autocast():
        model[0](torch.randn(2, 3, 8, 8)), model[1](torch.randn(5, 16, 7)), model[2](torch.randn(16, 64))
    seen = fp8cfg.coverage(model)
    assert [p.rows for p in seen.beside] == [2 * 8 * 8, 5 * 7] and [p.rows for p in seen.linears] == [16]


@pytest.mark.parametrize(("name", "shape", "listed"), [
    ("Mixtral", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "num_local_experts": 4}, {"MixtralExperts", "MixtralTopKRouter"}),
])
def test_models_of_transformers(name: str, shape: dict[str, int], listed: set[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(vocab_size=64, bos_token_id=0, eos_token_id=0, **shape)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    fp8 = fp8cfg.convert_model(model, recipe("fp8.output_layer=true", "fp8.min_coverage=0.5"))
    tokens = torch.arange(64).reshape(2, 32)
    with fp8.autocast():
        model(input_ids=tokens, labels=tokens).loss.backward()
    seen = fp8cfg.coverage(model)
    assert {p.reason.split()[0] for p in seen.beside} == listed and seen.share < 0.25
    with pytest.raises(fp8cfg.NotFP8Error, match=r"fp8\.min_coverage=0\.5: .* of the FLOPs of all weights ran in FP8"):
        fp8.prove()


# Calls that can be forgotten, and keys without effect.

def delayed(*, fused: bool, steps: bool, parts: int = 1, updates: int = 3) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fp8 = fp8cfg.convert_model(model, fp8cfg.compose(["precision=bf16_fp8", "fp8.params=false", "fp8.output_layer=true"]))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    for _ in range(updates):
        for _ in range(parts):
            with fp8.autocast():
                model(torch.randn(16, 64)).sum().backward()
        with torch.no_grad(), fp8.autocast():
            model(torch.randn(16, 64))
        optimizer.step()
        optimizer.zero_grad()
        if steps:
            fp8.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_never_called_is_said_once(fused: bool) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        delayed(fused=fused, steps=False)
    assert [str(w.message).partition(",")[0] for w in said] == ["weights were updated and fp8.step() was never called"]
    assert said[0].filename == __file__
    delayed(fused=fused, steps=True)
    delayed(fused=fused, steps=False, parts=4, updates=1)


@pytest.mark.parametrize(("words", "line"), [
    ("log.fp8_stats_every_n_steps=1", "log.fp8_stats_every_n_steps=1: has no effect on a model of your own"), ("trainer.compile=on", "trainer.compile=on: has no effect on a model")])
def test_keys_of_runs_are_refused_for_a_given_model(words: str, line: str) -> None:
    r = recipe(words)
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.build(r, model=Ten())
    assert str(e.value).startswith(line)
    if "log" in words:
        with pytest.raises(fp8cfg.ConfigError, match="has no effect on a model of your own"):
            fp8cfg.convert_model(Ten(), r)


class Loss(nn.Module):
    def __init__(self, made: str) -> None:
        super().__init__()
        self.embedding, self.up, self.made = nn.Embedding(272, 64), nn.Linear(64, 64), made

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.up(self.embedding(tokens)).float().pow(2)
        return {"dict": {"loss": x.mean()}, "shape": x, "loss": x.mean()}[self.made]


@pytest.mark.parametrize(("model", "line"), [
    (Ten(), r"and Ten cannot be called so: too many positional arguments; give build"), (Loss("dict"), "and Loss gives dict; give build"),
    (Loss("shape"), r"and Loss gives a tensor of shape \[16, 256, 64\]; give build"), (Loss("loss"), ""),
])
def test_fit_of_a_model_that_makes_no_loss(model: nn.Module, line: str, tmp_path: Path) -> None:
    job = fp8cfg.build(recipe("recipe=llama_tiny", "data=tiny", "trainer.max_steps=2", "optim.warmup_steps=1"), model=model)
    if not line:
        assert fp8cfg.fit(job, tmp_path, say=lambda _: None).steps == 2
        return
    with pytest.raises(fp8cfg.ConfigError, match=rf"^fit: trains models whose model\(tokens, targets\) is the loss, {line}"):
        fp8cfg.fit(job, tmp_path, say=lambda _: None)
