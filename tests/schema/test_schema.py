"""The schema: types, bounds, one home for each fact, and errors that say what to write instead."""

from __future__ import annotations

import typing

import pytest

import fp8cfg
from fp8cfg.recipes import llama_tiny
from fp8cfg.schema.keys import full, short
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe, fields


def refused(statement: typing.Callable[[], object]) -> list[str]:
    with pytest.raises(fp8cfg.ConfigError) as e:
        statement()
    return e.value.problems


def test_precision_has_one_home_with_short_names() -> None:
    r = llama_tiny()
    r.trainer.plugins = fp8cfg.bf16_with_fp8_mixed()
    assert r.precision is r.trainer.plugins
    assert r.fp8 is r.trainer.plugins.fp8 and r.storage is r.trainer.plugins.storage
    r.fp8.margin = 3
    assert r.trainer.plugins.fp8.margin == 3
    r.precision = fp8cfg.fp16_mixed()
    assert r.trainer.plugins.compute == "fp16" and not r.fp8.enabled


def test_a_preset_replaces_everything_about_precision() -> None:
    r = llama_tiny()
    r.precision = fp8cfg.bf16_with_fp8_mixed()
    r.fp8.margin = 2
    r.trainer.plugins = fp8cfg.bf16_with_mxfp8_mixed()
    assert r.fp8.margin == 0 and r.fp8.scaling == "mxfp8" and r.fp8.format == "e4m3"


@pytest.mark.parametrize("name", ["bf16-mixed", "bf16_mixed", "bf16"])
def test_plugins_take_a_preset_name(name: str) -> None:
    assert fp8cfg.Trainer(plugins=name).plugins == fp8cfg.bf16_mixed()
    r = llama_tiny()
    r.trainer.plugins = name
    assert r.precision == fp8cfg.bf16_mixed()


def test_presets_are_fresh_objects() -> None:
    one = fp8cfg.bf16_mixed()
    one.fp8.enabled = True
    assert not fp8cfg.bf16_mixed().fp8.enabled


GOLDEN = [
    ("fp8.margn = 1", "fp8.margn: no such key; did you mean 'fp8.margin'?"),
    ("fp8.margin = True", "fp8.margin=true: expected an integer, got bool"),
    ("fp8.margin = '1'", "fp8.margin=1: expected an integer, got str; write it without quotes"),
    ("fp8.margin = 99", "fp8.margin=99: must be at most 16"),
    ("fp8.margin = -1", "fp8.margin=-1: must be at least 0"),
    ("fp8.format = 'hybird'", "fp8.format=hybird: not an option; did you mean 'hybrid'?"),
    ("fp8.enabled = 1", "fp8.enabled=1: expected true or false, got int; write fp8.enabled=true"),
    (
        "trainer.plugins = 'bf16-mixd'",
        "precision=bf16-mixd: no such precision preset; did you mean 'bf16_mixed'?",
    ),
    ("trainer.fp8_margin = 1", "trainer.fp8_margin: no such key; it belongs to fp8.margin"),
    (
        "trainer.accumulate_grad_batches = 2",
        "trainer.accumulate_grad_batches: cannot be set, it is trainer.global_batch_size / "
        "(trainer.micro_batch_size x data-parallel size)",
    ),
    ("data.seq_length = 8", "data.seq_length: no such key; it belongs to model.seq_length"),
    ("optim.betas = (0.9,)", "optim.betas=[0.9]: expected 2 values, got 1"),
    ("optim.lr = float('inf')", "optim.lr=inf: expected a finite number, got float"),
    ("optim.lr = '1e-3'", "optim.lr=1e-3: expected a number, got str; write it without quotes"),
    ("margin = 1", "margin: no such key; did you mean 'fp8.margin'?"),
    ("trainer.seed = 2**40", "trainer.seed=1099511627776: must be at most 2147483647"),
    ("log.dir = ''", "log.dir=: needs a name"),
    (
        "name = '../x'",
        "name=../x: use only letters, digits, '_', '.' and '-', at most 64 characters",
    ),
    (
        "model._target_ = 'os.system'",
        "model._target_: a recipe cannot name code to run; values name things by registry key, as "
        "in optim.name=adamw",
    ),
]


@pytest.mark.parametrize(("statement", "line"), GOLDEN)
def test_an_assignment_fails_with_one_clear_line(statement: str, line: str) -> None:
    before = llama_tiny()
    recipe = llama_tiny()
    assert refused(lambda: exec(f"recipe.{statement}", {"recipe": recipe})) == [line]
    assert recipe == before, "a refused assignment changes nothing"


def test_all_problems_of_a_constructor_at_once() -> None:
    assert refused(lambda: fp8cfg.FP8(margin=-1, format="x", zz=1)) == [
        "fp8.format=x: not an option; choose from hybrid, e4m3",
        "fp8.margin=-1: must be at least 0",
        "fp8.zz: no such key",
    ]


def test_fp8_arguments_given_to_the_trainer_are_answered_with_where_they_belong() -> None:
    trainer_args, fp8_args = (
        {"max_steps": 10},
        {"fp8_margin": 1, "fp8_params": True, "fp8": "hybrid"},
    )
    lines = refused(
        lambda: fp8cfg.Trainer(plugins=fp8cfg.bf16_with_fp8_mixed(), **trainer_args, **fp8_args)
    )
    assert lines[0] == "trainer.fp8_margin: no such key; it belongs to fp8.margin"
    assert lines[1] == "trainer.fp8_params: no such key; it belongs to fp8.params"
    assert lines[2] == "trainer.fp8: no such key; did you mean 'fp8'?"


def test_options_are_matched_without_case_and_whole_floats_are_integers() -> None:
    r = llama_tiny()
    r.fp8.format = "HYBRID"
    r.precision.opt_level = "o2"
    r.trainer.max_steps = 1e3
    assert (r.fp8.format, r.precision.opt_level, r.trainer.max_steps) == ("hybrid", "O2", 1000)
    assert type(r.trainer.max_steps) is int


def test_every_key_is_documented_with_its_default() -> None:
    for key, info in fields().items():
        assert info.description, key
        is_node = isinstance(info.annotation, type) and issubclass(info.annotation, Node)
        assert is_node or "efault" in info.description, (
            f"{key} does not say where its default comes from"
        )


def test_short_and_full_names_are_inverse() -> None:
    for key in fields():
        assert full(short(key)) == key
    assert short("trainer.plugins.fp8.margin") == "fp8.margin"
    assert full("precision.fp8.margin") == "trainer.plugins.fp8.margin" == full("fp8.margin")


def test_recipes_do_not_share_nodes() -> None:
    one, other = Recipe(), Recipe()
    one.model.rope_scaling.factor = 8.0
    assert other.model.rope_scaling.factor == 1.0


def test_a_mapping_assigned_to_a_node_merges_as_at_the_other_doors() -> None:
    r = llama_tiny()
    r.precision = "bf16_fp8"
    r.fp8 = {"margin": 2, "override_linear_precision": {"wgrad": True}}
    assert (
        r.fp8.enabled
        and r.fp8.params
        and r.fp8.margin == 2
        and r.fp8.override_linear_precision.wgrad
    )
    assert fp8cfg.bf16_with_fp8_mixed(fp8={"margin": 1}).fp8.enabled
    assert refused(lambda: setattr(r, "fp8", {"margn": 1, "margin": -1})) == [
        "fp8.margn: no such key; did you mean 'fp8.margin'?",
        "fp8.margin=-1: must be at least 0",
    ]
    assert r.fp8.margin == 2


def test_copies_are_checked_too() -> None:
    r = llama_tiny()
    assert r.model_copy(update={"fp8": {"enabled": True}}).trainer.plugins.fp8.enabled
    assert not r.fp8.enabled, "the original is as it was"
    assert refused(lambda: r.model_copy(update={"nme": "x"})) == [
        "nme: no such key; did you mean 'name'?"
    ]
    assert refused(lambda: r.model_copy(update={"trainer": None}))


def test_short_names_in_the_constructor_and_derived_values() -> None:
    r = Recipe(precision="bf16_fp8", fp8={"margin": 1}, backend="native")
    assert (
        r.trainer.plugins.fp8.margin == 1
        and r.fp8.enabled
        and r.trainer.plugins.backend == "native" == r.backend
    )
    r.opt_level = "O2"
    assert r.precision.opt_level == "O2"
    assert refused(lambda: setattr(r.model, "head_dim", 3))[0].startswith(
        "model.head_dim: cannot be set, it is"
    )
    assert refused(lambda: setattr(r.optim, "end_lr", 1.0))[0].startswith(
        "optim.end_lr: cannot be set"
    )


def test_the_schemas_own_defaults_break_no_rule() -> None:
    Recipe().check()
