"""Layers are exact: the last layer is the value, and layers stand in the order in which they act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8cfg
from fp8cfg.composition import overrides
from fp8cfg.composition.layers import Layer, Location, Source, shipped_choices
from fp8cfg.composition.overrides import parser
from fp8cfg.composition.precedence import ResolvedRecipe
from fp8cfg.composition.recipe_yaml import flat, nested, typed
from fp8cfg.recipes import llama_8b, llama_tiny
from fp8cfg.schema import presets
from fp8cfg.schema.keys import PLUGIN, full
from fp8cfg.schema.recipe_registry import recipes
from tests.support.layers import compose_layers, layers_of
from tests.support.overrides import KEYS, value, value_words
from tests.support.verbs import ROOT

MARGIN, INTERVAL = f"{PLUGIN}.fp8.margin", f"{PLUGIN}.fp8.interval"
CHOICES = st.sampled_from(
    [f"recipe={r}" for r in sorted(recipes()) if r != "from_hf"]
    + [f"precision={p}" for p in presets.choices()]
    + ["data=tiny", "data=text"]
)
COMPOSED = [key for key in KEYS if key != "model.path"]
"""Not the folder of recipe=from_hf, which the others refuse."""


def layers(key: str, *words: str, **more: Any) -> list[tuple[str, Any]]:
    found = layers_of(compose_layers(words, **more), key)
    return [(layer.source.value, layer.values[full(key)]) for layer in found]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(CHOICES, max_size=4),
    st.lists(value_words(COMPOSED), min_size=1, max_size=6),
    st.randoms(),
)
def test_the_last_layer_is_the_value_whatever_is_composed(
    chosen: list[str], values: list[tuple[str, dict[str, Any]]], random: Any
) -> None:
    words = [*chosen, *(word for word, _ in values)]
    random.shuffle(words)
    composed = compose_layers(words)
    history = {key: layers_of(composed, key) for key in composed.folded.values}
    assert {key: found[-1].values[key] for key, found in history.items()} == flat(composed.recipe)
    sets = dict(values)
    for key, found in history.items():
        ranks = [_rank(layer) for layer in found]
        assert ranks == sorted(ranks) and ranks.count(0) == 1
        assert [layer.location.text for layer in found if layer.source is Source.COMMAND_LINE] == [
            w for w in words if key in sets.get(w, {})
        ]


@settings(max_examples=12, deadline=None)
@given(
    st.lists(CHOICES, max_size=2),
    st.lists(
        value_words([MARGIN, INTERVAL, "optim.lr", "optim.betas", "name"]), min_size=2, max_size=6
    ),
)
def test_each_further_word_adds_its_layer_on_top(
    chosen: list[str], values: list[tuple[str, dict[str, Any]]]
) -> None:
    words = [*chosen, *(word for word, _ in values)]
    before, after = compose_layers(words[:-1]), compose_layers(words)
    ((key, given),) = values[-1][1].items()
    for k in KEYS:
        said_before, said_after = (
            [layer for layer in layers_of(t, k) if layer.source is not Source.CONFLICT]
            for t in (before, after)
        )
        added = said_after[len(said_before) :]
        assert said_after[: len(said_before)] == said_before
        assert [layer.values[k] for layer in added] == ([typed(k, given)] if k == key else [])


def _rank(layer: Layer) -> int:
    return {
        "schema default": 0,
        "recipe function": 1,
        "recipe file": 1,
        "preset": 1 if layer.chosen_by and layer.chosen_by.file else 2,
        "command line": 3,
        "changed to fit": 4,
    }[layer.source.value]


def test_a_recipe_function_is_one_layer() -> None:
    found = layers_of(compose_layers(["recipe=llama_8b"]), "precision.compute")
    assert [(layer.source, layer.name) for layer in found] == [
        (Source.DEFAULT, ""),
        (Source.RECIPE, "llama_8b"),
    ]
    assert found[-1].chosen_by == Location("recipe=llama_8b")
    assert len(layers_of(compose_layers(["recipe=llama_8b"]), "fp8.margin")) == 1, "nobody sets it"


def test_a_python_assignment_is_shown_as_assigned() -> None:
    recipe = llama_tiny()
    recipe.fp8.margin = 3
    found = fp8cfg.explain(recipe, "fp8.margin").layers
    assert [layer.source for layer in found] == [Source.DEFAULT, Source.ASSIGNED]
    assert "assigned" in str(fp8cfg.explain(recipe, "fp8.margin"))


def test_data_is_laid_over_a_task() -> None:
    """As in conf/config.yaml. This was an AssertionError."""
    found = layers_of(compose_layers(["data=tiny", "task=sft"]), "data.name")
    assert [layer.values["data.name"] for layer in found] == ["stdlib", "stdlib", "chat", "tiny"]
    assert "by task=sft" in str(fp8cfg.explain(["data=tiny", "task=sft"], "data.name"))


def test_a_group_file_may_choose_a_preset_by_its_name_in_nemo(tmp_path: Path) -> None:
    """This was an AssertionError."""
    text = "# @package _global_\ndefaults:\n  - override /precision: bf16-with-fp8-mixed\n"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "fp8.yaml").write_text(text)
    settled = compose_layers(["experiment=fp8"], tmp_path)
    assert settled.recipe.fp8.enabled
    last = layers_of(settled, "fp8.enabled")[-1]
    assert (last.name, last.chosen_by) == (
        "bf16_fp8",
        Location(file=tmp_path / "experiment" / "fp8.yaml"),
    )


def test_problems_of_a_file_and_of_arguments_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("optim: {lrr: 1e-3}\n")
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.compose(["fp8.margn=1"], file=file)
    assert [line.partition(": ")[0] for line in e.value.problems] == ["fp8.margn", f"{file}:1"]


def test_each_argument_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Hydra's grammar, which takes a millisecond for each. One command line was parsed 16 times."""
    arguments = ["recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1"]
    calls: list[str] = []

    def parse(argument: str) -> Any:
        calls.append(argument)
        return parser().parse_override(argument)

    monkeypatch.setattr(overrides, "_parsed_by_hydra", parse)
    fp8cfg.compose(arguments)
    assert calls == arguments


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "recipe/mine.yaml": "# @package _global_\nrecipe: llama_8b\nprecision: own\nfp8:\n  margin: 2\noptim: {lr: 1e-3}\n",
        "recipe/on_top.yaml": "defaults:\n  - mine\n  - /precision: bf16_fp8_current\nfp8.interval: 1\ntrainer: {plugins: {fp8: {margin: 0}}}\n",
        "recipe/llama_tiny.yaml": "recipe: llama_tiny\nname: mine\n",
        "precision/own.yaml": "compute: bf16\nfp8: {enabled: true,\n      interval: 4}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_of_ones_own_with_their_lines_and_bases(folder: Path) -> None:
    traced = compose_layers(["recipe=on_top", "precision=own"], folder)
    assert _told(traced, MARGIN, folder) == [
        ("schema default", 0, None, None),
        ("recipe file", 2, "recipe/mine.yaml", 5),
        ("preset", 0, None, None),
        ("recipe file", 0, "recipe/on_top.yaml", 5),
        ("preset", 0, "precision/own.yaml", None),
    ]
    assert _told(traced, INTERVAL, folder) == [
        ("schema default", 1, None, None),
        ("preset", 4, "precision/own.yaml", 3),
        ("preset", 1, None, None),
        ("recipe file", 1, "recipe/on_top.yaml", 4),
        ("preset", 4, "precision/own.yaml", 3),
    ]
    margin = layers_of(traced, MARGIN)
    current = margin[2]
    assert (
        current.location.file == ROOT / "conf/precision/bf16_fp8_current.yaml"
        and current.location.line(MARGIN) is None
    ), "it does not have the key"
    assert _place(current.chosen_by, MARGIN) == (folder / "recipe/on_top.yaml", 3)
    assert [layer.chosen_by.text for layer in margin if layer.chosen_by][-2:] == [
        "recipe=on_top",
        "precision=own",
    ]
    assert _place(margin[1].chosen_by, MARGIN) == (folder / "recipe/on_top.yaml", 2)
    assert shipped_choices(traced.layers) == {"recipe": "llama_8b"}
    assert [value for _, value in layers("name", folder=folder)] == [
        "unnamed",
        "llama_tiny",
        "mine",
    ]


def _place(location: Location | None, key: str) -> tuple[Path | None, int | None]:
    assert location is not None
    return location.file, location.line(key)


def _told(
    traced: ResolvedRecipe, key: str, folder: Path
) -> list[tuple[str, Any, str | None, int | None]]:
    rows: list[tuple[str, Any, str | None, int | None]] = []
    for layer in layers_of(traced, key):
        file, line = _place(layer.location, key)
        if file is None or not file.is_relative_to(folder):
            rows.append((layer.source.value, layer.values[key], None, None))
        else:
            name = str(file.relative_to(folder))
            rows.append((layer.source.value, layer.values[key], name, line))
    return rows


def test_a_recipe_file_and_what_is_named(folder: Path) -> None:
    file = folder / "recipe/mine.yaml"
    assert layers("optim.lr", "optim.lr=2e-3", folder=folder, file=file) == [
        ("schema default", 3e-4),
        ("recipe file", 1e-3),
        ("command line", 2e-3),
    ]
    whole = folder / "whole.yaml"
    whole.write_text(fp8cfg.to_yaml(llama_8b()))
    assert shipped_choices(compose_layers(file=whole).layers) == {}
    assert shipped_choices(compose_layers().layers) == {}
    more = compose_layers(["data=tiny", "precision=bf16_fp8"], folder, file)
    assert shipped_choices(more.layers) == {
        "recipe": "llama_8b",
        "precision": "bf16_fp8",
        "data": "tiny",
    }


LINES = [  # a recipe file; a key, the line of the file that names the preset of its last layer, and the line that sets it
    ("recipe: llama_tiny\ntrainer.plugins: bf16_fp8\n", "fp8.params", 2, None),
    (
        "recipe: llama_tiny\ntrainer:\n  max_steps: 90\n  plugins: bf16-mixed\n",
        "precision.compute",
        4,
        None,
    ),
    ("trainer.plugins: bf16_fp8\nfp8: {margin: 1}\n", "fp8.margin", None, 2),
    (
        "defaults:\n  - llama_8b\n\n  - override /precision: bf16_fp8\n  - data: tiny\n  - _self_\n",
        "fp8.params",
        4,
        None,
    ),
    (
        "defaults:\n  - llama_8b\n\n  - override /precision: bf16_fp8\n  - data: tiny\n  - _self_\n",
        "data.name",
        5,
        None,
    ),
    ("defaults:\n  - recipe: mine\n    /data@data: tiny\n", "data.name", 3, None),
    ("defaults: [llama_8b,\n  {precision: bf16_fp8}]\nfp8.margin: 2\n", "fp8.margin", None, 3),
    (
        "defaults:\n  - precision: bf16_fp8\nprecision.fp8:\n  margin: 2\ntrainer.plugins.fp8.interval: 3\n",
        "fp8.margin",
        None,
        4,
    ),
    (
        "defaults:\n  - precision: bf16_fp8\nprecision.fp8:\n  margin: 2\ntrainer.plugins.fp8.interval: 3\n",
        "fp8.interval",
        None,
        5,
    ),
    ("optim:\n  eps: 1e-6\n  <<: {lr: 1e-3,\n       eps: 1}\n", "optim.lr", None, 3),
    ("optim:\n  <<: {lr: 1e-3, eps: 1}\n  eps: 1e-6\n", "optim.eps", None, 3),
]


@pytest.mark.parametrize(("text", "key", "by", "at"), LINES)
def test_the_line_of_a_recipe_file_that_names_a_preset_or_sets_a_value(
    text: str, key: str, by: int | None, at: int | None, folder: Path
) -> None:
    file = folder / "lines.yaml"
    file.write_text(text)
    found = compose_layers([], folder, file)
    assert found.recipe == fp8cfg.from_yaml(file, folder)
    last = layers_of(found, key)[-1]
    place = last.chosen_by if by else last.location
    assert (last.source.value, *_place(place, full(key))) == (
        "preset" if by else "recipe file",
        file,
        by or at,
    )


@settings(max_examples=12, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), st.none(), max_size=5), st.data())
def test_a_random_recipe_file_is_traced_to_its_lines(
    keys: dict[str, None], data: st.DataObject
) -> None:
    import tempfile

    from fp8cfg.schema.safe_files import dump_yaml

    values = {key: data.draw(value(key), label=key) for key in keys}
    with tempfile.TemporaryDirectory() as there:
        file = Path(there) / "random.yaml"
        file.write_text(dump_yaml({"recipe": "llama_1b", **nested(values)}), encoding="utf-8")
        composed = compose_layers(file=file)
        lines = file.read_text(encoding="utf-8").splitlines()
        for key in KEYS:
            last = layers_of(composed, key)[-1]
            assert (last.source is Source.FILE) == (key in values)
            if key in values:
                line = last.location.line(key)
                assert last.values[key] == typed(key, values[key]) and line is not None
                assert lines[line - 1].strip().startswith(key.rpartition(".")[2])


def test_layers_have_the_values_of_compose() -> None:
    words = [
        "recipe=llama_8b",
        "fp8={margin: 2}",
        "precision=bf16-with-fp8-mixed",
        "trainer={plugins: {fp8: {margin: 1}}, max_steps: 1e4}",
    ]
    assert compose_layers(words).recipe == fp8cfg.compose(words)
    assert layers("trainer.max_steps", *words)[-1] == ("command line", 10_000)


def test_what_cannot_be_composed_is_refused_as_ever() -> None:
    with pytest.raises(fp8cfg.ConfigError, match="no such key"):
        compose_layers(["fp8.margn=1"])
    assert compose_layers(["fp8.margin=1"]).recipe.fp8.margin == 1, (
        "rules between keys are not asked"
    )


def test_a_file_and_a_base_are_two_recipes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: llama_tiny\n")
    with pytest.raises(fp8cfg.ConfigError, match="file and base are two recipes"):
        fp8cfg.compose(file=file, base=llama_tiny())


def test_a_file_sets_model_path_for_from_hf_only(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: llama_tiny\nmodel:\n  path: ./nomodel\n")
    for compose in (
        lambda: fp8cfg.compose(file=file),
        lambda: fp8cfg.from_yaml(file),
    ):
        with pytest.raises(fp8cfg.ConfigError) as e:
            compose()
        (line,) = e.value.problems
        assert line.startswith(f"{file}:3: model.path=./nomodel: only recipe=from_hf takes")
    exported = llama_tiny()
    exported.model.path = "elsewhere"
    file.write_text(fp8cfg.to_yaml(exported))
    assert fp8cfg.from_yaml(file).model.path == "elsewhere", "an export has every key"
