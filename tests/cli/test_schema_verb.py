"""`schema`: what it accepts is what fp8cfg reads, and what it refuses is what fp8cfg refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fp8cfg
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.recipe_yaml import flat, is_node, nested
from fp8cfg.report.recipe_export import key_schema, preset_schema, recipe_schema
from fp8cfg.schema.keys import short
from fp8cfg.schema.recipe import Recipe, fields
from fp8cfg.schema.safe_files import dump_yaml, parse_yaml, read_yaml
from tests.support.overrides import KEYS, value
from tests.support.verbs import ROOT, loads, refused, said

Out = pytest.CaptureFixture[str]
RECIPE = jsonschema.Draft202012Validator(recipe_schema(Library()))
PRESETS = {
    group: jsonschema.Draft202012Validator(preset_schema(group)) for group in ("precision", "data")
}


@pytest.mark.parametrize("argv", [(), ("recipe",), ("precision",), ("data",)])
def test_what_is_printed_is_a_schema_of_draft_2020_12(capsys: Out, argv: tuple[str, ...]) -> None:
    schema = json.loads(said(capsys, "schema", *argv))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema" and schema[
        "title"
    ].startswith("A ")
    jsonschema.Draft202012Validator.check_schema(schema)


def test_every_shipped_file_is_valid() -> None:
    RECIPE.validate(read_yaml(ROOT / "conf/config.yaml"))
    for group, schema in PRESETS.items():
        files = list((ROOT / "conf" / group).glob("*.yaml"))
        assert files
        for file in files:
            schema.validate(read_yaml(file))


GOOD = [
    "",
    "recipe: llama_8b",
    "recipe: null\nprecision: null\ndata: null",
    "precision: bf16_fp8",
    "precision: bf16-mixed",
    "precision: bf16_with_mxfp8_mixed",
    "precision: {compute: fp16, fp8: {margin: 1}}",
    "fp8: {margin: 1, exclude: ['*.linear_fc2']}",
    "storage: {comm: fp32}",
    "backend: native",
    "opt_level: O2",
    "opt_level: null",
    "data: tiny",
    "data: {name: text, path: /x}",
    "trainer: {plugins: bf16_fp8}",
    "trainer: {plugins: {compute: fp32}}",
    "defaults: [llama_8b, {override /precision: bf16_fp8}, {data: null}, _self_]",
    "defaults: null",
    "defaults: [{optional /precision: bf16}, {/data: [tiny, stdlib]}, /precision/fp16]",
    "optim: {lr: 1, betas: [0.9, 0.99]}",
    "trainer: {max_steps: 1e3}",
    "name: a.b-c",
    "model: {rope_scaling: {factor: 8}, kv_channels: null}",
    # options in any case, precision presets too
    "fp8: {format: HYBRID, amax_compute_algo: Most_Recent}",
    "opt_level: o2",
    "backend: NATIVE",
    "storage: {comm: FP16_scaled}",
    "precision: BF16_FP8",
    "precision: Bf16-With_FP8-mixed",
    "trainer: {plugins: BF16-mixed}",
    "data: {name: TINY}",
    "defaults: [{precision: FP16}]",
    # dotted keys at the top, short and full
    "fp8.margin: 1",
    "trainer.plugins.fp8.margin: 1",
    "precision.fp8.margin: 1",
    "fp8.override_linear_precision: {wgrad: true}",
    "trainer.plugins: bf16_fp8",
    "trainer.plugins: {compute: fp16}",
    "trainer.plugins: bf16_fp8\nfp8: {margin: 1}",
    "trainer.plugins.backend: Native",
    "model.rope_scaling.factor: 8",
    "data: text\ndata.path: x",
    "trainer.strategy: {sequence_parallel: true}",
    "storage.comm: FP16",
    "defaults: []",
    "defaults: [null, {}, {//precision: null}]",
]
BAD = [
    "recipe: lama_8b",
    "recipe: [llama_8b]",
    "precision: bf16_pf8",
    "precision: 5",
    "fp8: {margn: 1}",
    "fp8: {margin: 99}",
    "fp8: {margin: '1'}",
    "fp8: true",
    "fp8: {enabled: yes}",
    "storage: {comm: fp7}",
    "backend: cuda",
    "opt_level: O9",
    "data: nope",
    "trainer: {plugins: nope}",
    "defaults: [nope]",
    "defaults: 5",
    "defaults: [{task: x}]",
    "optim: {lr: 0}",
    "optim: {betas: [0.9]}",
    "optim: {betas: [0.9, 0.95, 0.99]}",
    "margin: 1",
    "name: '../x'",
    "model: {_target_: os.system}",
    "model: {rope_scaling: {factr: 8}}",
    "data: {validation_fraction: 0.5}",
    "trainer: {max_steps: 1.5}",
    "trainer: {max_steps: null}",
    "trainer: {plugins: null}",
    "trainer.plugins: null",
    "trainer.plugins: nope",
    "trainer: {plugins: ''}",
    "trainer.plugins: 5",
    "recipe: 5",
    "recipe: LLAMA_8B",
    "data: TINY",
    "data: ''",
    "fp8: {amax_compute_algo: most-recent}",
    "fp8: {format: hybridd}",
    "fp8.margn: 1",
    "fp8.margin: 99",
    "fp8..margin: 1",
    ".fp8.margin: 1",
    "margin.fp8: 1",
    "fp8: {override_linear_precision.wgrad: true}",
    "trainer: {plugins.fp8.margin: 1}",
    "name.x: 1",
    "model.hidden_size: null",
    "opt_level.x: O1",
    "defaults: {}",
    "defaults: ''",
    "defaults: false",
    "defaults: [5]",
    "defaults: [true]",
    "defaults: [{precision: _self_}]",
    "defaults: [{precision: 5}]",
    "defaults: [[llama_8b]]",
    "defaults: [{data: TINY}]",
    "fp8: null",
    "trainer: null",
    "precision: {fp8: null}",
    "precision: [bf16]",
    "hydra: {}",
    "trainer.plugins.plugins: bf16",
    "backend: {x: 1}",
]


@pytest.mark.parametrize("text", GOOD)
def test_what_fp8cfg_reads_is_valid(text: str) -> None:
    RECIPE.validate(parse_yaml(text, "YAML"))
    _read(text)


@pytest.mark.parametrize("text", BAD)
def test_what_fp8cfg_refuses_is_not_valid(text: str) -> None:
    assert not RECIPE.is_valid(
        yaml.safe_load(text) if "_target_" in text else parse_yaml(text, "YAML")
    )
    with pytest.raises(fp8cfg.ConfigError):
        _read(text)


def _read(text: str) -> Recipe:
    """As `from_yaml`, without the rules between keys, which are not a schema's."""
    from tests.support.layers import recipe_of_data

    return recipe_of_data(parse_yaml(text, "YAML"), Library())


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), st.none(), min_size=1, max_size=6),
    st.booleans(),
    st.data(),
)
def test_any_valid_value_is_valid_and_the_same_to_both(
    keys: dict[str, None], short_names: bool, data: st.DataObject
) -> None:
    values = {key: data.draw(value(key), label=key) for key in keys}
    text = dump_yaml(nested({short(k) if short_names else k: v for k, v in values.items()}))
    RECIPE.validate(parse_yaml(text, "YAML"))
    _read(text)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(KEYS),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 70_000),
        st.floats(-2, 2).filter(lambda x: not x.is_integer()),
        st.text(max_size=3),
        st.lists(st.floats(0, 1), max_size=3),
    ),
)
@example("trainer.compile", False)
def test_any_value_is_valid_exactly_where_fp8cfg_takes_it(key: str, given_value: Any) -> None:
    try:
        _read(dump_yaml(nested({key: given_value})))
    except fp8cfg.ConfigError:
        assert not RECIPE.is_valid(nested({key: given_value}))
    else:
        assert RECIPE.is_valid(nested({key: given_value}))


def test_presets_are_checked_too() -> None:
    assert not PRESETS["precision"].is_valid({"compute": "bf16", "fp8": {"margn": 1}})
    assert not PRESETS["precision"].is_valid({"precision": "bf16"}) and not PRESETS[
        "data"
    ].is_valid({"name": "text", "pth": "x"})


def test_every_key_has_its_meaning_its_default_and_its_bounds() -> None:
    for key in fields():
        if not is_node(key):
            found = key_schema(key)
            assert "\n" not in found["description"] and len(found["description"]) > 5
            default = flat(Recipe())[key]
            assert found["default"] == (list(default) if isinstance(default, tuple) else default)
    assert {
        k: key_schema("trainer.plugins.fp8.margin")[k] for k in ("type", "minimum", "maximum")
    } == {"type": "integer", "minimum": 0, "maximum": 16}
    assert set(recipe_schema(Library())["properties"]) >= {
        "recipe",
        "precision",
        "data",
        "fp8",
        "storage",
        "backend",
        "opt_level",
        "defaults",
        *Recipe.model_fields,
    }


def test_names_of_ones_own(capsys: Out, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text("recipe: llama_8b\n")
    (tmp_path / "recipe/not-a-name.yaml").write_text("")
    own = json.loads(said(capsys, "schema", "--config-dir", str(tmp_path)))
    assert jsonschema.Draft202012Validator(own).is_valid(
        {"recipe": "mine"}
    ) and not RECIPE.is_valid({"recipe": "mine"})
    assert own["properties"]["recipe"]["anyOf"][0]["enum"].count(
        "mine"
    ) == 1 and "not-a-name" not in json.dumps(own)


def test_the_case_of_a_preset_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision/Mine.yaml").write_text("compute: fp16\n")
    schema, library = (
        jsonschema.Draft202012Validator(recipe_schema(Library(tmp_path))),
        Library(tmp_path),
    )
    for name, there in (
        ("Mine", True),
        ("mine", False),
        ("MINE", False),
        ("BF16", True),
        ("bf16-FP8", True),
    ):
        assert (
            schema.is_valid({"precision": name})
            == there
            == (library.problem("precision", name) is None)
        )


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["presision"], ["schema presision: no such schema; did you mean 'precision'?"]),
        (
            ["precision", "data"],
            ["schema precision data: no such schema; did you mean 'precision'?"],
        ),
        (["a=1"], ["schema a=1: no such schema; choose from recipe, precision, data, task"]),
        (["--confg-dir", "x"], ["--confg-dir: no such option; did you mean '--config-dir'?"]),
        (["--config-dir", "nowhere"], ["--config-dir nowhere: no such folder"]),
    ],
)
def test_mistakes(capsys: Out, argv: list[str], lines: list[str]) -> None:
    assert refused(capsys, "schema", *argv) == lines


def test_neither_torch_nor_hydra_is_loaded() -> None:
    assert not loads("schema") & {"torch", "fiddle", "hydra", "omegaconf"}
