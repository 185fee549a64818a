from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8cfg.data import IGNORED, Batches, DataError, chat
from fp8cfg.data.chat import load_conversations
from fp8cfg.data.tokenizer import BYTES, load_tokenizer
from tests.support.tiny_tokenizer import CHATML, GENERATION, write_tokenizer

transformers = pytest.importorskip("transformers")
TALK = [
    {"role": "system", "content": "Short."},
    {"role": "user", "content": "What is  FP8? <b>"},
    {"role": "assistant", "content": "Eight bits, zwölf."},
    {"role": "user", "content": "And bf16?"},
    {"role": "assistant", "content": "  Sixteen.\n"},
]
TEMPLATES = {
    "generation": GENERATION,
    "chatml": CHATML,
    "macro": "{% macro say(m) %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endmacro %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m.role == 'assistant' %}{{ say(m) }}{% elif ns.n > 9 %}{% break %}{% else %}"
    "[{{ m.role }}]{{ m.content | tojson }}{% endif %}{% endfor %}",
    "llama2": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %} "
    "{{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=GENERATION)


@pytest.fixture(scope="module")
def theirs(folder: Path):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name: str, theirs) -> None:
    variables = {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token}
    assert chat.render(TEMPLATES[name], TALK, variables)[0] == theirs.apply_chat_template(
        TALK, chat_template=TEMPLATES[name], tokenize=False
    )
    asked = TALK[:-1]
    assert chat.prompt(TEMPLATES[name], asked, variables) == theirs.apply_chat_template(
        asked, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )


def test_tokens_and_the_mask_of_the_assistant_are_those_of_transformers(
    folder: Path, theirs
) -> None:
    ids, learned = chat.encode_row("x", {"messages": TALK}, load_tokenizer(str(folder)))
    want = theirs.apply_chat_template(
        TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (
        ids.tolist() == want["input_ids"]
        and learned.astype(int).tolist() == want["assistant_masks"]
    )
    assert theirs.decode(ids[learned]) == "Eight bits, zwölf.<|im_end|>  Sixteen.\n<|im_end|>"


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("chatml", ["Eight bits, zwölf.<|im_end|>\n", "Sixteen.<|im_end|>\n"]),
        ("llama2", [" Eight bits, zwölf. </s>", "   Sixteen.\n </s>"]),
    ],
)
def test_without_generation_the_words_are_what_a_message_adds(name: str, want: list[str]) -> None:
    text, spans = chat.render(TEMPLATES[name], TALK, {"bos_token": "<s>", "eos_token": "</s>"})
    assert [text[a:b] for a, b in spans] == want


def test_the_template_of_a_file_beside_is_read(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(
        tmp_path,
        chat_template=[{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}],
    )
    assert load_tokenizer(str(tmp_path)).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert load_tokenizer(str(tmp_path)).chat_template == CHATML


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot be read"),
        ("{{ messages[9].content }}", "chat template fails"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
        ("{{ dict.__init__.__globals__ }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "has no '__class__'"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "has no '__class__'"),
        (
            "{% for m in messages[-2:] %}{{ m.content }}{% endfor %}",
            r"cannot be located; put {% generation %}",
        ),
        ("{{ strftime_now('%Y') }}", "undefined"),
        ("{{ 1 / 0 }}", "fails"),
        ("{{ range(999999999) | list | length }}", "fails"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused_in_a_line(
    template: str, says: str
) -> None:
    with pytest.raises(DataError, match=says) as caught:
        chat.render(template, TALK, {})
    assert "\n" not in str(caught.value)


def test_bytes_have_the_plain_format() -> None:
    ids, learned = chat.encode_row("x", {"messages": TALK}, BYTES)
    text = "".join("<eos>" if i == 256 else chr(i) for i in ids.tolist() if i < 257)
    assert text.encode("latin-1").decode() == (
        "<|system|>\nShort.<eos>\n<|user|>\nWhat is  FP8? <b><eos>\n<|assistant|>\nEight bits, zwölf.<eos>\n<|user|>\nAnd bf16?<eos>\n<|assistant|>\n  Sixteen.\n<eos>"
    )
    assert (
        BYTES.decode(ids[learned]) == "Eight bits, zwölf.  Sixteen.\n"
        and (ids[learned] == 256).sum() == 2
    )
    prompt = chat.encode_prompt(TALK[:-1], BYTES)
    assert (
        prompt.tolist() == ids[: len(prompt)].tolist()
        and not learned[len(prompt) - 1]
        and learned[len(prompt) :].all()
    )


def test_a_completion_is_learned_and_its_end(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    for each in (BYTES, tokenizer):
        ids, learned = chat.encode_row("x", {"prompt": "2 + 2 =", "completion": " 4"}, each)
        assert (
            each.decode(ids) == "2 + 2 = 4"
            and each.decode(ids[learned]) == " 4"
            and ids[-1] == each.eos
            and learned[-1]
        )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "x"}, r'f:1: no conversation; a row has {"messages"'),
        ({"messages": []}, "no list of messages"),
        ({"messages": "hi"}, "no list"),
        ({"messages": ["hi"]}, "message 0: is str"),
        ({"messages": [{"role": "user"}]}, "message 0: has no 'content'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "'content' is list, not text"),
        ({"prompt": [{}], "completion": []}, "write them as one list under 'messages'"),
        ({"prompt": "x", "completion": 3}, "'completion' is int"),
        ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "noncharacter"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        chat.encode_row("f:1", row, BYTES)


def pairs(folder: Path, *answers: str, prompt: str = "q:") -> str:
    file = folder / "chat.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt": prompt, "completion": answer}) for answer in answers)
    )
    return str(file)


def test_samples_are_padded_behind_and_have_targets_of_the_answer_alone(tmp_path: Path) -> None:
    samples = load_conversations(pairs(tmp_path, "ab", "c"), BYTES, 8)
    tokens, targets = samples.read(np.array([0, 1]))
    assert tokens.tolist() == [[*b"q:ab", *[256] * 4], [*b"q:c", *[256] * 5]]
    assert targets.tolist() == [
        [IGNORED, *b"ab", 256, *[IGNORED] * 4],
        [IGNORED, *b"c", 256, *[IGNORED] * 5],
    ]


def test_what_is_cut_and_left_out_is_said(tmp_path: Path) -> None:
    samples = load_conversations(pairs(tmp_path, "abcdefgh", "x"), BYTES, 4)
    assert samples.read(np.array([0]))[1].tolist() == [[IGNORED, *b"abc"]]
    assert re.search(
        r"2 conversations of .*, 1 longer than seq_length=4 were cut$", samples.description
    )
    samples = load_conversations(pairs(tmp_path, "abc", prompt="longer"), BYTES, 8)
    assert samples.description.endswith("1 longer than seq_length=8 were cut")
    with pytest.raises(
        DataError,
        match=r"no conversation to learn from; left out: 1 whose answers begin after"
        r" model.seq_length=4 \(first: .*chat.jsonl:1\)$",
    ):
        load_conversations(pairs(tmp_path, "abc", prompt="longer"), BYTES, 4)


def test_conversations_are_drawn_once_an_epoch_and_split_by_their_number(tmp_path: Path) -> None:
    whole = load_conversations(
        pairs(tmp_path, *(chr(65 + n) * (n + 1) for n in range(20))), BYTES, 32
    )
    train, held_out = whole.split(0.2)
    assert (len(train), len(held_out)) == (16, 4) and len(
        {train.sha256, held_out.sha256, whole.sha256}
    ) == 3
    first = [Batches(part, 3, 4).rows(0, len(part))[0][:, 2].tolist() for part in (train, held_out)]
    assert sorted(first[0]) == list(range(65, 81)) != first[0] and sorted(first[1]) == list(
        range(81, 85)
    )
    assert Batches(train, 3, 4).rows(16, 16)[0][:, 2].tolist() != first[0]
    with pytest.raises(DataError, match="one conversation is too few"):
        load_conversations(pairs(tmp_path, "a"), BYTES, 8).split(0.1)
