"""Loops of one's own around a given model: calls that are never made, keys without effect, and a model that makes no loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import fp8cfg
from tests.support.convert_models import Block, recipe


def delayed(*, fused: bool, steps: bool, parts: int = 1, updates: int = 3) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fp8 = fp8cfg.convert_model(
        model, fp8cfg.compose(["precision=bf16_fp8", "fp8.params=false", "fp8.output_layer=true"])
    )
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
    assert [str(w.message).partition(",")[0] for w in said] == [
        "weights were updated without fp8.step()"
    ]
    assert said[0].filename == __file__
    delayed(fused=fused, steps=True)
    delayed(fused=fused, steps=False, parts=4, updates=1)


def two_layers() -> tuple[nn.Sequential, fp8cfg.Conversion]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    words = ["precision=bf16_fp8", "fp8.params=false", "fp8.output_layer=true"]
    return model, fp8cfg.convert_model(model, fp8cfg.compose(words))


class Sam(torch.optim.SGD):
    """Sharpness-aware minimization: a second pass with weights that a step takes back."""

    @torch.no_grad()
    def perturb(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = p.grad / p.grad.norm() * 0.01
            p.add_(self.state[p]["step"])
        self.zero_grad()

    @torch.no_grad()
    def take_back(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p].pop("step"))


@pytest.mark.filterwarnings("error")
def test_passes_within_a_sam_step_are_no_updates() -> None:
    model, fp8 = two_layers()
    optimizer = Sam(model.parameters(), lr=0.01)
    for _ in range(2):
        with fp8.autocast():
            model(torch.randn(16, 64)).sum().backward()
        optimizer.perturb()
        with fp8.autocast():
            model(torch.randn(16, 64)).sum().backward()
        optimizer.take_back()
        optimizer.step()
        optimizer.zero_grad()
        fp8.step()


@pytest.mark.filterwarnings("error")
def test_passes_within_an_lbfgs_step_are_no_updates() -> None:
    model, fp8 = two_layers()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=4)
    x = torch.randn(16, 64)
    passes = 0

    def closure() -> Tensor:
        nonlocal passes
        passes += 1
        optimizer.zero_grad()
        with fp8.autocast():
            loss: Tensor = model(x).square().mean()
            loss.backward()
        return loss

    optimizer.step(closure)
    assert passes > 2
    fp8.step()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_grad_scaler_skips_are_no_updates(fused: bool) -> None:
    model, fp8 = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(4):
        optimizer.zero_grad()
        with fp8.autocast():
            loss = model(torch.randn(16, 64)).sum()
            if step < 3:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        is_skipped = torch.equal(model[0].weight, before)
        assert is_skipped == (step < 3)
        if not is_skipped:
            fp8.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_parametrized_weight_is_an_error(change: Callable[[nn.Module], Any]) -> None:
    model, fp8 = two_layers()
    with pytest.raises(fp8cfg.ConfigError, match="cannot change a converted layer; apply them"):
        change(model[0])
        with fp8.autocast():
            model(torch.randn(16, 64))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    change(model[0])
    fp8 = fp8cfg.convert_model(
        model, fp8cfg.compose(["precision=bf16_fp8", "fp8.params=false", "fp8.output_layer=true"])
    )
    assert [planned.fp8 for planned in fp8.plan] == [False, True]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "log.fp8_stats_every_n_steps=1",
            "log.fp8_stats_every_n_steps=1: has no effect on a custom model",
        ),
        ("trainer.compile=on", "trainer.compile=on: has no effect on a custom model"),
    ],
)
def test_keys_of_runs_are_refused_for_a_given_model(words: str, line: str) -> None:
    r = recipe(words)
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.build(r, model=Block())
    assert str(e.value).startswith(line)
    if "log" in words:
        with pytest.raises(fp8cfg.ConfigError, match="has no effect on a custom model"):
            fp8cfg.convert_model(Block(), r)


class Loss(nn.Module):
    def __init__(self, made: str) -> None:
        super().__init__()
        self.embedding, self.up, self.made = nn.Embedding(272, 64), nn.Linear(64, 64), made

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.up(self.embedding(tokens)).float().pow(2)
        return {"dict": {"loss": x.mean()}, "shape": x, "loss": x.mean()}[self.made]


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (Block(), r"but Block does not accept them: too many positional arguments; pass such"),
        (Loss("dict"), "but Loss returns dict; pass such"),
        (Loss("shape"), r"but Loss returns a tensor of shape \[16, 256, 64\]; pass such"),
        (Loss("loss"), ""),
    ],
)
def test_fit_of_a_model_that_makes_no_loss(model: nn.Module, line: str, tmp_path: Path) -> None:
    job = fp8cfg.build(
        recipe("recipe=llama_tiny", "data=tiny", "trainer.max_steps=2", "optim.warmup_steps=1"),
        model=model,
    )
    if not line:
        assert fp8cfg.fit(job, tmp_path, say=lambda _: None).steps == 2
        return
    with pytest.raises(
        fp8cfg.ConfigError,
        match=rf"^fit: needs a model whose model\(tokens, targets\) returns the loss, {line}",
    ):
        fp8cfg.fit(job, tmp_path, say=lambda _: None)
