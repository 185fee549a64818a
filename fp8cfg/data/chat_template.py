"""Chat template: a tokenizer's Jinja template, rendered as transformers renders it, with the characters that the assistant wrote.

A template comes with somebody's checkpoint and is not trusted: Jinja's immutable sandbox runs it, with `dict` and `namespace`
replaced as in transformers (utils/chat_template_utils.py). Two things differ. `strftime_now` is left undefined, for a date that
moves would make other samples tomorrow; templates that ask for it have a fixed date besides. And what stands in `{% generation %}`
is found by marks in the text, so also inside of macros.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from fp8cfg.data.errors import DataError

if TYPE_CHECKING:
    import jinja2

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around generated text: noncharacters, which no text has (Unicode 23.7)."""
Spans = list[tuple[int, int]]


def render(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, str]
) -> tuple[str, Spans]:
    """The text of a conversation, and where in it the assistant's words stand, [start, stop) in characters.

    They are what the template has in `{% generation %}`; where it has none, what each message of the assistant adds to the text of
    those before it and the prompt for an answer. DataError for a template that fails, or whose text of a conversation does not
    begin with that of its first messages.
    """
    text = _rendered(template, messages, variables)
    if BEGIN in text:
        return _marked(text)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _rendered(template, messages[:i], variables, prompt=True) if i else ""
            after = _rendered(template, messages[: i + 1], variables)
            if not (after.startswith(before) and text.startswith(after)):
                raise DataError(
                    "its chat template writes earlier messages otherwise once later ones follow, so"
                    " the assistant's words cannot be told apart; put {% generation %} ... {%"
                    " endgeneration %} around them"
                )
            spans.append((len(before), len(after)))
    return text, spans


def prompt(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, str]
) -> str:
    """The text after which the assistant answers."""
    return _rendered(template, messages, variables, prompt=True).replace(BEGIN, "").replace(END, "")


def _rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
    prompt: bool = False,
) -> str:
    import jinja2

    try:
        return _compiled(template).render(
            messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **variables
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
    spans, at, begin = [], 0, 0
    pieces = re.split(f"({BEGIN}|{END})", text)
    for piece in pieces:
        if piece == BEGIN:
            begin = at
        elif piece == END:
            spans.append((begin, at))
        else:
            at += len(piece)
    return "".join(piece for piece in pieces if piece not in (BEGIN, END)), spans


@cache
def _compiled(template: str) -> jinja2.Template:
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

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
    """The Jinja extension of `{% generation %}`."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    return Generation


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)


def _namespace() -> Any:
    """`namespace` without names that begin with an underscore."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class PlainNamespace(Namespace):
        def __init__(*args: Any, **values: Any) -> None:
            self, *given = args
            attributes = dict(*given, **values)
            for name in attributes:
                PlainNamespace.plain(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            PlainNamespace.plain(name)
            Namespace.__setitem__(self, name, value)

        @staticmethod
        def plain(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace has no {name!r}")

    return PlainNamespace
