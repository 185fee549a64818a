"""Jobs around models that are not ours: weights in FP8 alone, levels, convolutions, and back again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.numerics import FP8Linear
from tests.support.convert_models import (
    BACKENDS,
    REASONS,
    TOKENS,
    Doubled,
    Model,
    loss_of,
    recipe,
    transformers_lm,
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_job_around_a_model_of_ones_own(backend: str, compute: str) -> None:
    model = Model().bfloat16()
    weights = {name: p.detach().float() for name, p in model.named_parameters()}
    r = recipe(
        f"precision.compute={compute}", "optim.warmup_steps=0", "optim.lr=0.01", backend=backend
    )
    job = fp8cfg.build(r, model=model)
    assert (
        job.model is model
        and job.foreign
        and {p.dtype for p in model.parameters()}
        == {getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[compute])}
    )
    assert all(
        torch.equal(job.optimizer.masters[p], weights[name])
        for name, p in model.named_parameters()
        if p.requires_grad
    )
    losses = []
    for step in range(4):
        with job.autocast():
            loss = model(TOKENS, TOKENS)
            job.backward(loss)
        job.schedule.apply(job.optimizer, step)
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and model.lm_head.weight is model.embedding.weight
    frozen = f"{model.name}.1.up.weight"
    assert torch.equal(dict(model.named_parameters())[frozen].float(), weights[frozen])
    seen = job.prove()
    assert {
        p.name: p.reason for p in seen.linears if not p.fp8
    } == REASONS and "FLOPs of all weights" in str(seen)


def test_a_job_holds_weights_in_fp8_alone_and_gives_them_back() -> None:
    model = Model()
    job = fp8cfg.build(recipe("fp8.params=true"), model=model)
    assert (
        model.h[0].up.parameter.dtype == torch.float8_e4m3fn
        and model.h[0].up.weight.dtype == torch.bfloat16
    )
    with job.autocast():
        job.backward(model(TOKENS, TOKENS))
    job.optimizer.step()
    values = model.h[0].up.dequantized_weight(torch.bfloat16)
    fp8cfg.convert_back(model)
    assert torch.equal(model.h[0].up.weight, values) and not model.h[1].up.weight.requires_grad
    loss_of(model)


def of_gpt2() -> nn.Module:
    return transformers_lm("GPT2", n_layer=2, n_embd=64, n_head=4, n_positions=32)


def of_llama() -> nn.Module:
    return transformers_lm(
        "Llama",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


class Convolutions(nn.Module):
    """A convolution, a weight that is read without its layer's forward, and a linear layer that is parametrized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.conv, self.norm, self.up = (
            nn.Embedding(48, 64),
            nn.Conv1d(64, 64, 3, padding=1),
            nn.RMSNorm(64),
            nn.Linear(64, 64),
        )
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens)) * self.scale
        x = self.normed(x + self.up(torch.relu(self.conv(x.mT).mT)))
        return nn.functional.cross_entropy(
            (x @ self.embedding.weight.T).float().flatten(0, 1), targets.flatten()
        )


@pytest.mark.filterwarnings("ignore:only .* ran in FP8:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "words",
    [
        "opt_level=O1",
        "opt_level=O2",
        "opt_level=O3 fp8.params=true",
        "storage.weight=fp32",
        "storage.master_weight=none storage.rounding=stochastic",
    ],
)
@pytest.mark.parametrize("model", [Model, of_gpt2, of_llama, Convolutions])
def test_a_level_trains_models_with_any_kind_of_weight(
    model: Any, words: str, backend: str
) -> None:
    if backend == "torchao" and "O3" in words:
        pytest.skip("torchao holds no weights in FP8")
    job = fp8cfg.build(
        recipe(*words.split(), "optim.warmup_steps=0", "optim.lr=0.003", backend=backend),
        model=model(),
    )
    columns, losses = job.prepared.columns, []
    assert columns.keys() == dict(job.model.named_parameters()).keys()
    linear = {f"{p.name}.weight" for p in job.plan}
    apart = {name: p for name, p in job.model.named_parameters() if name not in linear}
    assert {p.dtype for p in apart.values()} == {torch.bfloat16} and {
        columns[name]["master_weight"] for name in apart
    } == {"fp32"}
    for step in range(4):
        with job.autocast():
            loss = job.model(TOKENS, TOKENS)
        job.backward(loss)
        job.schedule.apply(job.optimizer, step)
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_layers_that_only_hold_their_weights_multiply_nothing_in_fp8() -> None:
    r = fp8cfg.compose(["precision=bf16", "opt_level=O2"])
    job = fp8cfg.build(r, model=Model())
    assert isinstance(job.model.h[0].up, FP8Linear) and not fp8cfg.has_fp8_layers(job.model)
    with pytest.raises(fp8cfg.ConfigError, match="the model has FP8 layers already"):
        fp8cfg.build(r, model=job.model)


@pytest.mark.parametrize(
    "words",
    [
        ("opt_level=O1",),
        ("opt_level=O2",),
        ("opt_level=O2", "fp8.output_layer=true"),
        ("storage.weight=fp16",),
        ("storage.weight=fp16_scaled", "storage.master_weight=fp32"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_level_weights_come_back_decoded(backend: str, words: tuple[str, ...]) -> None:
    model = Model()
    before, keys = copy.deepcopy(model), list(model.state_dict())
    job = fp8cfg.build(recipe(*words, backend=backend), model=model)
    with job.autocast():
        job.backward(model(TOKENS, TOKENS))
    job.optimizer.step()
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if getattr(layer, "codec", None) and name != "lm_head"
    }
    want = {name: layer.codec.decode(layer.codec_tensors) for name, layer in layers.items()}
    frozen = {name: p.requires_grad for name, p in model.named_parameters()}
    assert len(want) >= 8 and fp8cfg.convert_back(model) is model
    wide = model.embedding.weight.dtype
    assert wide == torch.bfloat16 and {p.dtype for p in model.parameters()} == {wide}
    assert (
        str(model) == str(before)
        and list(model.state_dict()) == keys
        and type(model.own) is Doubled
    )
    assert all(
        torch.equal(model.get_submodule(name).weight, weight.to(wide))
        for name, weight in want.items()
    )
    assert {
        name: p.requires_grad for name, p in model.named_parameters()
    } == frozen and model.lm_head.weight is model.embedding.weight
    loss_of(model).backward()
    fp8cfg.convert_model(model, recipe(backend=backend))


def test_a_job_that_does_not_run_in_fp8_is_found_out() -> None:
    job = fp8cfg.build(recipe(), model=Model())
    job.backward(job.model(TOKENS, TOKENS))
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8"):
        job.prove()
    fp8cfg.build(fp8cfg.compose(["precision=bf16"]), model=Model()).prove()
    assert isinstance(fp8cfg.build(recipe(), model=nn.Linear(64, 64)).model[0], FP8Linear)


class _Convolutions(nn.Module):
    """1x1 convolutions, which FP8 layers replace, among more BatchNorms than other matrices."""

    def __init__(self, has_stem: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(8, 64, 3, padding=1, bias=False) if has_stem else nn.Identity()
        blocks = [nn.Sequential(nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64)) for _ in range(3)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3))).float().square().mean()


@pytest.mark.parametrize("has_stem", [True, False])
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("preset", ["bf16_fp8", "fp16_fp8", "bf16_adamw_fp8", "bf16_fp8_amp"])
def test_a_convolutional_model_runs_after_convert_back(
    preset: str, copies: bool, has_stem: bool
) -> None:
    job = fp8cfg.build(fp8cfg.compose([f"precision={preset}"]), _Convolutions(has_stem))
    x = torch.randn(4, 8 if has_stem else 64, 4, 4)
    with job.autocast():
        job.backward(job.model(x))
    job.optimizer.step()
    model = fp8cfg.convert_back(copy.deepcopy(job.model) if copies else job.model)
    model.zero_grad()
    model(x.to(model.head.weight.dtype)).backward()


def test_a_model_without_trained_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    with pytest.raises(fp8cfg.ConfigError, match="build: no parameter of the model requires"):
        fp8cfg.build(fp8cfg.compose(["precision=bf16_fp8"]), model=model)
