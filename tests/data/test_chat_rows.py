"""Chat rows as other projects write them: weights, tools, reasoning, a system text, ShareGPT and Alpaca."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8cfg.data import DataError
from fp8cfg.data.chat import encode_row, load_conversations
from fp8cfg.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from tests.support.tiny_tokenizer import CHATML, GENERATION, write_tokenizer

TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "two"},
]
CALL = [{"type": "function", "function": {"name": "clock", "arguments": "{}"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def tokenizer(folder: Path, template: str | None) -> Tokenizer:
    return replace(load_tokenizer(str(folder)), chat_template=template)


def texts(row: dict[str, Any], tokenizer: Tokenizer) -> tuple[str, str]:
    """The text of a row, and the part of it that is learned."""
    tokens, learned = encode_row("row", row, tokenizer)
    return tokenizer.decode(tokens.tolist()), tokenizer.decode(tokens[learned].tolist())


@pytest.mark.parametrize(
    "template", [None, CHATML, GENERATION], ids=["plain", "chatml", "generation"]
)
@pytest.mark.parametrize("zero", [0, 0.0, False])
def test_no_loss_is_taken_of_an_answer_with_weight_zero(
    folder: Path, template: str | None, zero: object
) -> None:
    talk = [TALK[0], {**TALK[1], "weight": zero}, TALK[2], {**TALK[3], "weight": 1}]
    text, learned = texts({"messages": talk}, tokenizer(folder, template))
    assert "one" in text and "one" not in learned and "two" in learned
    assert texts({"messages": TALK}, tokenizer(folder, template))[0] == text


def test_another_weight_is_an_error() -> None:
    with pytest.raises(DataError, match=r"message 1: 'weight' is 0\.5; only 0 and 1"):
        encode_row("row", {"messages": [TALK[0], {**TALK[1], "weight": 0.5}]}, BYTES)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (
            {"messages": [TALK[0], {"role": "assistant", "content": None, "tool_calls": CALL}]},
            "clock",
        ),
        ({"messages": [TALK[0], {**TALK[1], "reasoning_content": "hmm"}]}, "<think>hmm"),
        ({"messages": TALK, "tools": CALL}, "clock"),
    ],
    ids=["tool_calls", "reasoning_content", "tools"],
)
def test_what_a_template_writes_is_in_the_text(
    folder: Path, row: dict[str, Any], word: str
) -> None:
    text, learned = texts(row, tokenizer(folder, TOOLS))
    assert word in text and (word in learned) == ("tools" not in row)
    key = next(k for k in ("tool_calls", "reasoning_content", "tools") if k in str(row))
    with pytest.raises(DataError, match=f"its chat template does not write '{key}'"):
        texts(row, tokenizer(folder, CHATML.replace("m['content'] | trim", "m['content']")))
    with pytest.raises(DataError, match=f"'{key}' needs a chat template"):
        texts(row, BYTES)


def test_the_system_text_of_a_row_comes_first() -> None:
    assert texts({"messages": TALK, "system": "Be kind."}, BYTES)[0].startswith(
        "<|system|>\nBe kind."
    )
    both = [{"role": "system", "content": "a"}, *TALK]
    with pytest.raises(DataError, match="'system' and a first message of that role"):
        encode_row("row", {"messages": both, "system": "b"}, BYTES)


@pytest.mark.parametrize("key", ["system", "tools"])
def test_a_prompt_with_a_completion_loses_no_other_text(key: str) -> None:
    row = {"prompt": "1?", "completion": "one", key: "Be brief."}
    with pytest.raises(DataError, match=f"'{key}' has no effect next to 'prompt'"):
        texts(row, BYTES)


def test_rows_of_sharegpt_and_alpaca_are_conversations() -> None:
    want = texts({"messages": TALK[:2]}, BYTES)
    turns = [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "one"}]
    assert texts({"conversations": turns}, BYTES) == want
    assert texts({"instruction": "1?", "input": "", "output": "one"}, BYTES) == want
    text, _ = texts({"instruction": "Add.", "input": "1 and 2", "output": "3"}, BYTES)
    assert "Add.\n\n1 and 2" in text


@pytest.mark.parametrize("role", ["model", "gpt", "bot", "Assistant"])
def test_the_assistants_other_names_are_learned(role: str) -> None:
    messages = [TALK[0], {"role": role, "content": "one"}]
    assert texts({"messages": messages}, BYTES) == texts({"messages": TALK[:2]}, BYTES)


def test_rows_that_are_left_out_are_counted_by_reason(tmp_path: Path) -> None:
    rows = [
        TALK,
        [TALK[0], {"role": "critic", "content": "no"}],
        [{"role": "user", "content": "long " * 40}, TALK[1]],
        [TALK[0], {**TALK[1], "weight": 0}],
        [TALK[0]],
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    samples = load_conversations(str(path), BYTES, 100)
    assert len(samples) == 1
    assert samples.description == (
        f"1 conversations of {path}, left out:"
        f" 2 without a message of role assistant (first: {path}:2 has user and critic),"
        f" 1 whose answers begin after model.seq_length=100 (first: {path}:3),"
        f" 1 whose answers are empty or have weight 0 (first: {path}:4)"
    )


def test_tables_of_two_formats_are_not_read_in_part(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    (tmp_path / "b.csv").write_text("prompt,completion\n1?,one\n")
    with pytest.raises(DataError, match=r"several formats \(jsonl, csv\); give a pattern such as"):
        load_conversations(str(tmp_path), BYTES, 64)
    assert len(load_conversations(str(tmp_path / "*.jsonl"), BYTES, 64)) == 1
    (tmp_path / ".cache").mkdir()
    (tmp_path / "b.csv").rename(tmp_path / ".cache" / "b.csv")
    assert len(load_conversations(str(tmp_path), BYTES, 64)) == 1


def test_alpaca_rows_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "alpaca.csv"
    path.write_text('instruction,input,output\n"Add, please","1 and 1",2\nSay hi,,hi\n')
    samples = load_conversations(str(path), BYTES, 64)
    texts = [BYTES.decode(row.tolist()) for row in samples.read(np.arange(2))[0]]
    assert "Add, please\n\n1 and 1" in texts[0] and "<|user|>\nSay hi" in texts[1]
