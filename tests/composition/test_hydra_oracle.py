"""Defaults lists against Hydra: a file with entries in any order gives what Hydra itself composes of the same file, and groups of
one's own what Hydra appends to its list."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fp8cfg
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.hydra_application import node
from fp8cfg.composition.recipe_yaml import listed, nested
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import dump_yaml
from tests.support.layers import recipe_of_arguments, recipe_of_data

PRESETS = {
    "precision": ["bf16_fp8", "fp16", "bf16_fp8_current"],
    "data": ["tiny", "text"],
    "recipe": ["llama_tiny", "llama_1b"],
}
PACKAGES = {"precision": "trainer.plugins", "data": "data", "recipe": "_global_"}
OWN = {
    "optim/mine.yaml": "lr: 2.0e-3\nwarmup_steps: 7\n",
    "optim/slow.yaml": "lr: 1.0e-5\n",
    "parallel/two.yaml": "# @package trainer.strategy\ntensor_model_parallel_size: 2\n",
    "experiment/short.yaml": "# @package _global_\ndefaults:\n  - override /precision: fp16\ntrainer:\n  max_steps: 5\n  plugins: {loss_scale: 8.0}\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("conf")
    for name, text in OWN.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module", autouse=True)
def stored() -> Iterator[None]:
    """Hydra's own store with the same choices: recipes and presets as whole nodes, at their homes."""
    from hydra import initialize
    from hydra.core.config_store import ConfigStore

    store, library = ConfigStore.instance(), Library()
    before = dict(store.repo)
    for group, names in PRESETS.items():
        for name in names:
            store.store(name, node(group, name, library), group=group, package=PACKAGES[group])
            if group == "recipe":
                store.store(name, node(group, name, library))  # a sibling of a file at the root
    with initialize(config_path=None, version_base="1.3"):
        yield
    store.repo.clear()
    store.repo.update(before)


def by_hydra(
    config: dict[str, Any],
    words: Sequence[str] = (),
    more: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
) -> Recipe:
    """What Hydra composes of the primary config `config`; `more` are nodes by their path in the store, with packages."""
    from hydra import compose
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    store.store("oracle", config)
    for path, (package, data) in more.items():
        group, _, name = path.rpartition("/")
        store.store(name, data, group=group, package=package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a list without _self_: as Hydra 1.1 and later take it
        found = OmegaConf.to_container(compose("oracle", list(words)))
    assert isinstance(found, dict)
    return Recipe(**{str(k): v for k, v in found.items()})


ENTRIES = st.sampled_from(
    [
        {"/precision": "bf16_fp8"},
        {"/precision": "fp16"},
        {"/precision@trainer.plugins": "bf16_fp8_current"},
        {"/data": "tiny"},
        {"/data@_global_.data": "text"},
        "/precision/fp16",
        {"optional /precision": "bf16_fp8"},
        {"optional /data": "there_is_none"},
        {"/data": None},
        {"/data": ["text", "tiny"]},
        "_self_",
    ]
)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "trainer.plugins.fp8.margin": st.integers(1, 3),
        "trainer.plugins.loss_scale": st.sampled_from([16.0, 32.0]),
        "data.validation_fraction": st.just(0.25),
        "optim.lr": st.just(0.125),
        "name": st.just("own"),
    },
)


@settings(
    max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate]
)  # shrinking takes minutes of Hydra
@given(
    st.sampled_from(PRESETS["recipe"]),
    st.integers(0, 4),
    st.lists(ENTRIES, max_size=4),
    VALUES,
    st.booleans(),
)
def test_a_defaults_list_means_what_it_means_in_hydra(
    recipe: str, at: int, entries: list[Any], values: dict[str, Any], absolute: bool
) -> None:
    defaults = [*entries[:at], {"/recipe": recipe} if absolute else recipe, *entries[at:]]
    text = {"defaults": defaults, **nested(values)}
    try:
        want = by_hydra(text)
    except (
        Exception
    ) as refused:  # what stands twice; a choice that is named twice is the same as once here
        assert any(
            part in str(refused)
            for part in ("Duplicate _self_", "Multiple values", "appears more than once")
        ), refused
        with contextlib.suppress(fp8cfg.ConfigError):
            assert recipe_of_data(text, Library())
        return
    assert recipe_of_data(text, Library()) == want


@pytest.mark.parametrize(
    "defaults",
    [
        ["_self_", {"/recipe": "llama_1b"}],
        [{"/recipe": "llama_1b"}, {"/precision": "fp16"}, {"override /precision": "bf16_fp8"}],
        [
            {"/recipe": "llama_1b"},
            {"/precision": "fp16"},
            "_self_",
            {"override /recipe": "llama_tiny"},
            {"override /precision": "bf16_fp8"},
        ],
        [{"/recipe": "llama_1b"}, "_self_", {"/precision": None}, {"override /precision": "fp16"}],
    ],
)
def test_self_and_override(defaults: list[Any]) -> None:
    text = {"defaults": defaults, "trainer": {"plugins": {"fp8": {"margin": 3}}, "max_steps": 9}}
    assert recipe_of_data(text, Library()) == by_hydra(text)


def test_an_override_acts_in_the_list_of_the_file_below(tmp_path: Path) -> None:
    """Hydra: what stands in a list is chosen otherwise, and the values after it stay."""
    (tmp_path / "recipe").mkdir()
    below = {
        "defaults": ["llama_1b", {"/precision": "bf16_fp8"}, "_self_"],
        "trainer": {"plugins": {"fp8": {"margin": 2}}},
    }
    (tmp_path / "recipe" / "below.yaml").write_text(dump_yaml(below))
    text = {
        "defaults": [{"/recipe": "below"}, {"override /precision": "bf16_fp8_current"}],
        "optim": {"lr": 0.5},
    }
    want = by_hydra(text, more={"recipe/below": ("_global_", below)})
    found = recipe_of_data(text, Library(tmp_path))
    assert found == want and found.fp8.scaling == "current" and found.fp8.margin == 2


@pytest.mark.parametrize(
    "words",
    [
        ["optim=mine"],
        ["+optim=mine", "optim.lr=0.5"],
        ["optim=slow", "precision=fp16"],
        ["parallel=two"],
        ["+experiment=short"],
        ["experiment=short", "precision=bf16_fp8"],
        ["experiment=short", "optim=mine", "recipe=llama_1b"],
        ["precision=bf16_fp8", "+parallel=two", "data=tiny"],
    ],
)
def test_groups_of_ones_own(words: list[str], folder: Path) -> None:
    """Appended to Hydra's list by a plus, which may be left out here."""
    primary = {
        "defaults": [{"recipe": "llama_tiny"}, {"precision": None}, {"data": None}, "_self_"]
    }
    more = {
        "optim/mine": ("optim", {"lr": 2e-3, "warmup_steps": 7}),
        "optim/slow": ("optim", {"lr": 1e-5}),
        "parallel/two": ("trainer.strategy", {"tensor_model_parallel_size": 2}),
        "experiment/short": (
            "_global_",
            {
                "defaults": [{"override /precision": "fp16"}],
                "trainer": {"max_steps": 5, "plugins": {"loss_scale": 8.0}},
            },
        ),
    }
    library = Library(folder)
    appended = [
        f"+{word.lstrip('+')}"
        if library.merging_group(word.lstrip("+").partition("=")[0])
        else word
        for word in words
    ]
    assert recipe_of_arguments(words, library) == by_hydra(primary, appended, more)


REFUSED = {
    "- precision@model.foo: bf16": "defaults: precision@model.foo: packages are fixed, precision is at trainer.plugins; write '/precision: bf16'",
    "- precision@_global_: bf16": "defaults: precision@_global_: packages are fixed, precision is at trainer.plugins; write '/precision: bf16'",
    "- /hydra/launcher: basic": "defaults: /hydra/launcher: Hydra's own settings are not part of a recipe; pass them on the command line",
    "- override hydra/launcher: basic": "defaults: override hydra/launcher: Hydra's own settings are not part of a recipe; pass them on the command line",
    "- opt precision: bf16": "defaults: opt precision: no such keyword 'opt'; choose from override, optional",
    "- precison: bf16": "defaults: precison: no such group; did you mean 'precision'?",
    "- precision: ???": "precision=???: needs a name in this file; a run does not ask for it",
    "- optional precision: [bf16, 5]": "precision=5: needs the name of a preset",
    "- _self_\n- _self_": "defaults: duplicate _self_",
    "- precision: ${data}": "YAML: defaults.precision: interpolation (${data}) is not accepted; write the value",
    "- data: nothing": "data=nothing: no such data preset",
}


@pytest.mark.parametrize("entry", REFUSED)
def test_what_a_defaults_list_cannot_say_is_refused_by_name(entry: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.from_yaml(f"defaults:\n- llama_tiny\n{entry}\n")
    assert len(e.value.problems) == 1 and e.value.problems[0].startswith(REFUSED[entry])


FILES = {
    "precision/far.yaml": (
        "# @package model\ncompute: bf16\n",
        "precision=far",
        "# @package model: packages are fixed, precision is at trainer.plugins; remove",
    ),
    "experiment/none.yaml": (
        "trainer: {max_steps: 5}\n",
        "experiment=none",
        "experiment: not a node of a recipe; start the file with '# @package _global_'",
    ),
    "experiment/typo.yaml": (
        "# @package _global_\ntrainer: {max_step: 5}\n",
        "experiment=typo",
        "trainer.max_step: no such key; did you mean",
    ),
    "experiment/plain.yaml": (
        "# @package _global_\ndefaults: [{/precision: bf16}]\n",
        "experiment=plain",
        "defaults: precision: every recipe already has this choice; write 'override /precision: bf16'",
    ),
    "precision/on_top.yaml": (
        "defaults: [bf16_fp8]\nfp8: {margin: 1}\n",
        "precision=on_top",
        "on_top.yaml:1: defaults: a precision preset cannot have a base; write all its keys here, or put '/precision: NAME'",
    ),
    "optim/on_top.yaml": (
        "defaults: [fast]\nlr: 1e-4\n",
        "optim=on_top",
        "defaults: fast: a file of optim/ cannot have a base; write its keys here",
    ),
    "optim/range.yaml": ("lr: -1\n", "optim=range", "optim.lr=-1: must be more than 0"),
    "optim/code.yaml": (
        "_target_: os.system\n",
        "optim=code",
        "_target_: a recipe cannot name code to run",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_group_that_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    text, word, line = FILES[name]
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(text)
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.compose([word], tmp_path)
    assert (
        len(e.value.problems) == 1
        and e.value.problems[0].startswith(str(tmp_path / name))
        and line in e.value.problems[0]
    )


def test_words_for_groups_that_are_not_there(folder: Path) -> None:
    for word, line in {
        "optim=fast": "optim=fast: no such optim preset; choose from mine, slow",
        "experiment=shrt": "did you mean 'short'?",
        "+experment=short": "experment: no such key",
    }.items():
        with pytest.raises(fp8cfg.ConfigError) as e:
            fp8cfg.compose([word], folder)
        assert line in str(e.value)


def test_a_recipes_file_has_them_in_its_list(folder: Path) -> None:
    text = "defaults: [llama_tiny, {/optim: mine}, {/parallel: two}, _self_]\noptim: {lr: 1}\ntrainer: {devices: 2}\n"
    made = fp8cfg.from_yaml(text, folder)
    assert (
        made.optim.lr,
        made.optim.warmup_steps,
        made.trainer.strategy.tensor_model_parallel_size,
    ) == (1, 7, 2)
    assert listed(made) == listed(
        fp8cfg.compose(["optim=mine", "parallel=two", "optim.lr=1", "trainer.devices=2"], folder)
    )
