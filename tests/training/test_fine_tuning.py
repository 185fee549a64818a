"""Fine-tuning a pretrained model, from its folder to a folder that transformers loads: tokenizer, template, weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.training.data import recipe_tokenizer, run_data
from tests.support.hf_models import saved
from tests.support.tiny_tokenizer import CHATML, write_tokenizer

transformers = pytest.importorskip("transformers")

Captured = pytest.CaptureFixture[str]
WORDS = [
    "recipe=from_hf",
    "task=sft",
    "precision=bf16_fp8",
    "model.seq_length=64",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=4",
    "trainer.max_steps=3",
    "trainer.val_check_interval=0",
    "optim.warmup_steps=1",
    "optim.lr=1e-3",
    "trainer.compile=off",
    "trainer.accelerator=cpu",
]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen 3 with a tokenizer of 400 tokens, a chat template and a generation config."""
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    saved(folder, vocab_size=400)
    write_tokenizer(folder, chat_template=CHATML)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "chat.jsonl"
    talk = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "The tiny model."},
    ]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(16)))
    return file


def words(pretrained: Path, chat: Path) -> list[str]:
    return [*WORDS, f"model.path={pretrained}", f"data.path={chat}"]


def test_a_pretrained_model_brings_its_tokenizer_and_template(pretrained: Path, chat: Path) -> None:
    recipe = fp8cfg.compose(words(pretrained, chat))
    tokenizer = recipe_tokenizer(recipe)
    assert (tokenizer.size, tokenizer.chat_template) == (400, CHATML)
    train, _ = run_data(recipe)
    expected = transformers.AutoTokenizer.from_pretrained(pretrained).apply_chat_template(
        json.loads(chat.read_text().splitlines()[0])["messages"], tokenize=True, return_dict=False
    )
    tokens, _ = train.rows(0, 1)
    assert tokens[0, : len(expected) - 1].tolist() == expected[:-1]


def test_a_run_is_exported_with_its_tokenizer_and_generates_text(
    pretrained: Path, chat: Path, tmp_path: Path, capsys: Captured
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    assert main([*words(pretrained, chat), f"log.folder={run}"]) == 0
    assert main(["sample", str(run), "Who?", "--tokens", "4"]) == 0
    assert main(["export", "hf", str(run), str(out)]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == 400 and tokenizer.chat_template == CHATML
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.max_new_tokens == 7
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    generated = model.generate(**prompt, do_sample=False, pad_token_id=0)
    assert generated.shape[1] > prompt["input_ids"].shape[1]
    assert isinstance(tokenizer.decode(generated[0]), str)


def test_a_model_without_a_tokenizer_is_an_error(
    pretrained: Path, chat: Path, tmp_path: Path, capsys: Captured
) -> None:
    bare = Path(shutil.copytree(pretrained, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    assert main(["check", *words(bare, chat)]) == 0
    assert f"data.tokenizer=null: {bare} has no tokenizer.json" in capsys.readouterr().err
    assert main([*words(bare, chat), f"log.folder={tmp_path / 'run'}"]) == 2
    assert f"data.tokenizer=null: the pretrained model {bare}" in capsys.readouterr().err
    recipe = fp8cfg.compose([*words(bare, chat), "data.tokenizer=bytes"])
    assert recipe_tokenizer(recipe).size == 257
