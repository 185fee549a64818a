"""`diff`: the keys in which two recipes, files or runs differ, with both values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.run_folder.environment import collect_environment
from tests.support.verbs import loads, refused, said

Out = pytest.CaptureFixture[str]


def test_two_recipes(capsys: Out) -> None:
    assert (
        said(capsys, "diff", "recipe=llama_8b", "--", "recipe=llama_8b", "precision=bf16_mxfp8")
        == """\
A  recipe=llama_8b
B  recipe=llama_8b precision=bf16_mxfp8

key          A        B
fp8.enabled  false    true
fp8.scaling  delayed  mxfp8
fp8.format   hybrid   e4m3
fp8.params   false    true
"""
    )


def test_two_graphs(capsys: Out) -> None:
    """In a hundred columns; what a graph does not have would do nothing."""
    words = (
        "recipe=llama_8b",
        "precision=bf16_fp8",
        "--",
        "recipe=llama_8b",
        "precision=bf16_mxfp8",
        "--tree",
    )
    assert (
        said(capsys, "diff", *words).partition("\n\n")[2]
        == """\
leaf                                          A        B
recipe.trainer.plugins.fp8.scaling            delayed  mxfp8
recipe.trainer.plugins.fp8.format             hybrid   e4m3
recipe.trainer.plugins.fp8.margin             0        -
recipe.trainer.plugins.fp8.interval           1        -
recipe.trainer.plugins.fp8.amax_history_len   1024     -
recipe.trainer.plugins.fp8.amax_compute_algo  max      -
recipe.trainer.plugins.fp8.reduce_amax        true     -
recipe.trainer.plugins.fp8.tp_only_amax_red   false    -
recipe.trainer.plugins.fp8.first_step         auto     -
"""
    )
    one = json.loads(
        said(
            capsys,
            "diff",
            "precision=bf16_fp8",
            "backend=te",
            "--",
            "precision=bf16_fp8",
            "backend=te",
            "fp8.margin=1",
            "--tree",
            "--json",
        )
    )
    assert one["leaves"] == {"recipe.trainer.plugins.fp8.margin": [0, 1]}
    assert said(capsys, "diff", "--tree", "--") == "no difference\n"
    assert refused(capsys, "diff", "fp8.margin=1", "--", "--tree") == [
        "fp8.margin=1: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true"
    ]


def test_nothing_is_the_default_recipe_and_the_same_is_no_difference(capsys: Out) -> None:
    assert (
        said(capsys, "diff", "--")
        == "no difference\n"
        == said(capsys, "diff", "recipe=llama_tiny", "--", "precision=bf16")
    )
    assert json.loads(said(capsys, "diff", "--json", "--")) == {
        "a": "the default recipe",
        "b": "the default recipe",
        "keys": {},
    }
    assert json.loads(said(capsys, "diff", "--", "optim.betas=[0.9,0.99]", "--json"))["keys"] == {
        "optim.betas": [[0.9, 0.95], [0.9, 0.99]]
    }


def test_values_too_long_for_a_table_are_not_cut(capsys: Out) -> None:
    words = "fp8.exclude=['layers.0.*','layers.1.mlp.*','*.self_attention.linear_qkv','layers.3.self_attention.*']"
    text = said(capsys, "diff", "precision=bf16_fp8", words, "--", "precision=bf16_fp8")
    assert text.endswith("""
key
fp8.exclude
  A  [layers.0.*, layers.1.mlp.*, *.self_attention.linear_qkv,
     layers.3.self_attention.*]
  B  []
""")


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run folder with a recipe and an environment, without the run."""

    def make(name: str, words: list[str], **changes: Any) -> Path:
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "recipe.yaml").write_text(fp8cfg.to_yaml(fp8cfg.compose(words)))
        (folder / "environment.json").write_text(
            json.dumps({**collect_environment(), "code": None, **changes})
        )
        return folder

    return make


def test_two_runs_with_the_versions_they_ran_with(
    capsys: Out, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run(
        "one",
        [],
        packages={"torch": "2.12.0", "numpy": "2.4.0"},
        python="3.11.1",
        code={"commit": "abc", "dirty": False},
    )
    run(
        "two",
        ["precision=bf16_fp8"],
        packages={"torch": "2.13.0", "numpy": "2.4.0", "msamp": "1"},
        python="3.11.1",
    )
    assert (
        said(capsys, "diff", "one", "two")
        == """\
A  one
B  two

key          A      B
fp8.enabled  false  true
fp8.params   false  true

version       A       B
torch         2.12.0  2.13.0
code          abc     null
code changed  false   null
msamp         null    1
"""
    )
    assert said(capsys, "diff", "two", "precision=bf16", "--", "one", "--json").startswith(
        '{\n "a": "two precision=bf16",'
    )
    assert "version" not in said(capsys, "diff", "one", "--", "two/recipe.yaml"), (
        "a file has no environment"
    )
    assert said(capsys, "diff", "two/recipe.yaml", "two") == "no difference\n"


def test_a_run_in_use_is_compared_too(capsys: Out, run: Any) -> None:
    from fp8cfg.run_folder.run_folder import RunFolder

    folder = run("one", [])
    with RunFolder.open(folder):
        assert said(capsys, "diff", str(folder), str(folder)) == "no difference\n"


def test_a_folder_of_ones_own_is_for_both_sides(capsys: Out, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("recipe: llama_1b\n")
    assert (
        said(capsys, "diff", "recipe=llama_1b", "--", "recipe=mine", "--config-dir", str(tmp_path))
        == "no difference\n"
    )


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_an_environment_that_cannot_be_read_is_one_line(capsys: Out, run: Any, text: str) -> None:
    folder = run("one", [])
    (folder / "environment.json").write_bytes(text.encode("latin-1"))
    (line,) = refused(capsys, "diff", str(folder), str(folder))
    assert line.startswith(f"{folder / 'environment.json'}: ")


def test_an_environment_of_other_shapes(capsys: Out, run: Any) -> None:
    one, two = (
        run("one", [], packages=[1], code="x", python=None),
        run("two", [], packages={}, python={"a": 1}),
    )
    assert "{a: 1}" in said(capsys, "diff", str(one), str(two))


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (
            [],
            [
                "diff: needs -- between the two, as in: fp8cfg diff recipe=llama_8b -- recipe=llama_70b"
            ],
        ),
        (
            ["recipe=llama_8b", "recipe=llama_1b"],
            [
                "diff: needs -- between the two, as in: fp8cfg diff recipe=llama_8b -- recipe=llama_70b"
            ],
        ),
        (
            ["fp8.margn=1", "--", "fp8.fromat=x"],
            [
                "fp8.margn: no such key; did you mean 'fp8.margin'?",
                "fp8.fromat: no such key; did you mean 'fp8.format'?",
            ],
        ),
        (
            ["nowhere", "x.yaml"],
            [
                "nowhere: not a run folder, a recipe file or key=value",
                "x.yaml: cannot be read (No such file or directory)",
            ],
        ),
        (["a.yaml", "b.yaml", "--"], ["b.yaml: one folder or file on each side of --"]),
        (["--", "--"], ["--: write it once, between the two sides"]),
        (["tests", "--", "--jsn"], ["--jsn: no such option; did you mean '--json'?"]),
    ],
)
def test_mistakes(
    capsys: Out, argv: list[str], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(capsys, "diff", *argv) == lines


def test_a_folder_that_is_no_run(capsys: Out, tmp_path: Path) -> None:
    assert refused(capsys, "diff", str(tmp_path), "--") == [
        f"{tmp_path}: not a run folder, {tmp_path / 'recipe.yaml'} is missing; check the path, or list your runs with fp8cfg runs"
    ]


def test_neither_torch_nor_fiddle_is_loaded(run: Any) -> None:
    folder = str(run("one", []))
    assert not loads("diff", folder, folder) & {"torch", "fiddle", "numpy"}
