"""Structured configs: fp8cfg as a part of somebody's Hydra application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import fp8cfg
from fp8cfg.recipes import llama_8b, llama_tiny
from fp8cfg.schema.recipe_registry import recipes


@pytest.fixture
def app() -> Iterator[Any]:
    """An application with a key of its own, fp8cfg as a node, and precision presets to choose from. It composes words."""
    from hydra import compose, initialize
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    before = dict(store.repo)
    store.store(
        "app", {"defaults": [{"fp8cfg": "llama_8b"}, {"precision": None}, "_self_"], "tag": "mine"}
    )
    for recipe in (llama_8b(), llama_tiny()):
        store.store(recipe.name, fp8cfg.structured_config(recipe), group="fp8cfg")
    store.store(
        "bf16_fp8",
        fp8cfg.structured_config(fp8cfg.bf16_with_fp8_mixed()),
        group="precision",
        package="fp8cfg.trainer.plugins",
    )
    with initialize(config_path=None, version_base="1.3"):
        yield lambda *words: compose("app", list(words))
    store.repo.clear()
    store.repo.update(before)


def test_a_recipe_is_a_part_of_an_application(app: Any) -> None:
    cfg = app(
        "precision=bf16_fp8",
        "fp8cfg.trainer.plugins.fp8.margin=1",
        "fp8cfg.optim.betas=[0.8,0.9]",
        "tag=yours",
    )
    want = fp8cfg.compose(
        ["recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1", "optim.betas=[0.8,0.9]"]
    )
    assert cfg.tag == "yours" and fp8cfg.Recipe(**cfg.fp8cfg) == want
    assert fp8cfg.Recipe(**app("fp8cfg=llama_tiny").fp8cfg) == llama_tiny()


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("fp8cfg.trainer.plugins.fp8.margn=1", "Could not override"),
        ("fp8cfg.trainer.plugins.fp8.margin=x", "could not be converted to Integer"),
        ("fp8cfg.optim.lr=null", "is not Optional"),
    ],
)
def test_names_and_kinds_are_checked_by_omegaconf(word: str, part: str, app: Any) -> None:
    from hydra.errors import HydraException

    with pytest.raises(HydraException) as e:
        app(word)
    assert part in f"{e.value} {e.value.__cause__}"


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("fp8cfg.trainer.plugins.fp8.margin=99", "fp8.margin=99: must be at most 16"),
        ("fp8cfg.optim.name=adamm", "optim.name=adamm: not an option; did you mean 'adam'?"),
    ],
)
def test_options_and_bounds_are_checked_by_the_recipe(word: str, line: str, app: Any) -> None:
    cfg = app(word)
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.Recipe(**cfg.fp8cfg)
    assert e.value.problems == [line]


def test_every_recipe_survives() -> None:
    from omegaconf import OmegaConf

    for name, make in recipes().items():
        if name != "from_hf":
            assert fp8cfg.Recipe(**OmegaConf.structured(fp8cfg.structured_config(make()))) == make()
    with pytest.raises(fp8cfg.ConfigError, match="expected a Recipe or a node of one, got str"):
        fp8cfg.structured_config("llama_8b")
