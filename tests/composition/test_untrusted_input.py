"""Files and words from a stranger: no code runs, nothing is read from elsewhere, and nothing takes long."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.schema.foreign_names import CODE_KEYS

MARKER = "marker_of_executed_code"


SECONDS = 30
"""None of these takes one; what is built to take long, forever, or all memory would."""


def refused(text: str) -> str:
    began = time.perf_counter()
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.from_yaml(text)
    assert time.perf_counter() - began < SECONDS
    return str(e.value)


@pytest.mark.parametrize("key", sorted(CODE_KEYS))
def test_keys_that_name_code_are_refused_at_every_door(key: str) -> None:
    assert "cannot name code" in refused(f"recipe: llama_tiny\nmodel: {{{key}: os.system}}\n")
    assert "cannot name code" in refused(f"{key}: os.system\n")
    with pytest.raises(fp8cfg.ConfigError, match="cannot name code"):
        fp8cfg.compose([f"model.{key}=os.system"])
    with pytest.raises(fp8cfg.ConfigError, match="cannot name code"):
        fp8cfg.compose([f"model={{{key}: os.system}}"])


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch " + MARKER + "']",
        "recipe: !!python/name:os.system ''",
        "name: ${oc.env:HOME}",
        "name: ${eval:1}",
        "recipe: ../../etc/passwd",
        "recipe: /etc/passwd",
        "precision: ../precision/bf16",
        "defaults: [{/hydra/launcher: x}]",
        "hydra: {run: {dir: x}}",
        "recipe: llama_tiny\nrecipe: llama_8b",
        "1: 2",
        "- a list",
        "just text",
        "recipe: [llama_tiny]",
        "trainer: {max_steps: 012}x",
        "\x00",
        "a: " + "[" * 2000,
        "a: {" * 500 + "}" * 500,
        "a: " + "x" * 300_000,
    ],
)
def test_a_strangers_yaml_is_one_error(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(text)
    assert not (tmp_path / MARKER).exists()


def test_an_alias_bomb_is_refused_at_once() -> None:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"] + [
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)
    ]
    assert "more than" in refused("\n".join(lines))


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    file.write_text("a: 1\n" * 100_000)
    with pytest.raises(fp8cfg.ConfigError, match="larger than 256 KB"):
        fp8cfg.compose([], file=file)


@pytest.mark.parametrize(
    "word",
    [
        "recipe=../../x",
        "recipe=/etc/passwd",
        "precision=../recipe/x",
        "recipe='a b'",
        "data=a/../b",
    ],
)
def test_choices_cannot_leave_their_folder(word: str) -> None:
    with pytest.raises(fp8cfg.ConfigError, match="not a path"):
        fp8cfg.compose([word])


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text("recipe: llama_tiny\n")
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "leak.yaml").symlink_to(tmp_path / "secret.yaml")
    with pytest.raises(fp8cfg.ConfigError, match="a link that leaves"):
        fp8cfg.compose(["recipe=leak"], config_dir=tmp_path / "mine")


HOSTILE = [
    "hydra: {run: {dir: x}}",
    "hydra: {searchpath: ['file:///tmp']}",
    "hydra: {callbacks: {x: {_target_: os.system}}}",
    "hydra/launcher: evil",
    "defaults: [{override hydra/launcher: evil}, _self_]",
    "defaults: [{/hydra/callbacks: evil}]",
    "_target_: os.system",
    "fp8: {_target_: os.system}",
    "name: ${oc.env:HOME}",
    "name: ${oc.decode:x}",
    "compute: ${now:%Y}",
    "fp8: {exclude: ['${oc.env:HOME}']}",
    "path: ${hydra:runtime.cwd}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_strangers_folder_and_files_reach_neither_hydra_nor_the_environment(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every way in: a recipe file, a folder of presets, a run folder; to run, to sweep, to look."""
    from fp8cfg.__main__ import main

    monkeypatch.chdir(tmp_path)
    for folder in ("recipe", "precision", "data", "checkpoints", "hydra/launcher"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "evil.yaml").write_text(text)
    for name in ("recipe.yaml", "config.yaml", "fp8cfg_config.yaml"):
        (tmp_path / name).write_text(text)
    (tmp_path / "environment.json").write_text("{}")
    mine = ["--config-dir", str(tmp_path)]
    for chosen in (
        ["recipe=evil"],
        ["precision=evil"],
        ["data=evil"],
        ["hydra/launcher=evil"],
        [str(tmp_path / "recipe.yaml")],
    ):
        for way in (["train"], ["sweep"], ["--cfg", "all", "--resolve"]):
            began = time.perf_counter()
            assert main([*way, *chosen, *mine]) == 2, (way, chosen)
            assert time.perf_counter() - began < SECONDS
    (tmp_path / "environment.json").write_text('{"run_format": 2}')  # of a run folder of ours
    for verb in ("rerun", "resume"):
        assert main([verb, str(tmp_path), *mine]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert all(line.startswith("error: ") for line in err.splitlines())
    assert main(["--cfg", "job", *mine]) == 0, "what nobody chose does no harm"


@pytest.mark.parametrize(
    "word",
    [
        "hydra.searchpath=[/tmp]",
        "+hydra.searchpath=[/tmp]",
        "++hydra.searchpath=[pkg://os]",
        "~hydra.searchpath",
    ],
)
def test_no_word_makes_hydra_read_files(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    from fp8cfg.__main__ import main

    for way in (["-m"], ["--cfg", "job"], ["--info", "searchpath"], ["--hydra-help"]):
        assert main([*way, word]) == 2
        assert (
            capsys.readouterr().err
            == f"error: {word}: not accepted; pass your presets as --config-dir FOLDER\n"
        )


def test_a_checkpoint_with_a_strangers_recipe_is_refused() -> None:
    from fp8cfg.schema.recipe import Recipe

    for recipe in ({"hydra": {"run": {"dir": "x"}}}, {"model": {"_target_": "os.system"}}):
        with pytest.raises(fp8cfg.ConfigError, match=r"Hydra's own settings|cannot name code"):
            Recipe(**recipe)


def test_no_module_of_ours_unpickles() -> None:
    import ast

    root = Path(fp8cfg.__file__).parent
    for file in [*root.rglob("*.py"), *(root.parent / "recipes").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "dill", "cloudpickle"} & set(names), file
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {
                    ("torch", "load"),
                    ("hydra", "main"),
                    ("np", "load"),
                    ("yaml", "unsafe_load"),
                }, file
            if isinstance(node, ast.Name):
                assert node.id not in {"eval", "exec"} or file.name == "__init__.py", file


def test_scalars_are_those_of_yaml_1_2() -> None:
    from fp8cfg.schema.safe_files import parse_yaml

    text = "a: on\nb: true\nc: 012\nd: 1:30\ne: 1e-3\nf: 1.5\ng: ~\nh:\nj: 1_000\nk: -3\nn: yes\no: 2020-01-01\ns: 4294967296.0"
    assert parse_yaml(text, "x") == {
        "a": "on",
        "b": True,
        "c": "012",
        "d": "1:30",
        "e": 1e-3,
        "f": 1.5,
        "g": None,
        "h": None,
        "j": "1_000",
        "k": -3,
        "n": "yes",
        "o": "2020-01-01",
        "s": 2.0**32,
    }
    assert fp8cfg.from_yaml("recipe: llama_tiny\ntrainer: {compile: on}").trainer.compile == "on"
    with pytest.raises(
        fp8cfg.ConfigError, match=r"fp8\.enabled=yes: expected true or false, got str"
    ):
        fp8cfg.from_yaml("fp8: {enabled: yes}")
