"""Three doors, one object: the command line, YAML and Python give equal recipes and equal errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8cfg
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.hydra_application import NAME, application
from fp8cfg.composition.sweep_overrides import read
from fp8cfg.recipes import llama_8b, llama_tiny
from fp8cfg.schema.presets import choices
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import recipes
from tests.support.every_recipe import every_recipe


def problems(*words: str, **more: object) -> list[str]:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.compose(words, **more)
    return e.value.problems


def by_hand() -> Recipe:
    r = llama_8b()
    r.trainer.plugins = fp8cfg.bf16_with_fp8_mixed()
    r.fp8.margin = 1
    return r


@pytest.mark.parametrize(
    "words",
    [
        ["recipe=llama_8b", "precision=bf16_fp8", "fp8.margin=1"],
        ["fp8.margin=1", "precision=bf16_fp8", "recipe=llama_8b"],
        ["recipe=llama_8b", "precision=bf16_fp8", "trainer.plugins.fp8.margin=1"],
        ["recipe=llama_8b", "precision=bf16_fp8", "precision.fp8.margin=1"],
        ["recipe=llama_8b", "precision=bf16_fp8", "fp8={margin: 1}"],
        ["recipe=llama_8b", "trainer.plugins=bf16_with_fp8_mixed", "fp8.margin=1"],
        ["recipe=llama_8b", "precision=bf16-with-fp8-mixed", "fp8.margin=5", "fp8.margin=1"],
    ],
)
def test_words_equal_python(words: list[str]) -> None:
    assert fp8cfg.compose(words) == by_hand()


@pytest.mark.parametrize(
    "text",
    [
        "recipe: llama_8b\nprecision: bf16_fp8\nfp8: {margin: 1}",
        "defaults: [llama_8b, {override /precision: bf16_fp8}, _self_]\nfp8: {margin: 1}",
        "recipe: llama_8b\ntrainer: {plugins: bf16-with-fp8-mixed}\nprecision: {fp8: {margin: 1}}",
        "recipe: llama_8b\nprecision: bf16_fp8\ntrainer:\n  plugins:\n    fp8:\n      margin: 1",
    ],
)
def test_yaml_equals_python(text: str) -> None:
    assert fp8cfg.from_yaml(text) == by_hand()


@pytest.mark.parametrize("words", every_recipe(), ids=" ".join)
def test_every_recipe_survives_yaml(words: tuple[str, ...]) -> None:
    made = recipes()[words[0].removeprefix("recipe=")]()
    assert fp8cfg.compose(words) == made == fp8cfg.from_yaml(fp8cfg.to_yaml(made))


@pytest.mark.parametrize("name", choices())
def test_every_preset_survives_yaml(name: str) -> None:
    r = fp8cfg.compose([f"precision={name}", "model.num_layers=32"])
    assert fp8cfg.from_yaml(fp8cfg.to_yaml(r)) == r


VALUES = {
    "fp8.margin": st.integers(0, 16),
    "fp8.amax_history_len": st.integers(2, 65536),
    "fp8.first_step": st.sampled_from(["te", "in_time"]),
    "optim.lr": st.floats(1e-8, 10, allow_nan=False),
    "trainer.seed": st.integers(0, 2**31 - 1),
    "fp8.exclude": st.lists(st.text("abc.*_-", min_size=1, max_size=8), max_size=3),
    "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    "fp8.min_coverage": st.floats(0, 1),
    "data.validation_fraction": st.floats(0.001, 0.499),
}


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_the_three_doors_agree_on_any_values(values: dict[str, object]) -> None:
    python = llama_tiny()
    python.precision = "bf16_fp8"
    python.optim.min_lr = 0.0
    for key, value in values.items():
        node, _, leaf = key.rpartition(".")
        setattr(getattr(python, node) if node else python, leaf, value)
    words = ["precision=bf16_fp8", "optim.min_lr=0"] + [
        f"{k}={_spelled(v)}" for k, v in values.items()
    ]
    assert fp8cfg.compose(words) == python
    assert fp8cfg.from_yaml(fp8cfg.to_yaml(python)) == python


@pytest.mark.parametrize(
    "name",
    ["1e5", "012", "on", "1.5", "null", "true", "1_000", "0x10", "2020-01-01", "yes", "1.e3"],
)
def test_names_that_look_like_numbers_survive_yaml(name: str) -> None:
    r = llama_tiny()
    r.name = name
    assert fp8cfg.from_yaml(fp8cfg.to_yaml(r)) == r


def _spelled(value: object) -> str:
    if isinstance(value, list):
        return "[" + ",".join(f"'{v}'" for v in value) + "]"
    return f"'{value}'" if isinstance(value, str) else repr(value)


GOLDEN = [
    ("fp8.margn=1", "fp8.margn: no such key; did you mean 'fp8.margin'?"),
    ("margin=1", "margin: no such key; did you mean 'fp8.margin'?"),
    ("fp8.margin=abc", "fp8.margin=abc: expected an integer, got str"),
    ("fp8.margin=99", "fp8.margin=99: must be at most 16"),
    (
        "precision=bf16_pf8",
        "precision=bf16_pf8: no such precision preset; did you mean 'bf16_fp8'?",
    ),
    ("recipe=lama_8b", "recipe=lama_8b: no such recipe; did you mean 'llama_8b'?"),
    ("data=stdlb", "data=stdlb: no such data preset; did you mean 'stdlib'?"),
    ("fp8=true", "fp8=true: expected keys of fp8; write fp8.enabled=true"),
    ("precision=5", "precision=5: expected the name of a preset"),
    ("+fp8.margin=1", "+fp8.margin=1: fp8.margin already exists; remove the +: fp8.margin=1"),
    ("+fp8.margin=one", "fp8.margin=one: expected an integer, got str"),
    ("++recipe=llama_8c", "recipe=llama_8c: no such recipe; did you mean 'llama_8b'?"),
    ("~fp8.margi", "fp8.margi: no such key; did you mean 'fp8.margin'?"),
    ("~fp8.margin", "~fp8.margin: keys cannot be removed; set fp8.margin to its default instead"),
    ("fp8.margin", "fp8.margin: needs a value, as in fp8.margin=VALUE"),
    (
        "fp8.margin=0,1",
        "fp8.margin=0,1: several values are a sweep, but a run takes one; run fp8cfg sweep fp8.margin=0,1",
    ),
    ("precision@x=bf16", "precision@x=bf16: packages are fixed; write precision=bf16"),
    ("mixed_precision=fp8", "mixed_precision=fp8: no such key; set precision=bf16_fp8"),
    ("fp8_recipe=tensorwise", "fp8_recipe=tensorwise: no such key; set fp8.scaling=current"),
    ("trainer.precision=bf16", "trainer.precision=bf16: no such key; set precision=bf16"),
    ("optimization_level=O2", "optimization_level: no such key; it belongs to opt_level"),
    ("hydra.run.dir=x", "hydra.run.dir=x: Hydra's own settings are not part of a recipe"),
    ("name=${oc.env:HOME}", "name=${oc.env:HOME}: interpolation is not accepted; write the value"),
]


@pytest.mark.parametrize(("word", "line"), GOLDEN)
def test_a_wrong_word_is_answered_with_one_line(word: str, line: str) -> None:
    assert problems(word) == [line]


def test_all_wrong_words_at_once() -> None:
    words = [word for word, _ in GOLDEN]
    assert problems(*words) == [line for _, line in GOLDEN]
    assert problems("fp8={margn: 1, margin: x}") == [
        "fp8.margn: no such key; did you mean 'fp8.margin'?",
        "fp8.margin=x: expected an integer, got str",
    ]


def test_rules_are_checked_at_every_door() -> None:
    line = "fp8.margin=1: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true"
    assert problems("fp8.margin=1") == [line]
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.from_yaml("recipe: llama_tiny\nfp8: {margin: 1}")
    assert e.value.problems == [line]
    r = llama_tiny()
    r.fp8.margin = 1
    with pytest.raises(fp8cfg.ConfigError) as e:
        r.check()
    assert e.value.problems == [line]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "precision").mkdir()
    (tmp_path / "recipe" / "my_8b.yaml").write_text(
        "recipe: llama_8b\nprecision: mine\nfp8: {margin: 2}\noptim: {lr: 1e-3}\n"
    )
    (tmp_path / "recipe" / "my_hydra.yaml").write_text(
        "# @package _global_\ndefaults:\n  - my_8b\n  - _self_\nfp8: {margin: 3}\n"
    )
    (tmp_path / "recipe" / "llama_tiny.yaml").write_text("recipe: llama_tiny\nname: mine\n")
    (tmp_path / "precision" / "mine.yaml").write_text(
        "compute: bf16\nfp8: {enabled: true, amax_history_len: 16}\n"
    )
    return tmp_path


def test_a_folder_of_ones_own(folder: Path) -> None:
    want = llama_8b()
    want.precision = fp8cfg.Precision(fp8={"enabled": True, "amax_history_len": 16, "margin": 2})
    want.optim.lr = 1e-3
    assert fp8cfg.compose(["recipe=my_8b"], config_dir=folder) == want
    want.fp8.margin = 3
    assert fp8cfg.compose(["recipe=my_hydra"], config_dir=folder) == want
    want.fp8.margin = 0
    assert fp8cfg.compose(["recipe=my_8b", "precision=mine"], config_dir=folder) == want, (
        "a preset replaces the recipe's precision"
    )
    assert fp8cfg.compose([], config_dir=folder).name == "mine", (
        "a file of a shipped recipe's name builds on that recipe"
    )
    assert problems("recipe=my_8", config_dir=folder) == [
        "recipe=my_8: no such recipe; did you mean 'my_8b'?"
    ]


def test_the_last_choice_of_a_group_wins_even_if_it_is_null(folder: Path) -> None:
    (folder / "optim").mkdir()
    (folder / "optim" / "hot.yaml").write_text("lr: 1e-2\n")
    (folder / "mode").mkdir()
    (folder / "mode" / "fast.yaml").write_text(
        "# @package _global_\ndefaults: [override /precision: bf16_fp8]\n"
    )
    for words in (
        ["recipe=llama_8b", "recipe=null"],
        ["precision=bf16_fp8", "precision=null"],
        ["task=lora", "task=null"],
        ["optim=hot", "optim=null"],
        ["mode=fast", "precision=null"],
    ):
        assert fp8cfg.compose(words, config_dir=folder) == fp8cfg.compose(config_dir=folder), words
    assert fp8cfg.compose(["precision=null", "precision=bf16_fp8"]).fp8.enabled


def test_options_in_a_list_match_without_case() -> None:
    assert fp8cfg.compose(["log.loggers=[WandB]"]).log.loggers == ("wandb",)


def test_a_recipe_file_takes_the_place_of_recipe(folder: Path) -> None:
    file = folder / "recipe" / "my_8b.yaml"
    assert fp8cfg.compose(["fp8.margin=4"], config_dir=folder, file=file).fp8.margin == 4
    assert problems("recipe=llama_8b", config_dir=folder, file=file) == [
        "recipe=llama_8b: a recipe is already set; remove one of them"
    ]


def test_errors_in_a_file_name_the_file(folder: Path) -> None:
    bad = folder / "recipe" / "bad.yaml"
    bad.write_text("recipe: llama_8b\nfp8: {formt: x}\noptim: {lr: hello}\n")
    assert sorted(problems("recipe=bad", config_dir=folder)) == [
        f"{bad}:2: fp8.formt: no such key; did you mean 'fp8.format'?",
        f"{bad}:3: optim.lr=hello: expected a number, got str",
    ]
    bad.write_text("fp8: {margin: 1}\ntrainer: {plugins: {fp8: {margin: 2}}}\n")
    assert problems("recipe=bad", config_dir=folder) == [
        f"{bad}:2: trainer.plugins.fp8.margin: set twice, by its short and its full name"
    ]
    (folder / "recipe" / "one.yaml").write_text("recipe: two\n")
    (folder / "recipe" / "two.yaml").write_text("recipe: one\n")
    assert "build on one another in a circle" in problems("recipe=one", config_dir=folder)[0]


def test_a_python_recipe_through_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from fp8cfg.schema import recipe_registry

    class Point:
        def load(self) -> None:
            @fp8cfg.recipe
            def my_python_recipe() -> Recipe:
                r = llama_tiny()
                r.name = "my_python_recipe"
                return r

    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [Point()] if group == "fp8cfg.recipes" else []
    )
    monkeypatch.setattr(recipe_registry, "_RECIPES", dict(recipes()))
    recipe_registry._import_recipes.cache_clear()
    assert fp8cfg.compose(["recipe=my_python_recipe"]).name == "my_python_recipe"
    recipe_registry._import_recipes.cache_clear()


def hydra_composes(*words: str) -> None:
    """Composes by a Hydra session of its own, as a sweep does."""
    from hydra.types import RunMode

    sweep = read(words, Library())
    with application(sweep.nodes) as hydra:
        hydra.compose_config(NAME, sweep.overrides, RunMode.RUN, with_log_configuration=False)


def test_a_session_leaves_no_trace_in_hydra() -> None:
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    hydra_composes()
    before = set(ConfigStore.instance().repo)
    hydra_composes("precision=bf16_fp8")
    assert set(ConfigStore.instance().repo) == before
    assert not {"recipe", "precision", "data"} & before
    assert GlobalHydra.instance().hydra is None


def test_composing_inside_a_hydra_application() -> None:
    from hydra import initialize, version
    from hydra.core.global_hydra import GlobalHydra

    before = version.getbase()
    with initialize(config_path=None, version_base="1.2"):
        outer, base = GlobalHydra.instance().hydra, version.getbase()
        hydra_composes("precision=bf16_fp8")
        assert GlobalHydra.instance().hydra is outer and version.getbase() == base
    version.VersionBase.instance().version_base = before


def test_nothing_heavy_is_loaded() -> None:
    import subprocess

    code = (
        "import sys, fp8cfg; heavy = {'torch','hydra','fiddle','omegaconf','pydantic'} & set(sys.modules); assert not heavy, heavy;"
        "r = fp8cfg.compose(['precision=bf16_fp8']); fp8cfg.lower(r); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_yaml_without_a_recipe_builds_on_the_default_one() -> None:
    assert fp8cfg.from_yaml("precision: bf16_fp8\nfp8: {margin: 1}") == fp8cfg.compose(
        ["precision=bf16_fp8", "fp8.margin=1"]
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("defaults: 5", "defaults=5: expected a list"),
        ("defaults: llama_8b", "defaults=llama_8b: expected a list"),
        ("defaults: [llama_8b, llama_1b]", "recipe: given twice, as llama_8b and as llama_1b"),
        (
            "precision: fp16\ntrainer: {plugins: bf16_fp8}",
            "precision: given twice, as fp16 and as bf16_fp8",
        ),
        ("a: &a [*a]", "not valid YAML"),
    ],
)
def test_yaml_that_says_two_things_or_nothing(text: str, part: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.from_yaml(text)
    assert len(e.value.problems) == 1 and part in str(e.value)


def test_misuse_from_python_is_one_line() -> None:
    for wrong in ("recipe=llama_tiny", [1]):
        with pytest.raises(fp8cfg.ConfigError, match="expected a list of overrides"):
            fp8cfg.compose(wrong)
    with pytest.raises(fp8cfg.ConfigError, match="expected a Recipe, got str"):
        fp8cfg.build("llama_tiny")
    assert problems("reciep=llama_tiny") == ["reciep: no such key; did you mean 'recipe'?"]


def test_yaml_problems_come_at_once() -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.from_yaml("recipe: nope\nprecision: bf16_pf8\nfp8: {margn: 1}\noptim: {lr: x}")
    assert sorted(line.split(":")[0] for line in e.value.problems) == [
        "fp8.margn",
        "optim.lr=x",
        "precision=bf16_pf8",
        "recipe=nope",
    ]


@pytest.mark.parametrize("path", ["fü.txt", "größe/наборы 1", "データ", "u\u0308"])
def test_a_path_has_letters_of_any_script(path: str) -> None:
    assert (
        fp8cfg.compose(["data=text", f"data.path={path}", f"log.folder={path}"]).data.path == path
    )
    assert fp8cfg.compose(["data=text", f'data.path="{path}"']).data.path == path
    swept = read(["data=text", f"data.path={path}", "optim.lr=0.1,0.2"], Library(None))
    assert [fp8cfg.compose(words).data.path for words in swept.combinations] == [path] * 2
