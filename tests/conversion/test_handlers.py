"""Objects of other projects in the place of a recipe: what they mean for a model of one's own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from accelerate.utils import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from torch import nn

import fp8cfg
from fp8cfg.conversion.convert import to_recipe

OLD: dict[str, Any] = {"backend": "TE", "margin": 2}


def old(**fields: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FP8RecipeKwargs(**fields)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32))


@pytest.mark.parametrize(
    ("handler", "values"),
    [
        (
            TERecipeKwargs(margin=1, fp8_format="E4M3"),
            {"backend": "te", "fp8.margin": 1, "fp8.format": "e4m3"},
        ),
        (old(**OLD), {"backend": "te", "fp8.margin": 2}),
        (MSAMPRecipeKwargs(opt_level="O1"), {"backend": "msamp", "opt_level": "O1"}),
        (AORecipeKwargs(), {"backend": "torchao", "fp8.scaling": "current"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_handler_means_the_recipe_that_it_imports_as(
    handler: Any, values: dict[str, Any]
) -> None:
    recipe = to_recipe(handler)
    assert recipe == fp8cfg.interop.from_object(handler).recipe and recipe.fp8.enabled
    assert {key: dict(fp8cfg.Recipe().diff(recipe))[key][1] for key in values} == values


def test_torchaos_handler_converts_wraps_and_trains(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    handler, model = AORecipeKwargs(), net()
    conversion = fp8cfg.convert_model(model, handler)
    assert (
        conversion.choice.backend == "torchao"
        and "AORecipeKwargs: pad_inner_dim=True" in caplog.text
    )
    fp8cfg.apply_fp8_autowrap(model, handler)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(16, 32)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0] and fp8cfg.coverage(model).share == 1


def test_a_precision_does_too() -> None:
    precision = fp8cfg.bf16_with_fp8_mixed(fp8={"margin": 1, "params": False}, backend="native")
    model = net()
    fp8cfg.convert_model(model, precision)
    assert fp8cfg.has_fp8_layers(model)
    run = fp8cfg.contextual_fp8_autocast(model.forward, precision)
    assert run(model, torch.randn(16, 32)).shape == (16, 32)


@pytest.mark.parametrize(
    ("handler", "line"),
    [
        (TERecipeKwargs(), "backend=te: "),
        (
            MSAMPRecipeKwargs(),
            r"opt_level=O2: has no effect in convert_model, .* use fp8cfg\.build",
        ),
        (object(), "expected a Recipe, got object"),
        ("fp8", "precision=fp8: no such precision preset"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_run_here_is_said_and_the_model_stays(handler: Any, line: str) -> None:
    model = net()
    with pytest.raises(fp8cfg.ConfigError, match=line):
        fp8cfg.convert_model(model, handler)
    assert not fp8cfg.has_fp8_layers(model)
