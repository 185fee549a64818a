"""`fp8cfg init`: the file composes what was asked for, also with all of its comments taken away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.schema.keys import full
from tests.support.small import small_words
from tests.support.verbs import loads, refused, said

RECIPES = [
    [],
    ["recipe=llama_tiny", "precision=bf16_fp8", "fp8.margin=1", "trainer.max_steps=30"],
    ["recipe=llama_8b", "precision=bf16_mxfp8", "data=jsonl", "data.path=a b.jsonl"],
    ["recipe=qwen3_8b", "precision=fp16_fp8", "task=lora", "lora.targets=[linear_qkv]"],
    ["recipe=llama_70b", "precision=bf16_fp8", "opt_level=O2", "storage.shard=zero1"],
    ["recipe=llama_tiny", "trainer.compile=off", "data.tokenizer='on'"],
]


def written(folder: Path, *words: str) -> Path:
    path = folder / "mine.yaml"
    assert main(["init", str(path), *words]) == 0
    return path


@pytest.mark.parametrize("words", RECIPES, ids=lambda words: " ".join(words[:2]) or "default")
def test_the_file_is_the_recipe_of_the_words(words: list[str], tmp_path: Path) -> None:
    path = written(tmp_path, *words)
    wanted = fp8cfg.compose(words)
    assert fp8cfg.from_yaml(path) == wanted
    text = path.read_text()
    path.write_text(re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE))
    assert path.read_text().count("\n#") < text.count("\n#") - 50
    assert fp8cfg.from_yaml(path) == wanted, "with every key set to the value in its comment"


@pytest.mark.parametrize("words", RECIPES, ids=lambda words: " ".join(words[:2]) or "default")
def test_each_key_is_in_the_file_once_and_has_help(words: list[str], tmp_path: Path) -> None:
    text = written(tmp_path, *words).read_text()
    lines = re.findall(r"^#?([a-z][\w.]*): .*  # (.+)$", text, flags=re.MULTILINE)
    keys = [full(key) for key, _ in lines]
    idle = re.findall(r"[a-z][\w.]+", text.partition("has the reason:")[2].replace("#", ""))
    keys += [full(key) for key in idle]
    keys = [key for key in keys if key not in ("recipe", full("precision"))]
    assert sorted(keys) == sorted(flat(fp8cfg.Recipe()))
    assert all(len(about) > 5 for _, about in lines)
    assert max(map(len, text.splitlines())) <= 130


def test_keys_that_were_passed_come_first_and_are_set(tmp_path: Path) -> None:
    lines = written(tmp_path, *RECIPES[1]).read_text().splitlines()
    keys = [line.split("#")[0].strip() for line in lines if line and not line.startswith("#")]
    assert keys == [
        "recipe: llama_tiny",
        "precision: bf16_fp8",
        "fp8.margin: 1",
        "trainer.max_steps: 30",
    ]


def test_a_key_without_effect_is_only_named(tmp_path: Path) -> None:
    text = written(tmp_path, "precision=bf16").read_text()
    idle = text.partition("has the reason:")[2]
    assert "fp8.margin" in idle and "#fp8.margin: " not in text
    with pytest.raises(fp8cfg.ConfigError, match=r"fp8\.margin=0: has no effect"):
        fp8cfg.compose(["precision=bf16", "fp8.margin=0"])


def test_the_file_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = small_words("precision=bf16_fp8", "trainer.max_steps=2", "trainer.compile=off")
    assert main(["init", "mine", *words]) == 0
    assert main(["check", "mine.yaml"]) == 0
    assert main(["mine.yaml", "log.folder=run"]) == 0
    assert fp8cfg.read_run("run").state == "done"


def test_your_own_presets(tmp_path: Path) -> None:
    (tmp_path / "conf" / "precision").mkdir(parents=True)
    (tmp_path / "conf" / "precision" / "ours.yaml").write_text("fp8: {enabled: true, margin: 2}\n")
    words = ["precision=ours", f"--config-dir={tmp_path}/conf"]
    path = written(tmp_path, *words)
    assert fp8cfg.from_yaml(path) == fp8cfg.compose(words[:1], config_dir=tmp_path / "conf")


def test_an_existing_file_stays_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("kept")
    name = str(tmp_path / "mine")
    assert refused(capsys, "init", name) == [
        f"{path}: exists already; choose another name, or add --force"
    ]
    assert path.read_text() == "kept"
    assert f"wrote {path}" in said(capsys, "init", name, "--force", "optim.lr=1e-4")
    assert fp8cfg.from_yaml(path).optim.lr == 1e-4
    assert [file.name for file in tmp_path.iterdir()] == ["mine.yaml"]
    assert main(["init", str(tmp_path / "a" / "b" / "new.yml")]) == 0
    assert (tmp_path / "a" / "b" / "new.yml").exists()


def test_a_large_recipe_needs_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "big"), "recipe=llama_8b"]) == 0
    assert "note: data" in capsys.readouterr().err


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = "init: needs one name, as in: fp8cfg init mine recipe=llama_8b"
    assert refused(capsys, "init") == [wanted]
    assert refused(capsys, "init", "a", "b") == [wanted]
    assert refused(capsys, "init", "recipe=llama_9b")[0] == wanted
    assert "did you mean 'llama_8b'?" in refused(capsys, "init", "recipe=llama_9b")[1]
    assert refused(capsys, "init", "x.json") == ["x.json: a commented file is YAML; write x.yaml"]
    assert refused(capsys, "init", f"{tmp_path}/x", "fp8.margn=1") == [
        "fp8.margn: no such key; did you mean 'fp8.margin'?"
    ]
    (tmp_path / "x.yaml").mkdir()
    assert refused(capsys, "init", f"{tmp_path}/x", "--force") == [
        f"{tmp_path}/x.yaml: is a folder; choose another name"
    ]
    (tmp_path / "file").write_text("")
    assert main(["init", f"{tmp_path}/file/x"]) == 5
    assert "cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "x.yaml.tmp").exists()


def test_names_in_the_file_are_short_unless_the_preset_has_the_name(tmp_path: Path) -> None:
    text = written(tmp_path, "precision=fp16_fp8").read_text()
    assert "#trainer.plugins.initial_loss_scale: " in text
    assert "#fp8.margin: " in text


def test_it_loads_no_torch(tmp_path: Path) -> None:
    assert "torch" not in loads("init", f"{tmp_path}/mine")
