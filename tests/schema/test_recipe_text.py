"""A recipe in a terminal and in a notebook, what two recipes differ in, and what is taken for a recipe."""

from __future__ import annotations

from collections import UserDict
from types import MappingProxyType
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

import fp8cfg
from fp8cfg.recipes import llama_8b


@pytest.fixture
def recipe() -> fp8cfg.Recipe:
    made = llama_8b()
    made.precision = fp8cfg.bf16_with_fp8_mixed(fp8={"margin": 3})
    return made


def test_what_differs_comes_first_and_all_of_it_fits_a_screen(recipe: fp8cfg.Recipe) -> None:
    lines = repr(recipe).splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 80 and str(recipe) == repr(recipe)
    head, rest = repr(recipe).split("at their defaults\n")
    assert head.startswith("Recipe llama_8b\n  model: num_layers=32, hidden_size=4096,")
    assert "  fp8: enabled=true, margin=3, params=true\n" in head and "scaling" not in head.replace(
        "rope_scaling", ""
    )
    assert "lr=0.0003" in rest and "num_layers" not in rest
    for key in fp8cfg.Recipe().diff(recipe):
        assert f"{key.rpartition('.')[2]}=" in head or key == "name"


def test_a_notebook_shows_a_table(recipe: fp8cfg.Recipe) -> None:
    recipe.data = {"name": "text", "path": "<b>&"}
    page = recipe._repr_html_()
    assert "<tr><td>fp8.margin</td><td>3</td><td>0</td></tr>" in page and "<details>" in page
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page


def test_diff_has_both_values_by_short_names(recipe: fp8cfg.Recipe) -> None:
    other = llama_8b()
    other.optim.betas = (0.8, 0.9)
    found = recipe.diff(other)
    assert found == {
        "fp8.enabled": (True, False),
        "fp8.margin": (3, 0),
        "fp8.params": (True, False),
        "optim.betas": ((0.9, 0.95), (0.8, 0.9)),
    }
    assert str(found).splitlines()[
        -1
    ] == "fp8.params: true -> false" or "optim.betas: [0.9, 0.95] -> [0.8, 0.9]" in str(found)
    assert not recipe.diff(recipe) and str(recipe.diff(recipe)) == "no difference"


def test_diff_with_what_is_no_recipe_is_one_line(recipe: fp8cfg.Recipe) -> None:
    for other in ("llama_8b", None, recipe.fp8):
        with pytest.raises(
            fp8cfg.ConfigError,
            match=rf"^diff: expected a Recipe, got {type(other).__name__}; compose\(\['recipe=llama_8b'\]\) returns one$",
        ):
            recipe.diff(other)  # type: ignore[arg-type]


VALUES = {
    "name": "mine",
    "model": {"num_layers": 2},
    "fp8": {"enabled": True, "exclude": ["*.linear_fc2"]},
    "optim": {"betas": [0.8, 0.9]},
    "trainer": {"plugins": {"compute": "fp16"}, "strategy": {"context_parallel_size": 2}},
}


def wrapped(value: Any, kind: Any) -> Any:
    return (
        kind({k: wrapped(v, kind) for k, v in value.items()}) if isinstance(value, dict) else value
    )


@pytest.mark.parametrize(
    "kind",
    [OmegaConf.create, UserDict, MappingProxyType],
    ids=["DictConfig", "UserDict", "MappingProxyType"],
)
def test_any_mapping_makes_a_recipe(kind: Any) -> None:
    made = fp8cfg.Recipe(**wrapped(VALUES, kind))
    assert (
        made == fp8cfg.Recipe(**VALUES)
        and made.fp8.exclude == ("*.linear_fc2",)
        and type(made.optim.betas) is tuple
    )
    changed = fp8cfg.Recipe()
    changed.fp8 = wrapped({"margin": 2}, kind)
    assert changed.fp8.margin == 2
    with pytest.raises(
        fp8cfg.ConfigError, match=r"fp8\.margn: no such key; did you mean 'fp8\.margin'\?"
    ):
        changed.fp8 = wrapped({"margn": 2}, kind)


class Mine(fp8cfg.Precision):
    extra: int = 3


class Half(fp8cfg.Precision):
    compute: Literal["fp32", "bf16", "fp16"] = "fp16"


class Whole(fp8cfg.Recipe):
    extra: int = 3


def test_a_field_of_ones_own_is_refused_and_a_subclass_without_one_is_read_back(
    recipe: fp8cfg.Recipe,
) -> None:
    line = r"^precision\.extra: nothing reads this field of Mine; remove it from the class$"
    with pytest.raises(fp8cfg.ConfigError, match=line):
        recipe.precision = Mine()
    with pytest.raises(fp8cfg.ConfigError, match=line):
        fp8cfg.Trainer(plugins=Mine())
    with pytest.raises(fp8cfg.ConfigError, match=r"^extra: nothing reads this field of Whole"):
        fp8cfg.lower(Whole())
    recipe.precision = Half()
    assert type(recipe.precision) is fp8cfg.Precision and recipe.precision.compute == "fp16"
    assert fp8cfg.from_yaml(fp8cfg.to_yaml(recipe)) == recipe
