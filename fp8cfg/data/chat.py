"""Conversations as tokens, and which of them the assistant wrote: what supervised fine-tuning takes its loss of.

A row is {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}, as TRL's. Messages are written by
the tokenizer's chat template. Without one, and for bytes, they are written so, <eos> being the end token (Zephyr's format):

    <|user|>
    What is FP8?<eos>
    <|assistant|>
    A number of eight bits.<eos>

The loss is taken of the assistant's words and of the end token after them; of a completion and the end token after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fp8cfg.data import chat_template
from fp8cfg.data.errors import DataError
from fp8cfg.data.rows import text_of
from fp8cfg.data.tokenizer import Tokenizer

Encoded = tuple[np.ndarray, np.ndarray]
"""Token ids, int64 [n], and whether each is to be learned, bool [n]."""
_KEYS = (
    '{"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...", "completion":'
    ' "..."}'
)


def encode_row(place: str, row: Mapping[str, Any], tokenizer: Tokenizer) -> Encoded:
    """The tokens of one conversation. DataError, beginning with `place`, for a row that is none."""
    if "messages" in row:
        said = _messages(place, row["messages"])
        if tokenizer.chat_template is None:
            return _plain(said, tokenizer)
        try:
            text, spans = chat_template.render(tokenizer.chat_template, said, tokenizer.variables)
        except DataError as e:
            raise DataError(f"{place}: {e}") from None
        return _learned(text, spans, tokenizer)
    if "prompt" in row and "completion" in row:
        if not isinstance(row["prompt"], str) and isinstance(row["prompt"], Sequence):
            raise DataError(
                f"{place}: prompt and completion are lists; write them as one list under 'messages'"
            )
        prompt, completion = (text_of(place, row, key) for key in ("prompt", "completion"))
        tokens, learned = _learned(
            prompt + completion, [(len(prompt), len(prompt) + len(completion))], tokenizer
        )
        return np.append(tokens, tokenizer.eos), np.append(learned, True)
    raise DataError(f"{place}: no conversation; a row has {_KEYS}")


def encode_prompt(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> np.ndarray:
    """The tokens after which the assistant answers, int64 [n]."""
    if tokenizer.chat_template is not None:
        return tokenizer.encode_spans(
            chat_template.prompt(tokenizer.chat_template, messages, tokenizer.variables)
        ).ids
    tokens, _ = _plain([*messages, {"role": "assistant", "content": ""}], tokenizer)
    return tokens[:-1]  # the end token of the answer that is to come


def _learned(text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer) -> Encoded:
    """The tokens of `text`, those to be learned that have a character inside of `spans`."""
    ids, at = tokenizer.encode_spans(text)
    learned = np.zeros(len(ids), dtype=bool)
    for start, stop in spans:
        learned |= (at[:, 0] < stop) & (at[:, 1] > start)
    return ids, learned


def _plain(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Encoded:
    tokens, learned = list[np.ndarray](), list[np.ndarray]()
    for number, message in enumerate(messages):
        head, own = (
            f"{chr(10) if number else ''}<|{message['role']}|>\n",
            message["role"] == "assistant",
        )
        text = head + message["content"]
        ids, mask = _learned(text, [(len(head), len(text))] if own else [], tokenizer)
        tokens.append(np.append(ids, tokenizer.eos))
        learned.append(np.append(mask, own))
    return np.concatenate(tokens), np.concatenate(learned)


def _messages(place: str, messages: Any) -> list[dict[str, Any]]:
    """Messages as plain data. Roles and contents are text; what else a message has goes to the template."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise DataError(
            f"{place}: 'messages' is no list of messages, each with a role and a content"
        )
    for number, message in enumerate(messages):
        at = f"{place}, message {number}"
        if not isinstance(message, dict):
            raise DataError(
                f"{at}: is {type(message).__name__}; a message has a role and a content"
            )
        text_of(at, message, "role")
        content = text_of(at, message, "content")
        if chat_template.BEGIN in content or chat_template.END in content:
            raise DataError(f"{at}: has a noncharacter, U+FDD0 or U+FDD1, which text has not")
    return [dict(message) for message in messages]
