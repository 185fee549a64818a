"""Tasks: a choice of NeMo's fine-tuning defaults at the three doors, which goes before the recipe and behind the user's words."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.composition.layers import Location, Source
from fp8cfg.recipes import llama_8b, llama_tiny, qwen3_8b
from fp8cfg.schema.data import Data
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import CONF
from fp8cfg.training.data import run_data
from tests.support.layers import compose_layers, layers_of

NEMO = {  # default_finetune_recipe, default_finetune_trainer and llama3_8b.finetune_recipe of NeMo 2.0
    "optim.min_lr": 0,
    "optim.betas": [0.9, 0.98],
    "optim.weight_decay": 0.1,
    "optim.warmup_steps": 50,
    "trainer.max_steps": 1000,
    "trainer.global_batch_size": 128,
    "trainer.val_check_interval": 30,
    "model.seq_length": 2048,
}


def of(recipe: Recipe, key: str) -> object:
    node, leaf = key.split(".")
    value = getattr(getattr(recipe, node), leaf)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("task", "lr"), [("sft", 5e-6), ("lora", 1e-4)])
def test_a_task_has_nemos_defaults_at_three_doors(task: str, lr: float, tmp_path: Path) -> None:
    recipe = fp8cfg.compose(["recipe=llama_8b", f"task={task}"])
    assert {key: of(recipe, key) for key in NEMO} == NEMO and recipe.optim.lr == lr
    assert recipe.lora.enabled == (task == "lora") and (recipe.lora.rank, recipe.lora.alpha) == (
        8,
        16,
    )
    (tmp_path / "listed.yaml").write_text(f"defaults: [llama_8b, {{/task: {task}}}]\n")
    assert (
        recipe
        == llama_8b(task=task)
        == fp8cfg.from_yaml(f"recipe: llama_8b\ntask: {task}\n")
        == fp8cfg.from_yaml(tmp_path / "listed.yaml")
    )
    assert fp8cfg.from_yaml(fp8cfg.to_yaml(recipe)) == recipe


def test_words_go_before_a_task_and_smaller_recipes_keep_their_sizes() -> None:
    recipe = fp8cfg.compose(
        ["optim.lr=0.001", "recipe=llama_8b", "task=lora", "model.seq_length=4096"]
    )
    assert recipe == llama_8b(task="lora", optim={"lr": 0.001}, model={"seq_length": 4096})
    tiny, plain = fp8cfg.compose(["recipe=llama_tiny", "task=sft"]), llama_tiny()
    assert (tiny.trainer.max_steps, tiny.trainer.global_batch_size, tiny.model) == (
        plain.trainer.max_steps,
        plain.trainer.global_batch_size,
        plain.model,
    )
    assert (tiny.optim.lr, tiny.optim.warmup_steps) == (
        5e-6,
        plain.optim.warmup_steps,
    ) and tiny == llama_tiny(task="sft")
    assert (
        fp8cfg.compose(["recipe=qwen3_8b", "task=pretrain"])
        == qwen3_8b(task="pretrain")
        == qwen3_8b()
    )
    assert fp8cfg.compose(["task=lora", "trainer.max_steps=20"]).optim.warmup_steps == 20, (
        "what a task says gives way"
    )


@pytest.mark.parametrize("task", ["sft", "lora"])
def test_what_stays_under_a_task_is_still_of_the_file(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("word.yaml").write_text("recipe: llama_tiny\ntrainer: {max_steps: 3}\n")
    Path("listed.yaml").write_text(
        f"defaults: [llama_tiny, _self_, {{/task: {task}}}]\ntrainer: {{max_steps: 3}}\n"
    )
    for argv in (["word.yaml", f"task={task}"], ["listed.yaml"]):
        assert main(["check", *argv]) == 0, capsys.readouterr().err
        assert capsys.readouterr().err.startswith("note: optim.warmup_steps 20 -> 3: "), argv
    Path("word.yaml").write_text(
        "recipe: llama_tiny\ntrainer: {max_steps: 3}\noptim: {warmup_steps: 5}\n"
    )
    assert main(["check", "word.yaml", f"task={task}"]) == 2, "both are the user's"


def test_the_task_is_the_author(tmp_path: Path) -> None:
    composed = compose_layers(["recipe=llama_8b", "task=lora"])
    said = yaml.safe_load((CONF / "task/lora.yaml").read_text())
    for key in [f"{node}.{leaf}" for node, values in said.items() for leaf in values]:
        last = layers_of(composed, key)[-1]
        assert last.chosen_by == Location("task=lora"), key
        assert last.location.file == CONF / "task/lora.yaml", key
    (tmp_path / "mine.yaml").write_text("recipe: llama_8b\ntask: lora\noptim: {lr: 0.01}\n")
    composed = compose_layers(file=tmp_path / "mine.yaml")
    chosen_by = layers_of(composed, "lora.enabled")[-1].chosen_by
    assert chosen_by and chosen_by.file == tmp_path / "mine.yaml"
    assert layers_of(composed, "optim.lr")[-1].source is Source.FILE


def test_a_task_of_ones_own_and_one_in_an_experiment(tmp_path: Path) -> None:
    for folder, text in (
        ("task", "optim: {lr: 0.5}\n"),
        ("experiment", "# @package _global_\ndefaults: [override /task: lora]\nlora: {rank: 2}\n"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.yaml").write_text(text)
    assert fp8cfg.compose(["task=mine"], config_dir=tmp_path).optim.lr == 0.5
    recipe = fp8cfg.compose(["+experiment=mine"], config_dir=tmp_path)
    assert (recipe.lora.enabled, recipe.lora.rank, recipe.optim.lr) == (True, 2, 1e-4)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["task=lra"], "task=lra: no such task; did you mean 'lora'?"),
        (["+task=lora"], "+task=lora: task already exists; remove the +: task=lora"),
        (["peft.dim=4"], "peft.dim: no such key; it belongs to lora.rank"),
        (
            ["lora.target_modules=[q]"],
            "lora.target_modules: no such key; it belongs to lora.targets",
        ),
        (["task=1"], "task=1: expected the name of a preset"),
    ],
)
def test_mistakes_have_one_line(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as e:
        fp8cfg.compose(words)
    assert e.value.problems[0].startswith(line) and len(e.value.problems) == 1


def test_mistakes_in_python() -> None:
    with pytest.raises(ConfigError, match=r"task=lra: no such task; did you mean 'lora'\?"):
        llama_8b(task="lra")
    with pytest.raises(ConfigError, match="peft_scheme: no such key; it belongs to task=lora"):
        llama_8b(peft_scheme="lora")


def test_fine_tuning_without_weights_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fp8cfg"):
        fp8cfg.compose(["task=sft"])
        fp8cfg.compose(["task=pretrain"])
        fp8cfg.compose(["task=lora", "model.weights=somewhere"])
    assert [r.message for r in caplog.records] == [
        "note: task=sft: model.weights=null, so it starts from random weights; set model.weights=FOLDER"
    ]


def test_sft_trains_on_conversations_unless_data_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fp8cfg.compose(["task=sft", "data.path=talks.jsonl"]).data == Data(
        name="chat", path="talks.jsonl"
    )
    for words in (["task=sft", "data=tiny"], ["data=tiny", "task=sft"]):
        assert fp8cfg.compose(words).data.name == "tiny"
    assert (
        llama_tiny(task="sft", data={"name": "tiny"}).data.name == "tiny"
        and fp8cfg.compose(["task=lora"]).data.name == "stdlib"
    )
    mine = fp8cfg.from_yaml("recipe: llama_tiny\ndata: {name: jsonl, path: rows.jsonl}\n")
    assert fp8cfg.compose(["task=sft"], base=mine).data.name == "jsonl", (
        "a recipe that names its data keeps it"
    )
    line = "data=chat: needs data.path, a .jsonl file of conversations, or another data=NAME"
    recipe = fp8cfg.compose(
        ["recipe=llama_tiny", "task=sft"]
    )  # can be planned, checked and written down before there is a file
    assert fp8cfg.plan(recipe) and fp8cfg.from_yaml(fp8cfg.to_yaml(recipe)) == recipe
    assert main(["recipe=llama_tiny", "task=sft", f"log.dir={tmp_path}"]) == 2
    assert capsys.readouterr().err.endswith(f"error: {line}\n")
    with pytest.raises(ConfigError) as e:
        run_data(recipe)
    assert e.value.problems == [line]
