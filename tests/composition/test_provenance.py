"""Provenance is exact: the last layer is the value, and layers stand in the order in which they were applied."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8cfg
from fp8cfg.composition.provenance import Layer, Recorder, Trace, at_import, trace
from fp8cfg.composition.recipe_yaml import assigned, flat, flat_data, nested, typed
from fp8cfg.recipes import llama_8b, llama_tiny
from fp8cfg.schema import presets
from fp8cfg.schema.keys import PLUGIN, full
from fp8cfg.schema.node import WATCH
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import recipes
from tests.support.overrides import KEYS, value, value_words
from tests.support.verbs import ROOT, line

MARGIN, INTERVAL = f"{PLUGIN}.fp8.margin", f"{PLUGIN}.fp8.interval"
CHOICES = st.sampled_from(
    [f"recipe={r}" for r in sorted(recipes()) if r != "from_hf"]
    + [f"precision={p}" for p in presets.choices()]
    + ["data=tiny", "data=text"]
)
COMPOSED = [key for key in KEYS if key != "model.path"]
"""Not the folder of recipe=from_hf, which the others refuse."""


def layers(key: str, *words: str, **more: Any) -> list[tuple[str, Any]]:
    return [(layer.kind, layer.value) for layer in trace(words, **more).layers[full(key)]]


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
    traced = trace(words)
    assert {key: found[-1].value for key, found in traced.layers.items()} == flat(traced.recipe)
    sets = dict(values)
    for key, found in traced.layers.items():
        ranks = [_rank(layer) for layer in found]
        assert ranks == sorted(ranks) and ranks.count(0) == 1
        assert [layer.at.text for layer in found if layer.kind == "command line"] == [
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
    before, after = trace(words[:-1]), trace(words)
    ((key, given),) = values[-1][1].items()
    for k in KEYS:
        said_before, said_after = (
            [layer for layer in t.layers[k] if layer.kind != "gave way"] for t in (before, after)
        )
        added = said_after[len(said_before) :]
        assert said_after[: len(said_before)] == said_before
        assert [layer.value for layer in added] == ([typed(k, given)] if k == key else [])


def _rank(layer: Layer) -> int:
    return {
        "schema default": 0,
        "recipe function": 1,
        "recipe file": 1,
        "preset": 1 if layer.by.file else 2,
        "command line": 3,
        "gave way": 4,
    }[layer.kind]


STEPS = st.lists(
    st.one_of(
        st.sampled_from(KEYS).flatmap(lambda key: st.tuples(st.just(key), value(key))),
        st.tuples(st.just("precision"), st.sampled_from(presets.choices())),
        st.just(("copy", None)),
        st.just(("deep copy", None)),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_every_statement_of_a_recipe_function_is_recorded_in_order(
    steps: list[tuple[str, Any]],
) -> None:
    expected: dict[str, list[Any]] = {key: [] for key in KEYS}
    held = set[str]()  # keys whose value some statement gave, and not the schema

    def say(key: str, given: Any) -> None:
        expected[key].append(given)
        held.add(key)

    def make() -> Recipe:
        recipe = Recipe()
        for key, new in steps:
            if key == "precision":
                recipe.trainer.plugins = new
                preset = presets.precision_preset(new)
                for k, v in flat(preset, PLUGIN).items():
                    if k in flat_data(preset.model_dump(exclude_unset=True), PLUGIN):
                        say(k, v)
                    elif k in held:  # the preset's node has the default
                        expected[k].append(v)
                        held.remove(k)
            elif "copy" in key:
                recipe = recipe.model_copy(deep=key == "deep copy")
            elif len(str(new)) % 2:
                recipe = assigned(recipe, {key: new})
                say(key, typed(key, new))
            else:
                node: Any = recipe
                *path, leaf = key.split(".")
                for name in path:
                    node = getattr(node, name)
                setattr(node, leaf, new)
                say(key, typed(key, new))
        return recipe

    recorder = Recorder()
    recipe = recorder.run(make)
    for key, last in flat(recipe).items():
        found = [event.value for event in recorder.events(recipe, key)]
        assert found == expected[key] and (found or [flat(Recipe())[key]])[-1] == last
    assert WATCH.get() is None


def test_a_value_is_followed_through_derived_recipes() -> None:
    name, compute = (
        trace(["recipe=llama_8b"]).layers[key] for key in ("name", f"{PLUGIN}.compute")
    )
    file, sizes = ROOT / "recipes/llama.py", ROOT / "recipes/pretraining.py"
    assert [(found.at.file, found.at.text, found.value) for found in name[1:]] == [
        (sizes, "llama_8b > llama31_8b > _pretrain", "llama31_8b"),
        (file, "llama_8b > _renamed", "llama_8b"),
    ]
    assert [found.at.line for found in name[1:]] == [
        line("recipes/pretraining.py", "    return Recipe("),
        line("recipes/llama.py", "base.name = name"),
    ]
    preset = compute[-1]
    assert (preset.kind, preset.at.file, preset.at.line) == (
        "preset",
        ROOT / "conf/precision/bf16.yaml",
        2,
    )
    assert (preset.by.file, preset.by.line) == (
        sizes,
        line("recipes/pretraining.py", "trainer=Trainer(") + 1,
    )


def test_tables_of_a_module_are_placed_where_they_stand() -> None:
    import subprocess
    import sys

    code = (
        "from fp8cfg.composition.provenance import trace; found = trace(['recipe=llama_8b']).layers;"
        "print(*(found[k][-1].at.line for k in ('model.vocab_size', 'model.rope_scaling.factor')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        str(line("recipes/llama.py", part)) for part in ("LLAMA3 = ", "LLAMA31 = ")
    ]


def test_what_was_made_before_recording_enters_where_it_is_taken() -> None:
    old = fp8cfg.Model(vocab_size=512)

    def make() -> Recipe:
        recipe = Recipe()
        recipe.model = old
        recipe.model.vocab_size = 1024
        return recipe

    recorder = Recorder()
    found = recorder.events(recorder.run(make), "model.vocab_size")
    start = inspect.unwrap(make).__code__.co_firstlineno
    assert [(e.value, e.place.line - start, e.place.functions) for e in found] == [
        (512, 2, ("make",)),
        (1024, 3, ("make",)),
    ]


def test_replacing_precision_is_a_layer_of_the_keys_that_it_puts_back() -> None:
    def make() -> Recipe:
        recipe = llama_tiny()
        recipe.fp8.margin = 3
        recipe.precision = fp8cfg.bf16_with_fp8_mixed(fp8={"interval": 2})
        recipe.trainer.plugins = "bf16-mixed"
        return recipe

    recorder = Recorder(at_import())
    recipe = recorder.run(make)
    start = inspect.unwrap(make).__code__.co_firstlineno
    margin, interval = (
        [(e.value, e.place.line - start, e.place.preset) for e in recorder.events(recipe, key)]
        for key in (MARGIN, INTERVAL)
    )
    assert margin == [(3, 2, ""), (0, 3, "bf16_fp8"), (0, 4, "")]
    assert interval == [(2, 3, ""), (1, 4, "")]


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
    traced = trace(["recipe=on_top", "precision=own"], folder)
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
    current = traced.layers[MARGIN][2]
    assert (
        current.at.file == ROOT / "conf/precision/bf16_fp8_current.yaml" and current.at.line is None
    ), "it does not have the key"
    assert (current.by.file, current.by.line) == (folder / "recipe/on_top.yaml", 3)
    assert [layer.by.text for layer in traced.layers[MARGIN]][-2:] == [
        "recipe=on_top",
        "precision=own",
    ]
    assert (traced.layers[MARGIN][1].by.file, traced.layers[MARGIN][1].by.line) == (
        folder / "recipe/on_top.yaml",
        2,
    )
    assert traced.named == {"recipe": "llama_8b"}
    assert [layer.value for layer in trace([], folder).layers["name"]] == [
        "unnamed",
        "llama_tiny",
        "mine",
    ]


def _told(traced: Trace, key: str, folder: Path) -> list[tuple[str, Any, str | None, int | None]]:
    inside = [
        layer.at.file.relative_to(folder)
        if layer.at.file and layer.at.file.is_relative_to(folder)
        else None
        for layer in traced.layers[key]
    ]
    return [
        (x.kind, x.value, str(file) if file else None, x.at.line if file else None)
        for x, file in zip(traced.layers[key], inside, strict=True)
    ]


def test_a_recipe_file_and_what_is_named(folder: Path) -> None:
    file = folder / "recipe/mine.yaml"
    assert layers("optim.lr", "optim.lr=2e-3", config_dir=folder, file=file) == [
        ("schema default", 3e-4),
        ("recipe file", 1e-3),
        ("command line", 2e-3),
    ]
    whole = folder / "whole.yaml"
    whole.write_text(fp8cfg.to_yaml(llama_8b()))
    assert trace([], file=whole).named == {} == trace([]).named
    assert trace(["data=tiny", "precision=bf16_fp8"], file=file, config_dir=folder).named == {
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
    found = trace([], folder, file)
    assert found.recipe == fp8cfg.from_yaml(file, folder)
    last = found.layers[full(key)][-1]
    place = last.by if by else last.at
    assert (last.kind, place.file, place.line) == (
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
        found = trace([], file=file).layers
        lines = file.read_text(encoding="utf-8").splitlines()
    for key in KEYS:
        last = found[key][-1]
        assert (last.kind == "recipe file") == (key in values)
        if key in values:
            assert last.value == typed(key, values[key]) and lines[
                (last.at.line or 0) - 1
            ].strip().startswith(key.rpartition(".")[2])


def test_a_trace_is_of_what_compose_composes() -> None:
    words = [
        "recipe=llama_8b",
        "fp8={margin: 2}",
        "precision=bf16-with-fp8-mixed",
        "trainer={plugins: {fp8: {margin: 1}}, max_steps: 1e4}",
    ]
    assert trace(words).recipe == fp8cfg.compose(words)
    assert layers("trainer.max_steps", *words)[-1] == ("command line", 10_000)


def test_what_cannot_be_composed_is_refused_as_ever() -> None:
    with pytest.raises(fp8cfg.ConfigError, match="no such key"):
        trace(["fp8.margn=1"])
    assert trace(["fp8.margin=1"]).recipe.fp8.margin == 1, "rules between keys are not asked"
