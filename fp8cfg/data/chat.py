"""Conversations for supervised fine-tuning, with a loss mask for the assistant's tokens.

Supported rows are {"messages": [{"role": ..., "content": ...}, ...]} and {"prompt": ...,
"completion": ...} (TRL), "conversations" (ShareGPT), and "instruction", "input" and "output"
(Alpaca). The tokenizer's chat template formats the messages. Without a template, and for bytes, the
format is Zephyr's, with <eos> for the end token:

    <|user|>
    What is FP8?<eos>
    <|assistant|>
    A number of eight bits.<eos>

The loss covers the assistant's text and the end token after it. For a completion it covers the
completion and its end token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fp8cfg.data.files import DataError
from fp8cfg.data.samples import IGNORED, Origin, Rows, epochs, permute
from fp8cfg.data.sources import MAX_TEXT_BYTES, Row, kind_of, table_rows, text_of
from fp8cfg.data.tokenizer import Tokenizer, refuse_vocabulary

if TYPE_CHECKING:
    import jinja2

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around generated text: noncharacters, which valid text never has (Unicode 23.7)."""
Spans = list[tuple[int, int]]


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
    tools: Any = None,
) -> tuple[str, Spans]:
    """Formats a conversation and finds the assistant's text.

    If the template has `{% generation %}` blocks, they are the assistant's text. Otherwise each
    prefix of the conversation is formatted. The assistant's text is the difference between the
    prefix up to its message and the prefix before it with the generation prompt.

    Args:
        template: Jinja template.
        messages: Messages with "role" and "content".
        variables: Special tokens by their names in templates.
        tools: Tool definitions for the template.

    Returns:
        The text, and the assistant's spans as [start, stop) in characters.

    Raises:
        DataError: The template fails. Or it formats earlier messages differently once later ones
            follow, so that prefixes do not match.
    """
    text = _rendered(template, messages, variables, tools=tools)
    if BEGIN in text:
        return _marked(text)
    # No blocks, so compare prefixes. They do not match if, for example, a template drops the
    # reasoning of earlier answers.
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prefix = ""
            if i:
                prefix = _rendered(template, messages[:i], variables, prompt=True, tools=tools)
            prefix_with_answer = _rendered(template, messages[: i + 1], variables, tools=tools)
            is_prefix = text.startswith(prefix_with_answer)
            if not is_prefix or not prefix_with_answer.startswith(prefix):
                raise DataError(
                    "its chat template changes earlier messages if later ones follow, so the"
                    " assistant's answers cannot be located; put {% generation %} ... {%"
                    " endgeneration %} around them"
                )
            spans.append((len(prefix), len(prefix_with_answer)))
    return text, spans


def prompt(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, str]
) -> str:
    """Formats messages with the generation prompt at the end.

    Args:
        template: Jinja template.
        messages: Messages with "role" and "content".
        variables: Special tokens by their names in templates.

    Raises:
        DataError: The template fails.
    """
    return _rendered(template, messages, variables, prompt=True).replace(BEGIN, "").replace(END, "")


def _rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
    prompt: bool = False,
    tools: Any = None,
) -> str:
    """Runs the template. The result still has the marks of generated text."""
    import jinja2

    try:
        return _compiled(template).render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=prompt,
            **variables,
        )
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as e:
        raise DataError(f"its chat template fails: {' '.join(str(e).split())[:160]}") from None


def _marked(text: str) -> tuple[str, Spans]:
    """Removes the marks and returns the spans between them, in characters of the new text."""
    spans = []
    position = 0
    start = 0
    pieces = re.split(f"({BEGIN}|{END})", text)
    for piece in pieces:
        if piece == BEGIN:
            start = position
        elif piece == END:
            spans.append((start, position))
        else:
            position += len(piece)
    return "".join(piece for piece in pieces if piece not in (BEGIN, END)), spans


@cache
def _compiled(template: str) -> jinja2.Template:
    """Compiles a template in a sandbox, with tojson and raise_exception as in transformers."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # A template is code from a downloaded model. Older sandboxes can be left (CVE-2025-27516).
    if tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3])) < (3, 1, 6):
        raise DataError(
            "chat templates need jinja2 3.1.6 or newer, whose sandbox holds; there is"
            f" {jinja2.__version__}"
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals.update(raise_exception=_raise, dict=_Dict(), namespace=_namespace())
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as e:
        raise DataError(
            f"its chat template cannot be read: {' '.join(str(e).split())[:160]}"
        ) from None


def _generation() -> Any:
    """Returns the Jinja extension for `{% generation %}`, as in transformers."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """Marks the text of the block."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            """Parses a block."""
            # The block becomes a call of _mark with its rendered text.
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            """Renders the block between marks."""
            return f"{BEGIN}{caller()}{END}"

    return Generation


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Formats JSON like the tojson filter of transformers."""
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    """Implements raise_exception of templates."""
    import jinja2

    raise jinja2.TemplateError(message)


class _Dict:
    """`dict` as a function only: templates get none of its attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)


def _namespace() -> Any:
    """Returns `namespace` without names that begin with an underscore."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class PlainNamespace(Namespace):
        """Namespace that rejects private names such as __class__."""

        # Without a parameter `self`, so that a template can have an attribute of this name.
        def __init__(*args: Any, **values: Any) -> None:
            self, *mappings = args
            attributes = dict(*mappings, **values)
            for name in attributes:
                PlainNamespace.plain(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            PlainNamespace.plain(name)
            Namespace.__setitem__(self, name, value)

        @staticmethod
        def plain(name: Any) -> None:
            """Raises SecurityError for a name with a leading underscore."""
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace has no {name!r}")

    return PlainNamespace


Encoded = tuple[np.ndarray, np.ndarray]
"""Token ids, int64 [n], and the loss mask, bool [n]."""
_KEYS = (
    '{"messages": [{"role": "user", "content": "..."}, ...]}, {"prompt": "...", "completion":'
    ' "..."}, ShareGPT\'s "conversations" or Alpaca\'s "instruction" and "output"'
)
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
"""Roles in other formats (ShareGPT, Gemini), mapped to ours."""
RENDERED = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that have text too. A template must render them, or the text would be lost."""


def encode_row(place: str, row: Mapping[str, Any], tokenizer: Tokenizer) -> Encoded:
    """Tokenizes one conversation.

    Args:
        place: Place of the row, for errors.
        row: The row.
        tokenizer: The tokenizer.

    Returns:
        Token ids, int64 [n], and the loss mask, bool [n].

    Raises:
        DataError: The row is not a conversation, or the template fails.
    """
    messages = _messages_of_row(place, row)
    if messages is not None:
        return _encode_messages(place, messages, row.get("tools") or None, tokenizer)
    if "prompt" in row and "completion" in row:
        if not isinstance(row["prompt"], str) and isinstance(row["prompt"], Sequence):
            raise DataError(
                f"{place}: prompt and completion are lists; write them as one list under 'messages'"
            )
        for key in ("system", "tools"):
            if row.get(key):
                raise DataError(
                    f"{place}: {key!r} has no effect next to 'prompt' and 'completion'; write the"
                    " row as 'messages'"
                )
        prompt, completion = (text_of(place, row, key) for key in ("prompt", "completion"))
        # Tokenized together, so that no token border is forced. A token across it is learned.
        tokens, learned = _learned(
            prompt + completion, [(len(prompt), len(prompt) + len(completion))], tokenizer
        )
        return np.append(tokens, tokenizer.eos), np.append(learned, True)
    raise DataError(f"{place}: no conversation; a row has {_KEYS}")


def _messages_of_row(place: str, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the messages of a row in OpenAI's, ShareGPT's or Alpaca's format, else None."""
    if row.get("messages") is not None:
        messages = _messages(place, row["messages"])
    elif row.get("conversations") is not None:
        turns = row["conversations"]
        is_sharegpt = isinstance(turns, list) and all(
            isinstance(turn, dict) and "from" in turn for turn in turns
        )
        if is_sharegpt:
            turns = [{"role": turn["from"], "content": turn.get("value")} for turn in turns]
        messages = _messages(place, turns)
    elif "instruction" in row and "output" in row:
        instruction = text_of(place, row, "instruction")
        # Alpaca's optional input is the data for the instruction.
        if row.get("input"):
            instruction = f"{instruction}\n\n{text_of(place, row, 'input')}"
        answer = {"role": "assistant", "content": text_of(place, row, "output")}
        messages = [{"role": "user", "content": instruction}, answer]
    else:
        return None
    if row.get("system"):
        if messages[0]["role"] == "system":
            raise DataError(f"{place}: 'system' and a first message of that role; keep one of them")
        messages.insert(0, {"role": "system", "content": text_of(place, row, "system")})
    return messages


def _encode_messages(
    place: str, messages: list[dict[str, Any]], tools: Any, tokenizer: Tokenizer
) -> Encoded:
    """Tokenizes messages. Answers with "weight": 0 are masked."""
    weights = []
    for number, message in enumerate(messages):
        weight = _weight(f"{place}, message {number}", message)
        if message["role"] == "assistant":
            weights.append(weight)
    template = tokenizer.chat_template
    rendered = [key for key in RENDERED if any(message.get(key) for message in messages)]
    if tools:
        rendered.append("tools")
    if template is None:
        if rendered:
            raise DataError(
                f"{place}: {rendered[0]!r} needs a chat template that writes it, and the tokenizer"
                " has none"
            )
        return _plain(messages, tokenizer, weights)
    try:
        text, spans = render(template, messages, tokenizer.variables, tools)
        for key in rendered:
            if _ignores_key(template, messages, tokenizer.variables, tools, key):
                raise DataError(f"its chat template does not write {key!r}; drop the key")
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    if 0 in weights and len(spans) != len(weights):
        raise DataError(
            f"{place}: 'weight' is 0 in an answer, and its chat template does not tell the answers"
            " apart"
        )
    if 0 in weights:
        spans = [span for span, weight in zip(spans, weights, strict=True) if weight]
    return _learned(text, spans, tokenizer)


def _ignores_key(
    template: str,
    messages: list[dict[str, Any]],
    variables: Mapping[str, str],
    tools: Any,
    key: str,
) -> bool:
    """Returns whether the formatted text is equal without a key of the messages."""
    reduced = []
    for message in messages:
        reduced.append({name: value for name, value in message.items() if name != key})
    reduced_tools = None if key == "tools" else tools
    full_text = _rendered(template, messages, variables, tools=tools)
    return _rendered(template, reduced, variables, tools=reduced_tools) == full_text


def _weight(place: str, message: dict[str, Any]) -> int:
    """Removes and returns the weight of a message, 0 or 1."""
    weight = message.pop("weight", None)
    if weight is None:
        return 1
    if weight not in (0, 1):
        raise DataError(f"{place}: 'weight' is {weight!r}; only 0 and 1 can be used")
    return int(weight)


def encode_prompt(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> np.ndarray:
    """Tokenizes a prompt for generation.

    Args:
        messages: Messages with "role" and "content".
        tokenizer: The tokenizer.

    Returns:
        Token ids, int64 [n].
    """
    if tokenizer.chat_template is not None:
        return tokenizer.encode_spans(
            prompt(tokenizer.chat_template, messages, tokenizer.variables)
        ).ids
    answer = {"role": "assistant", "content": ""}
    tokens, _ = _plain([*messages, answer], tokenizer, weights=[])
    return tokens[:-1]  # without the end token of the empty answer


def _learned(text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer) -> Encoded:
    """Tokenizes text. The mask has the tokens that overlap with `spans`."""
    ids, token_spans = tokenizer.encode_spans(text)
    learned = np.zeros(len(ids), dtype=bool)
    for start, stop in spans:
        learned |= (token_spans[:, 0] < stop) & (token_spans[:, 1] > start)
    return ids, learned


def _plain(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, weights: Sequence[int]
) -> Encoded:
    """Tokenizes messages in Zephyr's format. `weights` has one entry per answer."""
    tokens, learned = list[np.ndarray](), list[np.ndarray]()
    remaining = iter(weights)
    for number, message in enumerate(messages):
        head = f"<|{message['role']}|>\n"
        if number > 0:
            head = f"\n{head}"
        text = head + message["content"]
        is_learned = message["role"] == "assistant" and next(remaining, 1) == 1
        spans = [(len(head), len(text))] if is_learned else []
        ids, mask = _learned(text, spans, tokenizer)
        tokens.append(np.append(ids, tokenizer.eos))
        learned.append(np.append(mask, is_learned))
    return np.concatenate(tokens), np.concatenate(learned)


def _messages(place: str, messages: Any) -> list[dict[str, Any]]:
    """Checks messages and returns copies. Other keys are kept for the template."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise DataError(
            f"{place}: 'messages' is no list of messages, each with a role and a content"
        )
    messages = list(messages)
    for number, message in enumerate(messages):
        message_place = f"{place}, message {number}"
        if not isinstance(message, dict):
            raise DataError(
                f"{message_place}: is {type(message).__name__}; a message has a role and a content"
            )
        role = text_of(message_place, message, "role")
        # OpenAI's format has null content in a message with tool calls only.
        if message.get("content") is None and message.get("tool_calls"):
            message = messages[number] = {**message, "content": ""}
        content = text_of(message_place, message, "content")
        messages[number] = {**message, "role": ROLES.get(role.lower(), role.lower())}
        if BEGIN in content or END in content:
            raise DataError(
                f"{message_place}: has a noncharacter, U+FDD0 or U+FDD1; remove it from the text"
            )
    return [dict(message) for message in messages]


@dataclass(frozen=True, eq=False)
class Conversations:
    """Samples with one conversation each, padded to seq_length.

    Attributes:
        tokens: Token ids of all conversations, int32 [n].
        learned: Loss mask, bool [n].
        starts: First token of each of c conversations and the end, int64 [c + 1].
        seq_length: Tokens per sample.
        pad: Id for padding.
        description: Text for the header of a run.
        rows: Number of each conversation's row in the files, int64 [c].
    """

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray
    seq_length: int
    pad: int
    description: str
    rows: np.ndarray

    @property
    def masked(self) -> bool:
        """See SampleSource."""
        return True

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of tokens, loss mask and borders."""
        # Fixed dtypes, so that the fingerprint is equal on all machines.
        digest = hashlib.sha256(f"{self.pad} {len(self)}\n".encode())
        for part, dtype in (
            (self.tokens, "<i4"),
            (self.learned, "u1"),
            (self.starts - self.starts[0], "<i8"),
        ):
            digest.update(part.astype(dtype, copy=False).tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def draw(self, cursor: np.ndarray, seed: int) -> np.ndarray:
        """See SampleSource. A place is the number of a conversation."""
        places = np.empty(len(cursor), dtype=np.int64)
        for epoch, in_epoch, index in epochs(cursor, len(self)):
            places[in_epoch] = permute(index, len(self), seed, epoch)
        return places

    def spread(self, count: int) -> np.ndarray:
        """See Samples."""
        return np.arange(count) * len(self) // count

    def read(self, places: np.ndarray) -> Rows:
        """Returns tokens, padded with `pad`, and targets, padded with IGNORED."""
        tokens = np.full((len(places), self.seq_length), self.pad, dtype=np.int64)
        targets = np.full_like(tokens, IGNORED)
        for row, place in enumerate(places.tolist()):
            # Minus starts[0]: the validation part keeps its positions in the whole data.
            start = int(self.starts[place] - self.starts[0])
            stop = int(self.starts[place + 1] - self.starts[0])
            ids = self.tokens[start:stop]
            length = len(ids) - 1
            tokens[row, :length] = ids[:-1]
            targets[row, :length] = np.where(self.learned[start + 1 : stop], ids[1:], IGNORED)
        return tokens, targets

    def origins(self, places: np.ndarray) -> list[Origin]:
        """See SampleSource. The document is the number of a row in the files."""
        return [{"document": int(self.rows[place]), "offset": 0} for place in places.tolist()]

    def split(self, validation_fraction: float) -> tuple[Conversations, Conversations]:
        """Splits the conversations into training and validation data at the end.

        Args:
            validation_fraction: Share of conversations to validate on.

        Returns:
            The training part and the validation part, each with at least one conversation.

        Raises:
            DataError: There is only one conversation.
        """
        if len(self) < 2:
            raise DataError(
                f"{self.description}: one conversation is too few to train and validate on; two are"
                " the least"
            )
        held_out = min(max(1, round(len(self) * validation_fraction)), len(self) - 1)
        return self._part(0, len(self) - held_out), self._part(len(self) - held_out, len(self))

    def _part(self, first: int, last: int) -> Conversations:
        """Returns the conversations `first` to `last`."""
        starts = self.starts[first : last + 1]
        part = slice(int(starts[0]), int(starts[-1]))
        return replace(
            self,
            tokens=self.tokens[part],
            learned=self.learned[part],
            starts=starts,
            rows=self.rows[first:last],
        )


def load_conversations(
    path: str, tokenizer: Tokenizer, seq_length: int, vocab_size: int | None = None
) -> Conversations:
    """Loads and tokenizes conversations.

    Conversations with more than seq_length + 1 tokens are cut. Conversations without a token to
    learn are skipped. The description has both numbers and the reasons.

    Args:
        path: A file or a folder of JSONL, CSV or Parquet, or a saved dataset.
        tokenizer: The tokenizer.
        seq_length: Tokens per sample.
        vocab_size: Vocabulary of the model. Defaults to no check.

    Raises:
        DataError: A row is not a conversation (see `encode_row`), no conversation has a token to
            learn, or the data is too large for memory.
    """
    if vocab_size is not None:
        refuse_vocabulary(tokenizer, vocab_size)
    rows, size = table_rows(kind_of(path), path)
    if size > MAX_TEXT_BYTES:
        raise DataError(
            f"{path}: {size / 2**30:.1f} GiB of conversations, more than the"
            f" {MAX_TEXT_BYTES / 2**30:.1f} GiB that are held in memory; give a part of them"
        )
    # A saved dataset has an unknown size (0), so it is not limited here.
    encoded, numbers, cut, left_out = _encode_rows(rows, tokenizer, seq_length)
    if not encoded:
        raise DataError(f"{path}: no conversation to learn from; {left_out or 'no rows'}")
    parts = [f"{len(encoded)} conversations of {path}"]
    if cut:
        parts.append(f"{cut} longer than seq_length={seq_length} were cut")
    if left_out:
        parts.append(str(left_out))
    lengths = np.array([len(ids) for ids, _ in encoded], dtype=np.int64)
    return Conversations(
        np.concatenate([ids for ids, _ in encoded]).astype(np.int32),
        np.concatenate([learned for _, learned in encoded]),
        np.append(0, np.cumsum(lengths)),
        seq_length,
        tokenizer.pad,
        ", ".join(parts),
        np.array(numbers, dtype=np.int64),
    )


class LeftOut:
    """Counts skipped rows by reason, with the place of the first row for each reason."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._first: dict[str, str] = {}

    def add(self, reason: str, place: str) -> None:
        """Counts a row.

        Args:
            reason: Why the row is skipped.
            place: Place of the row.
        """
        self._counts[reason] += 1
        self._first.setdefault(reason, place)

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __str__(self) -> str:
        parts = [
            f"{count} {reason} (first: {self._first[reason]})"
            for reason, count in self._counts.items()
        ]
        return f"left out: {', '.join(parts)}"


def _encode_rows(
    rows: Iterator[Row], tokenizer: Tokenizer, seq_length: int
) -> tuple[list[Encoded], list[int], int, LeftOut]:
    """Tokenizes rows.

    Returns:
        Conversations of at most seq_length + 1 tokens, their row numbers, the number of cut ones,
        and the skipped rows.
    """
    encoded = list[Encoded]()
    numbers = list[int]()
    cut = 0
    left_out = LeftOut()
    for number, (place, row) in enumerate(rows):
        ids, learned = encode_row(place, row, tokenizer)
        # The first token is never a target, because no token comes before it.
        if learned[1 : seq_length + 1].any():
            encoded.append((ids[: seq_length + 1], learned[: seq_length + 1]))
            numbers.append(number)
            cut += len(ids) > seq_length + 1
        elif learned[1:].any():
            left_out.add(f"whose answers begin after model.seq_length={seq_length}", place)
        else:
            _add_without_answer(left_out, place, row)
    return encoded, numbers, cut, left_out


def _add_without_answer(left_out: LeftOut, place: str, row: Mapping[str, Any]) -> None:
    """Counts a row without a token to learn, at any length."""
    messages = _messages_of_row(place, row) or []
    roles = dict.fromkeys(message["role"] for message in messages)
    if messages and "assistant" not in roles:
        names = " and ".join(roles)
        left_out.add("without a message of role assistant", f"{place} has {names}")
    else:
        left_out.add("whose answers are empty or have weight 0", place)
