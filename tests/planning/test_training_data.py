"""The `data:` line of check, plan and a run, and large models on data that nobody chose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.planning import training_data
from fp8cfg.training.data import run_data
from tests.support.verbs import said

Out = pytest.CaptureFixture[str]
LARGE = "recipe=llama_8b"
INSTEAD = "(data.tokenizer=bytes if you mean bytes, trainer.smoke=true for a small run)"
STDLIB = (
    "data=stdlib: a model of 8.03B parameters would train on the source of Python's standard"
    f" library; set data=jsonl data.path=PATH data.tokenizer=FOLDER {INSTEAD}"
)
BYTES = (
    "data.tokenizer=null: a model of 8.03B parameters would train on bytes; set"
    f" data.tokenizer=FOLDER {INSTEAD}"
)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", STDLIB),
        ("data=jsonl data.path=rows.jsonl", BYTES),
        ("task=sft data.path=rows.jsonl", BYTES),
        (
            "data=tiny data.tokenizer=folder",
            "data=tiny: a model of 8.03B parameters would train on a small text that fp8cfg ships;"
            f" set data=jsonl data.path=PATH {INSTEAD}",
        ),
        ("model.weights=folder", STDLIB.replace(" data.tokenizer=FOLDER", "")),
    ],
)
def test_a_large_model_needs_data(words: str, line: str, capsys: Out) -> None:
    launches = (["launch", "--local", "1"], ["launch", "--slurm", "partition=a"])
    for verb in ([], ["check"], ["export", "slurm"], *launches):
        assert main([*verb, LARGE, "trainer.num_nodes=1", *words.split()]) == 2
        assert f"error: {line}" in capsys.readouterr().err.splitlines()
    with pytest.raises(fp8cfg.ConfigError) as e:
        run_data(fp8cfg.compose([LARGE, *words.split()]))
    assert str(e.value) == line


@pytest.mark.parametrize(
    "words",
    [
        "recipe=llama_8b data.tokenizer=bytes",
        "recipe=llama_8b trainer.smoke=true",
        "recipe=llama_8b data=jsonl data.path=a.jsonl data.tokenizer=folder",
        "recipe=llama_8b data=tokens data.path=a",
        "recipe=llama_8b task=sft data.path=a.jsonl model.weights=folder",
        "recipe=llama_tiny",
        "recipe=llama_tiny model.vocab_size=128256",
    ],
)
def test_data_that_somebody_chose(words: str) -> None:
    assert training_data.unintended_data(fp8cfg.compose(words.split())) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "data: stdlib, the source of Python's standard library, tokenizer bytes"),
        (
            "recipe=llama_8b trainer.smoke=true data.path=a data=text data.tokenizer=here",
            "data: tiny, a small text that fp8cfg ships, tokenizer here",
        ),
        ("data=tokens data.path=a/b", "data: tokens, a/b"),
        ("data=tokens data.path=a/b data.tokenizer=bytes", "data: tokens, a/b, tokenizer bytes"),
        ("task=sft model.weights=hf://a/b", "data: chat, data.path=null, tokenizer hf://a/b"),
        (
            "data=text data.mixture=[{path:a,weight:1},{path:b,weight:2}]",
            "data: text, a, b (rows not read), tokenizer bytes",
        ),
    ],
)
def test_the_line(words: str, line: str, capsys: Out) -> None:
    assert main(["check", *words.split()]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_a_plan_needs_no_data(capsys: Out) -> None:
    words = ["plan", "recipe=llama_8b", "--gpu", "h200"]
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    at = out.index("data: stdlib, the source of Python's standard library, tokenizer bytes")
    assert out[at + 1].startswith("before a run: data=stdlib: a model of 8.03B parameters")
    assert json.loads(said(capsys, *words, "--json"))["data"]["name"] == "stdlib"
    fp8cfg.lower(fp8cfg.compose(["recipe=llama_70b"]))


def test_a_run_counts_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "some words"}\n' * 1000)
    words = ["recipe=llama_tiny", "data=jsonl", f"data.path={path}"]
    batches, _ = run_data(fp8cfg.compose(words))
    assert batches.remark == (
        f"data: jsonl, 'text' of {path}, 1000 documents, 11.00K tokens, tokenizer bytes"
    )
