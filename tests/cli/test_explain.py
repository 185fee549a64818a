"""`explain`: what a key is, what it does under a recipe, and where its value comes from."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8cfg
from fp8cfg.composition.recipe_yaml import assigned, flat, typed
from fp8cfg.planning.violations import violations
from fp8cfg.recipes import llama_tiny
from fp8cfg.report.key_explanation import effect
from fp8cfg.schema.keys import full, short
from fp8cfg.schema.recipe import Recipe
from tests.support.layers import compose_layers
from tests.support.overrides import value
from tests.support.verbs import ROOT, loads, refused, said

Out = pytest.CaptureFixture[str]


def test_a_key_in_full(capsys: Out) -> None:
    assert (
        said(
            capsys,
            "explain",
            "fp8.margin",
            "recipe=llama_8b",
            "precision=bf16_fp8",
            "fp8={margin: 2}",
            "fp8.margin=1",
        )
        == """\
fp8.margin = 1
  Delayed scaling: scales are divided by 2^margin, as headroom. Default 0 (TE).

  type       integer >= 0 and <= 16; default 0
  effect     takes effect
  example    fp8.margin=1
  full name  trainer.plugins.fp8.margin

set by, in order
     0  schema default
     0  conf/precision/bf16_fp8.yaml:3, by precision=bf16_fp8
     2  command line: fp8={margin: 2}
  -> 1  command line: fp8.margin=1
"""
    )


def test_a_recipe_function_is_named(capsys: Out) -> None:
    assert said(capsys, "explain", "name", "recipe=llama_8b").splitlines()[-3:] == [
        "set by, in order",
        "     unnamed   schema default",
        "  -> llama_8b  recipe function llama_8b, by recipe=llama_8b",
    ]
    assert said(capsys, "explain", "name").splitlines()[-1] == (
        "  -> llama_tiny  recipe function llama_tiny"
    )


def test_files_with_their_bases(
    capsys: Out, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/recipe").mkdir(parents=True)
    (tmp_path / "conf/recipe/base.yaml").write_text(
        "recipe: llama_8b\nfp8: {enabled: true, margin: 3}\n"
    )
    (tmp_path / "top.yaml").write_text("recipe: base\n\nprecision: bf16_fp8_current\n")
    assert said(capsys, "explain", "fp8.margin", "top.yaml", "--config-dir", "conf").splitlines()[
        -4:
    ] == [
        "set by, in order",
        "     0  schema default",
        f"     3  {Path('conf/recipe/base.yaml')}:2, by top.yaml:1",
        "  -> 0  conf/precision/bf16_fp8_current.yaml does not have it, by top.yaml:3",
    ]


@pytest.mark.parametrize(
    ("key", "words", "want"),
    [
        ("fp8.margin", ["precision=bf16_fp8"], "takes effect"),
        ("fp8.margin", ["precision=bf16_fp8", "fp8.margin=1"], "takes effect"),
        (
            "fp8.margin",
            [],
            "no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true",
        ),
        (
            "fp8.margin",
            ["precision=bf16_fp8_current"],
            "no effect with fp8.scaling=current; set fp8.scaling=delayed",
        ),
        ("optim.momentum", [], "no effect with optim.name=adamw"),
        ("optim.betas", [], "takes effect"),
        ("optim.betas", ["optim.name=sgd"], "no effect with optim.name=sgd"),
        ("optim.min_lr", [], "null is 0.0003, 0.1 x optim.lr=0.003"),
        (
            "optim.min_lr",
            ["optim.lr_decay_style=constant"],
            "no effect with optim.lr_decay_style=constant; use cosine or linear",
        ),
        (
            "data.path",
            [],
            "no effect with data=stdlib; set data to its kind: jsonl, csv, parquet, tokens, text, dataset or chat",
        ),
        (
            "model.kv_channels",
            [],
            "null is 64, model.hidden_size=256 / model.num_attention_heads=4",
        ),
        ("storage.weight", ["precision=bf16_fp8"], "auto is fp8 under this recipe"),
        ("storage.comm", ["precision=fp16"], "auto is fp16 under this recipe"),
        (
            "storage.shard",
            ["trainer.devices=8", "trainer.micro_batch_size=2"],
            "auto is zero1 on 8 data-parallel ranks under this recipe",
        ),
        ("storage.shard", [], "auto is none on 1 data-parallel rank under this recipe"),
        (
            "precision.loss_scale",
            [],
            "no effect with precision.compute=bf16; only fp16 has loss scaling",
        ),
        ("precision.loss_scale", ["precision=fp16"], "takes effect"),
        (
            "opt_level",
            ["optim.name=sgd"],
            "other values are refused: needs optim.name=adamw or adam, not sgd (MS-AMP)",
        ),
        ("backend", [], "no effect with fp8.enabled=false; set precision=bf16_fp8"),
        (
            "fp8.multi_head_attention",
            ["precision=bf16_fp8"],
            "other values are refused: needs fp8.dot_product_attention=true",
        ),
        ("fp8.scaling", ["precision=bf16_fp8_current"], "takes effect"),
    ],
)
def test_the_effect_of_a_key(key: str, words: list[str], want: str) -> None:
    assert effect(fp8cfg.compose(words), full(key)) == want


@pytest.mark.parametrize(
    ("words", "value", "want"),
    [
        (
            ["opt_level=O1"],
            False,
            "no effect, opt_level=O1 stores weights in fp16_scaled; remove one of them",
        ),
        (
            ["fp8.params=true", "opt_level=O2"],
            True,
            "refused: fp8.params=true: has no effect, opt_level=O2 stores weights in fp16_scaled; remove one of them",
        ),
        (["opt_level=O3"], True, "takes effect"),
    ],
)
def test_fp8_weights_under_a_level_that_stores_others(
    words: list[str], value: bool, want: str
) -> None:
    found = fp8cfg.explain(["precision=bf16_fp8", *words], "fp8.params")
    assert (found.value, found.effect) == (value, want)
    recipe = llama_tiny()
    recipe.precision, recipe.opt_level = "bf16_fp8", "O1"  # nobody knows who wrote fp8.params
    assert (
        fp8cfg.explain(recipe, "fp8.params").effect
        == "no effect, opt_level=O1 stores weights in fp16_scaled; remove one of them"
    )


def test_a_key_without_effect_is_explained_though_the_recipe_is_refused(capsys: Out) -> None:
    text = said(capsys, "explain", "fp8.margin", "precision=bf16_fp8_current", "fp8.margin=1")
    assert (
        "effect     refused: fp8.margin=1: has no effect with fp8.scaling=current;\n" in text
        and "  -> 1  command line: fp8.margin=1\n" in text
    )


@functools.cache
def inert(*words: str) -> tuple[Recipe, list[str]]:
    recipe = fp8cfg.compose(words)
    assert violations(recipe) == []
    return recipe, [key for key in flat(recipe) if effect(recipe, key).startswith("no effect")]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["precision=bf16_fp8"],
        ["precision=fp16_fp8_current"],
        ["optim.name=sgd", "precision=fp32"],
    ],
    ids=str,
)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_value_of_a_key_without_effect_is_refused_by_the_rules(
    words: list[str], data: st.DataObject
) -> None:
    recipe, keys = inert(*words)
    key = data.draw(st.sampled_from(keys))
    other = data.draw(value(key).filter(lambda v: typed(key, v) != flat(Recipe())[key]))
    with pytest.raises(fp8cfg.ConfigError) as e:
        assigned(recipe, {key: other}).check()
    assert any(
        problem.startswith(f"{short(key)}") and "has no effect" in problem
        for problem in e.value.problems
    )


def test_every_key_is_explained_in_80_columns(capsys: Out) -> None:
    from fp8cfg.report.key_explanation import explained

    composed = compose_layers(["recipe=llama_70b", "precision=bf16_fp8"])
    for key in composed.folded.values:
        assert max(map(len, str(explained(composed, key)).splitlines())) <= 80, key
    for node in (
        "model",
        "trainer",
        "trainer.plugins",
        "trainer.plugins.fp8",
        "trainer.strategy",
        "model.rope_scaling",
    ):
        assert max(map(len, str(explained(composed, node)).splitlines())) <= 80, node


def test_a_node_lists_its_keys(capsys: Out) -> None:
    lines = said(capsys, "explain", "fp8", "precision=bf16_fp8").splitlines()
    assert lines[0] == "fp8: How linear layers run in FP8; off by default."
    assert lines[1] == "  enabled                    true     Whether linear layers run in FP8"
    assert "  override_linear_precision  ...      GEMMs that stay in high precision in..." in lines
    assert len(lines) == 1 + len(fp8cfg.FP8.model_fields)
    assert (
        json.loads(said(capsys, "explain", "storage", "--json"))["values"]["storage.comm"] == "auto"
    )


def test_as_json(capsys: Out) -> None:
    data = json.loads(
        said(capsys, "explain", "fp8.format", "precision=bf16_fp8", "fp8.format=E4M3", "--json")
    )
    assert data == {
        "key": "fp8.format",
        "full_name": "trainer.plugins.fp8.format",
        "value": "e4m3",
        "effect": "takes effect",
        "schema": {
            "default": "hybrid",
            "enum": ["hybrid", "e4m3"],
            "type": "string",
            "description": "hybrid: E4M3 forward, E5M2 for gradients; e4m3: E4M3 everywhere. Default hybrid (TE, NeMo).",
        },
        "layers": [
            {"layer": "schema default", "value": "hybrid", "at": None, "by": None},
            {
                "layer": "preset",
                "value": "hybrid",
                "at": {"file": str(ROOT / "conf/precision/bf16_fp8.yaml"), "line": 3},
                "by": {"text": "precision=bf16_fp8"},
            },
            {
                "layer": "command line",
                "value": "e4m3",
                "at": {"text": "fp8.format=E4M3"},
                "by": None,
            },
        ],
    }


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (
            ["fp8.margn", "fp8.format=x"],
            [
                "fp8.margn: no such key; did you mean 'fp8.margin'?",
                "fp8.format=x: not an option; choose from hybrid, e4m3",
            ],
        ),
        (["margin"], ["margin: no such key; did you mean 'fp8.margin'?"]),
        (["fp8_margin"], ["fp8_margin: no such key; it belongs to fp8.margin"]),
        (
            ["model.head_dim"],
            [
                "model.head_dim: cannot be set, it is model.kv_channels, or model.hidden_size / model.num_attention_heads if that is null"
            ],
        ),
        (
            ["recipe"],
            ["recipe: not a key, but a choice by name; `fp8cfg list recipe` shows the names"],
        ),
        ([], ["explain: needs one key, as in: fp8cfg explain fp8.margin"]),
        (["a", "b"], ["explain: needs one key, as in: fp8cfg explain fp8.margin"]),
        (
            ["fp8.margin", "nowhere.yaml"],
            ["nowhere.yaml: cannot be read (No such file or directory)"],
        ),
        (["fp8.margin", "--jsn"], ["--jsn: no such option; did you mean '--json'?"]),
    ],
)
def test_mistakes(capsys: Out, argv: list[str], lines: list[str]) -> None:
    assert refused(capsys, "explain", *argv) == lines


def test_what_does_not_print_is_quoted(capsys: Out) -> None:
    text = said(capsys, "explain", "data.path", "data=text", 'data.path="\x1b[31m"')
    assert "\x1b" not in text and text.startswith("data.path = '\\x1b[31m'\n")


def test_neither_torch_nor_fiddle_is_loaded() -> None:
    assert not loads("explain", "fp8.margin", "precision=bf16_fp8") & {"torch", "fiddle", "numpy"}


def test_asking_changes_nothing() -> None:
    recipe = llama_tiny()
    effect(recipe, full("fp8.margin"))
    assert recipe == llama_tiny()
