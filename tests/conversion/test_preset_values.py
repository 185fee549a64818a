"""Presets that were written for large models, on small ones: their values give way with a line, those of the user are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.recipes import llama_tiny
from fp8cfg.schema import presets
from fp8cfg.schema.keys import preset_keys


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x)


def stack(layers: int) -> nn.Module:
    return (
        nn.Sequential(*(Block() for _ in range(layers)))
        if layers
        else nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    )


def composed(preset: str, *words: str) -> fp8cfg.Recipe:
    return fp8cfg.compose([f"precision={preset}", "recipe=llama_8b", *words])


def assigned(preset: str) -> fp8cfg.Recipe:
    recipe = llama_tiny()
    recipe.precision = preset  # type: ignore[assignment]
    return recipe


PARAMS = "note: fp8.params True -> False: the preset's value is changed to fit parameters that stay as they are"


@pytest.mark.parametrize("of", [composed, assigned])
@pytest.mark.parametrize(
    ("preset", "layers", "in_fp8", "note"),
    [
        ("bf16_fp8_current", 3, 1, None),
        (
            "bf16_fp8_current",
            2,
            1,
            "fp8.high_precision_at_end 1 -> 0: the preset's value is changed to fit a model of 2 layers",
        ),
        (
            "bf16_fp8_current",
            0,
            1,
            "fp8.high_precision_at_start 1 -> 0, fp8.high_precision_at_end 1 -> 0: the preset's value is changed to fit a model "
            "without a list of like layers",
        ),
        (
            "nemotron_3_super_bf16_nvfp4",
            8,
            1,
            "fp8.high_precision_at_end 14 -> 7: the preset's value is changed to fit a model of 8 layers",
        ),
    ],
)
def test_layers_at_the_ends_give_way_to_a_small_model(
    of: Callable[[str], fp8cfg.Recipe],
    preset: str,
    layers: int,
    in_fp8: int,
    note: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe, notes = of(preset), [f"note: {note}"] if note else []
    before = recipe.model_copy(deep=True)
    caplog.clear()
    fp8 = fp8cfg.convert_model(stack(layers), recipe)
    assert (
        sum(p.fp8 for p in fp8.plan) == in_fp8
        and caplog.messages == [*notes, PARAMS]
        and recipe == before
    )
    fp8cfg.apply_fp8_autowrap(fp8.model, recipe)  # the recipe that was asked for is no other
    caplog.clear()
    job = fp8cfg.build(recipe, model=stack(layers))
    assert (
        sum(p.fp8 for p in job.plan) == in_fp8
        and caplog.messages == notes
        and job.recipe.fp8.params
    )


@pytest.mark.parametrize(
    ("write", "line"),
    [
        (
            "fp8.high_precision_at_end = 1",
            "fp8.high_precision_at_end=1: leave no layer of model.num_layers=2 in FP8; nearest is fp8.high_precision_at_end=0",
        ),
        (
            "fp8 = {'high_precision_at_start': 2}",
            "leave no layer of model.num_layers=2 in FP8; nearest is fp8.high_precision_at_start=1",
        ),
        (
            "fp8.params = True",
            "fp8.params=true: weights stored only in FP8 need an optimizer with master weights",
        ),
    ],
)
def test_what_the_user_assigned_is_refused(write: str, line: str) -> None:
    recipe = assigned("bf16_fp8_current")
    exec(f"recipe.{write}")
    if write.endswith("at_end = 1"):
        recipe.fp8.high_precision_at_start = 1
    for same in (recipe, copy.deepcopy(recipe), recipe.model_copy()):
        with pytest.raises(fp8cfg.ConfigError) as refused:
            fp8cfg.convert_model(stack(2), same)
        assert line in str(refused.value)


@pytest.mark.parametrize(
    "written",
    [
        lambda: composed("bf16_fp8_current", "fp8.high_precision_at_end=1"),
        lambda: fp8cfg.from_yaml(
            "recipe: llama_tiny\nprecision: bf16_fp8_current\nfp8: {high_precision_at_end: 1}"
        ),
        lambda: fp8cfg.compose(["fp8.high_precision_at_end=1"], base=assigned("bf16_fp8_current")),
    ],
    ids=["word", "file", "base"],
)
def test_what_the_user_wrote_is_refused_from_every_door(
    written: Callable[[], fp8cfg.Recipe],
) -> None:
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"fp8\.high_precision_at_end=1: has no effect, the model has no list of like layers; set ",
    ):
        fp8cfg.convert_model(stack(0), written())


def test_the_record_of_a_preset_is_no_value() -> None:
    preset, other = (
        presets.precision_preset("bf16_fp8"),
        fp8cfg.Precision(**fp8cfg.bf16_with_fp8_mixed().model_dump()),
    )
    assert (
        preset_keys(preset.fp8) == set(fp8cfg.FP8.model_fields)
        and preset_keys(other.fp8) == frozenset()
    )
    assert (
        preset == other
        and repr(preset) == repr(other)
        and preset.model_dump() == other.model_dump()
    )
    preset.fp8.margin = 0
    changed = fp8cfg.bf16_with_fp8_mixed(fp8={"margin": 0})
    assert (
        "margin" not in preset_keys(preset.fp8)
        and "margin" not in preset_keys(changed.fp8)
        and "params" in preset_keys(changed.fp8)
    )
    assert preset_keys(fp8cfg.compose(["precision=bf16_fp8", "fp8.margin=1"]).fp8) == set(
        fp8cfg.FP8.model_fields
    ) - {"margin"}


def test_a_first_experiment_trains() -> None:
    torch.manual_seed(0)
    recipe = assigned("bf16_fp8_current")
    fp8 = fp8cfg.convert_model(stack(2), recipe)
    with fp8.autocast():
        fp8.model(torch.randn(16, 32)).square().mean().backward()
    fp8.prove()
