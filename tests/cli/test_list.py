"""`list`: every name that can be chosen, quickly, with what its file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8cfg.__main__ import main
from fp8cfg.cli import help
from fp8cfg.cli import list as verb
from fp8cfg.composition.config_groups import GROUPS, Library
from fp8cfg.schema.recipe_registry import recipes
from tests.support.verbs import ROOT, loads, refused, said

Out = pytest.CaptureFixture[str]


def test_every_name_stands_in_the_list_once_with_a_line() -> None:
    for group in GROUPS:
        found = verb.entries(group, None)
        assert [e.name for e in found] == Library().choices(group)
        assert all(e.about and e.file.is_file() and not e.origin for e in found)


def test_recipes_read_from_source_are_those_that_are_registered() -> None:
    read = {
        name: about
        for file in (ROOT / "recipes").glob("*.py")
        for name, about in help.recipes_in(file).items()
    }
    assert read == {
        name: (make.__doc__ or "").strip().partition("\n")[0] for name, make in recipes().items()
    }


def test_the_overview(capsys: Out) -> None:
    text = said(capsys, "list")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith(" ")] == [
        "recipe",
        "",
        "precision",
        "",
        "data",
        "",
        "task",
    ]
    for line in (
        "  llama_8b          Short for llama31_8b.",
        "  bf16_fp8                     BF16 with FP8 linear layers, delayed scaling...",
        "  tokens   Megatron's .bin/.idx at data.path.",
    ):
        assert line in lines


def test_one_group_alone_is_printed_whole(capsys: Out) -> None:
    text = said(capsys, "list", "precision")
    assert (
        "nemotron_h_bf16_fp8_current  BF16 with FP8 current scaling, two layers at each\n"
        "                             end in BF16 (NeMo\n"
        "                             nemotron_h_bf16_with_fp8_current_scaling_mixed).\n" in text
    )
    assert max(map(len, text.splitlines())) <= 80
    assert said(capsys, "list", "data", "precision").splitlines()[0] == "precision", (
        "groups keep their order"
    )


def test_names_of_ones_own_are_marked_with_their_file(
    capsys: Out, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "recipe/llama_tiny.yaml": "# @package _global_\n\n# too late",
        "recipe/mine.yaml": "# @package _global_\n# Mine.\nrecipe: llama_8b\n",
        "recipe/not-a-name.yaml": "",
        "precision/own.yaml": "# red \x1b[31m, and \xff\n",
    }.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_bytes(text.encode("latin-1"))
    text = said(capsys, "list", "recipe", "--config-dir", "conf")
    assert (
        "llama_tiny        conf/recipe/llama_tiny.yaml\n" in text
        and "mine              conf/recipe/mine.yaml: Mine.\n" in text
    )
    assert "not-a-name" not in text
    assert "  own                          conf/precision/own.yaml: red [31m, and" in said(
        capsys, "list", "--config-dir", "conf"
    )
    data = json.loads(said(capsys, "list", "recipe", "--config-dir", "conf", "--json"))
    assert {
        "name": "mine",
        "about": "Mine.",
        "file": str(tmp_path / "conf/recipe/mine.yaml"),
    } in data["recipe"]


def test_recipes_of_installed_packages(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    from importlib import metadata

    from fp8cfg.schema import recipe_registry

    def theirs() -> None:
        """Theirs, from a package.

        More."""

    monkeypatch.setattr(metadata, "entry_points", lambda group: ["one"])
    monkeypatch.setattr(recipe_registry, "recipes", lambda: {**recipes(), "theirs": theirs})
    assert "theirs            test_list: Theirs, from a package." in said(capsys, "list", "recipe")


def test_json_has_the_whole_line(capsys: Out) -> None:
    data = json.loads(said(capsys, "list", "--json"))
    assert list(data) == ["recipe", "precision", "data", "task"]
    assert {
        "name": "bf16_fp8",
        "about": "BF16 with FP8 linear layers, delayed scaling (NeMo bf16_with_fp8_mixed).",
        "file": str(ROOT / "conf/precision/bf16_fp8.yaml"),
    } in data["precision"]


def test_mistakes(capsys: Out) -> None:
    assert refused(capsys, "list", "presision", "a=1") == [
        "list presision: no such group; did you mean 'precision'?",
        "list: takes no values, drop 'a=1'",
    ]
    assert refused(capsys, "list", "") == ["'': not of the form key=value, nor a path; remove it"]
    assert refused(capsys, "list", "--config-dir", "nowhere") == [
        "--config-dir nowhere: no such folder"
    ]


def test_nothing_slow_is_loaded() -> None:
    assert not loads("list") & {
        "pydantic",
        "hydra",
        "omegaconf",
        "fiddle",
        "torch",
        "yaml",
        "numpy",
    }


def test_groups_of_ones_own_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "slow.yaml").write_text("# A low learning rate.\nlr: 1e-5\n")
    assert main(["list", "optim", "--config-dir", str(tmp_path)]) == 0
    assert (
        " ".join(capsys.readouterr().out.split())
        == f"slow {tmp_path}/optim/slow.yaml: A low learning rate."
    )
    assert main(["list", "optm", "--config-dir", str(tmp_path)]) == 2
    assert "did you mean 'optim'?" in capsys.readouterr().err
