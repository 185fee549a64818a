"""`fp8cfg.plan` and `fp8cfg.explain`: what the verbs print, as objects."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.recipes import llama_8b, llama_tiny
from tests.support.verbs import ROOT, said

Out = pytest.CaptureFixture[str]
WORDS = ["recipe=llama_70b", "precision=bf16_fp8"]


def fp8_recipe() -> fp8cfg.Recipe:
    recipe = llama_8b()
    recipe.trainer.plugins = fp8cfg.bf16_with_fp8_mixed()
    recipe.fp8.margin = 1
    return recipe


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--gpu", "h100", "--gpus", "64"], {"gpu": "h100", "gpus": 64}),
        (["--gpu", "H200"], {"gpu": "H200"}),
        ([], {}),
    ],
)
def test_a_plan_is_what_the_verb_prints(
    options: list[str], arguments: dict[str, Any], capsys: Out
) -> None:
    plan = fp8cfg.plan(fp8cfg.compose(WORDS), **arguments)
    printed = []
    for output in ([], ["--json"]):
        assert main(["plan", *WORDS, *options, *output]) == 0
        printed.append(capsys.readouterr().out)
    assert f"{plan}\n" == printed[0] and json.loads(json.dumps(plan.data())) == json.loads(
        printed[1]
    )


def test_a_plan_as_an_object() -> None:
    recipe = fp8_recipe()
    plan = fp8cfg.plan(recipe, gpu="h100", gpus=64)
    assert (
        isinstance(plan, fp8cfg.Plan)
        and plan.recipe == recipe
        and plan.world == 64
        and plan.gpu
        and plan.gpu.name == "h100"
    )
    assert (
        not plan.refusals
        and plan.choice
        and plan.built
        and plan.built["optimizer"]["inner"] == "adamw"
    )
    assert plan.coverage.layers_in_fp8 == 128 and 0.8 < plan.coverage.share < 1
    assert plan.widest.total == sum(plan.widest.memory.values()) > plan.widest.parameters
    before = str(plan)
    recipe.model.num_layers = 2
    assert str(plan) == before, "the recipe was copied"
    with pytest.raises(FrozenInstanceError):
        plan.world = 8  # type: ignore[misc]


def test_a_layout_for_more_gpus_than_the_recipe_has() -> None:
    recipe = llama_tiny()
    recipe.trainer.strategy.tensor_model_parallel_size = 4
    with pytest.raises(fp8cfg.ConfigError):
        fp8cfg.plan(recipe)
    plan = fp8cfg.plan(recipe, gpus=4)
    assert plan.world == 4 and plan.recipe.trainer.devices == 4 and recipe.trainer.devices == 1


def test_a_recipe_that_nothing_runs_there_has_a_plan_that_says_why() -> None:
    plan = fp8cfg.plan(fp8_recipe(), gpu="a100-80")
    assert plan.choice is None and plan.built is None and plan.refusals
    assert str(plan).startswith("cannot run on a100-80: ")


@pytest.mark.parametrize(
    ("recipe", "arguments", "line"),
    [
        ({}, {}, "plan: expected a Recipe, got dict; compose(['recipe=llama_8b']) returns one"),
        (
            llama_8b(),
            {"gpu": "h10"},
            "gpu=h10: no such GPU in the table; did you mean h100 or h100-pcie?",
        ),
        (llama_8b(), {"gpu": 8}, "gpu=8: expected a name; there are a100-40, "),
        (llama_8b(), {"gpus": 0}, "gpus=0: expected a number of GPUs, 1 to 9999999"),
        (llama_8b(), {"gpus": "64"}, "gpus='64': expected a number of GPUs, 1 to 9999999"),
        (llama_8b(), {"gpus": True}, "gpus=True: expected a number of GPUs, 1 to 9999999"),
        (
            fp8cfg.compose(["trainer.accelerator=cpu"]),
            {"gpu": "h100"},
            "gpu=h100: trainer.accelerator=cpu uses no GPU; remove one of them",
        ),
        (
            fp8cfg.compose(["trainer.accelerator=cuda"]),
            {},
            "trainer.accelerator=cuda: name the GPU, as in gpu=h100; there are a100-40, ",
        ),
    ],
)
def test_mistakes_in_a_plan(recipe: Any, arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.plan(recipe, **arguments)
    assert len(e.value.problems) == 1 and e.value.problems[0].startswith(line)


@pytest.mark.parametrize(
    "key", ["fp8.margin", "trainer.plugins.fp8.format", "name", "fp8", "storage.comm"]
)
def test_an_explanation_of_words_is_what_the_verb_prints(key: str, capsys: Out) -> None:
    words = ["recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1"]
    explanation = fp8cfg.explain(words, key)
    assert f"{explanation}\n" == said(capsys, "explain", key, *words)
    assert json.loads(json.dumps(explanation.data())) == json.loads(
        said(capsys, "explain", key, *words, "--json")
    )


def test_an_explanation_of_a_recipe_at_hand(capsys: Out) -> None:
    e = fp8cfg.explain(fp8_recipe(), "fp8.margin")
    assert (e.key, e.full_name, e.value, e.effect, e.is_node) == (
        "fp8.margin",
        "trainer.plugins.fp8.margin",
        1,
        "takes effect",
        False,
    )
    assert (
        e.description
        == "Delayed scaling: scales are divided by 2^margin, as headroom. Default 0 (TE)."
        and e.schema["default"] == 0
    )
    assert [(layer.source.value, layer.values[e.full_name]) for layer in e.layers] == [
        ("schema default", 0),
        ("assigned", 1),
    ]
    by_words = said(
        capsys, "explain", "fp8.margin", "recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1"
    )
    assert str(e).partition("set by")[0] == by_words.partition("set by")[0] and str(e).endswith(
        "     0  schema default\n  -> 1  assigned"
    )
    assert [
        layer.source.value for layer in fp8cfg.explain(fp8_recipe(), "fp8.interval").layers
    ] == ["schema default"]
    assert [layer.source.value for layer in fp8cfg.explain(fp8_recipe(), "fp8.format").layers] == [
        "schema default",
        "assigned",
    ], "a preset says it"
    node = fp8cfg.explain(fp8_recipe(), "fp8")
    assert (
        node.is_node
        and node.value["fp8.margin"] == 1
        and str(node)
        == said(
            capsys, "explain", "fp8", *["recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1"]
        )[:-1]
    )
    broken = llama_8b()
    broken.fp8.margin = 1
    assert fp8cfg.explain(broken, "fp8.margin").effect.startswith(
        "refused: fp8.margin=1: has no effect"
    )


@pytest.mark.parametrize(
    ("recipe", "key", "line"),
    [
        (llama_8b(), "fp8.margn", "fp8.margn: no such key; did you mean 'fp8.margin'?"),
        (
            llama_8b(),
            "recipe",
            "recipe: not a key, but a choice by name; `fp8cfg list recipe` shows the names",
        ),
        (llama_8b(), 3, "explain: expected a key such as 'fp8.margin', got int"),
        (
            "recipe=llama_8b",
            "fp8",
            "explain: expected a Recipe, or a list of overrides such as ['recipe=llama_8b', 'fp8.margin=1'], got str",
        ),
        (["fp8.margin=x"], "fp8.margin", "fp8.margin=x: expected an integer, got str"),
    ],
)
def test_mistakes_in_an_explanation(recipe: Any, key: Any, line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.explain(recipe, key)
    assert e.value.problems == [line]


def test_neither_loads_torch() -> None:
    code = (
        "import sys, fp8cfg; r = fp8cfg.compose(['precision=bf16_fp8']); str(fp8cfg.plan(r, gpu='h100')); str(fp8cfg.explain(r, 'fp8.margin')); "
        "print({'torch'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )
