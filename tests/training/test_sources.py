"""sources.json: who set each value of a run's recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fp8cfg
from fp8cfg.composition.value_sources import value_sources
from fp8cfg.recipes import llama_8b
from tests.support.small import SMALL, small


def sources(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sources.json").read_text())


def test_sources_are_the_layers_of_explain() -> None:
    words = ["recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1", "trainer.max_steps=10"]
    recipe = fp8cfg.compose(words)
    for key, source in value_sources(recipe).items():
        layer = fp8cfg.explain(words, key).layers[-1]
        assert source.startswith(layer.source.value), key
    found = value_sources(recipe)
    assert found["trainer.plugins.fp8.margin"] == "command line: fp8.margin=1"
    assert found["trainer.plugins.fp8.enabled"] == "preset: bf16_fp8"
    assert found["optim.warmup_steps"].startswith("changed to fit trainer.max_steps=10")


def test_a_value_assigned_in_python_has_that_source() -> None:
    recipe = fp8cfg.compose(["recipe=llama_tiny", "optim.lr=1e-3"])
    recipe.optim.lr = 2e-3
    recipe.trainer.seed = 5
    for other in (recipe, recipe.model_copy(deep=True)):
        found = value_sources(other)
        assert found["optim.lr"] == found["trainer.seed"] == "Python"
        assert found["optim.eps"] == "schema default"
    assert value_sources(llama_8b())["model.num_layers"] == "Python"


def test_a_resumed_run_keeps_the_sources(tmp_path: Path) -> None:
    job = fp8cfg.build(small("trainer.max_steps=2", "optim.lr=1e-3"))
    fp8cfg.fit(job, tmp_path / "run")
    before = sources(tmp_path / "run")
    assert before["optim.lr"] == "command line: optim.lr=1e-3"
    assert SMALL[2] in before["model.num_layers"]
    fp8cfg.resume(tmp_path / "run", ["trainer.max_steps=3"])
    after = sources(tmp_path / "run")
    assert after.pop("trainer.max_steps") == "command line: trainer.max_steps=3"
    assert before.pop("trainer.max_steps") == "command line: trainer.max_steps=2"
    assert after == before
