"""Validation errors of the schema, in one line each: the key, what is wrong, and what to write instead."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic.fields import FieldInfo

from fp8cfg.config import foreign_names
from fp8cfg.config.errors import ConfigError, suggest
from fp8cfg.config.key_names import full, short
from fp8cfg.config.value_text import spelled

if TYPE_CHECKING:
    from fp8cfg.config.node import Node

_ON, _OFF = ("yes", "on", "1", "y", "enabled"), ("no", "off", "0", "n", "disabled")
_NUMBER, _UNIT = (
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"),
    re.compile(r"(\d+\.?\d*) ?([kKmMgGbB])"),
)
THOUSANDS = re.compile(r"\d{1,3}([,_]\d{3})+")
"""A number as it is printed, or typed in Python: 50,257 and 50_257."""
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "model_type": "a mapping of keys",
    "dict_type": "a mapping, as in {path: a, weight: 0.7}",
}


def walk(cls: type[Node], at: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key below the node class `cls`, nodes included, by its full name from there, with pydantic's FieldInfo."""
    for name, info in cls.model_fields.items():
        yield at + name, info
        if isinstance(info.annotation, type) and issubclass(info.annotation, pydantic.BaseModel):
            yield from walk(info.annotation, f"{at}{name}.")  # type: ignore[arg-type]


def options(annotation: Any) -> list[str]:
    """The string options of a Literal, also inside a union; an empty list for other annotations."""
    if typing.get_origin(annotation) is typing.Literal:
        return [o for o in typing.get_args(annotation) if isinstance(o, str)]
    return [o for a in typing.get_args(annotation) for o in options(a)]


def problems(cls: type[Node], error: pydantic.ValidationError) -> list[str]:
    """One line for each thing that pydantic found, those of nested nodes included."""
    lines: list[str] = []
    for e in error.errors(include_url=False):
        cause = e.get("ctx", {}).get("error")
        lines += cause.problems if isinstance(cause, ConfigError) else [_line(cls, e)]
    return list(dict.fromkeys(lines))


def _line(cls: type[Node], e: Any) -> str:
    field, given, ctx = str(e["loc"][0]), e["input"], e.get("ctx", {})
    at = f"{cls.key(field)}={shown_value(given)}"
    if e["type"] in ("extra_forbidden", "no_such_attribute"):
        return unknown_key(cls, field)
    if e["type"] == "literal_error" or options(cls.model_fields[field].annotation):
        ours = foreign_names.meant(cls.key(field), given)
        if ours and " " in ours:  # another key has a part in it
            return f"{at}: not an option; write {cls.key(field)}={ours}"
        near = (
            f"; did you mean {ours!r}?"
            if ours
            else suggest(str(given), options(cls.model_fields[field].annotation))
        )
        return f"{at}: not an option{near}"
    for bound, words in (
        ("ge", "at least"),
        ("gt", "more than"),
        ("le", "at most"),
        ("lt", "less than"),
    ):
        if bound in ctx:
            return (
                f"{at}: must be {words} {ctx[bound]:{'d' if isinstance(ctx[bound], int) else 'g'}}"
            )
    if e["type"] in ("too_short", "too_long", "missing") and isinstance(given, tuple):
        return (
            f"{at}: expected {len(typing.get_args(cls.model_fields[field].annotation))} values, got"
            f" {len(given)}"
        )
    if e["type"] == "string_too_short":
        return f"{at}: needs a name"
    if e["type"] == "string_pattern_mismatch":
        return f"{at}: letters, digits, '_', '.' and '-' alone, at most 64 of them"
    if given == "":
        return f"{at}: needs a value"
    expected = _EXPECTED.get(e["type"])
    got = {"NoneType": "null", "tuple": "a list"}.get(type(given).__name__, type(given).__name__)
    texts = cls.model_fields[field].annotation == tuple[str, ...]
    instead = (
        _instead(cls.key(field), e["type"], given) if texts or e["type"] != "tuple_type" else ""
    )
    if e["type"] == "model_type":
        if (
            isinstance(given, tuple)
            and len(given) == 1
            and isinstance(given[0], pydantic.BaseModel)
        ):
            return f"{cls.key(field)}: expected one, got a list; write it without the list"
        node: Any = cls.model_fields[field].annotation
        instead = _node_instead(cls.key(field), node, given)
    return f"{at}: expected {expected}, got {got}{instead}" if expected else f"{at}: {e['msg']}"


def _instead(key: str, kind: str, given: Any) -> str:
    """What to write in place of a value of another type, where that is plain."""
    if kind == "tuple_type":
        return f"; write \"{key}=['{given}']\"" if isinstance(given, str) else ""
    if kind == "bool_type":
        word = str(given).lower()
        if word in ("true", "false"):
            return "; write it without quotes"
        return (
            f"; write {key}={'true' if word in _ON else 'false'}" if word in (*_ON, *_OFF) else ""
        )
    if kind == "string_type" and isinstance(given, (int, float)):
        return f"; write '{key}=\"{spelled(given)}\"'"
    if kind not in ("int_type", "float_type"):
        return ""
    listed = False
    while isinstance(given, tuple) and len(given) == 1:
        given, listed = given[0], True
    if listed:
        return f"; write {key}={given}" if type(given) in (int, float) else ""
    if not isinstance(given, str):
        return ""
    if _NUMBER.fullmatch(given):
        return "; write it without quotes"
    if THOUSANDS.fullmatch(given):
        return f"; write it out, as {re.sub('[,_]', '', given)}"
    if unit := _UNIT.fullmatch(given):
        powers = {"k": 1, "m": 2, "g": 3, "b": 3}[unit[2].lower()]
        return (
            f"; write it out, as {float(unit[1]) * 1000**powers:.0f} or"
            f" {float(unit[1]) * 1024**powers:.0f}"
        )
    return ""


def _node_instead(key: str, node: type[Node], given: Any) -> str:
    """What to write in place of a `given` value that is no node and no mapping."""
    if key == "precision":
        ours = foreign_names.meant(key, given)
        return (
            f"; did you mean {ours!r}?"
            if ours
            else f"; write {given.__name__}()"
            if callable(given)
            else ""
        )
    if isinstance(given, (str, bool)) or _all_keys(node, given):
        return example(full(key), node, given)
    return ""


def _all_keys(node: type[Node], value: Any) -> bool:
    """Whether `value` is a list with a value for each key of `node`, as Accelerate's override_linear_precision is."""
    return isinstance(value, (list, tuple)) and len(value) == len(node.model_fields)


def example(key: str, node: type[Node], value: Any) -> str:
    """The key of `node` that takes `value`: its switch for true and false, or the one of which it is an option; else its first.
    For a list with a value for each key all of them."""
    if _all_keys(node, value):
        keys = ", ".join(
            f"{leaf}: {str(each).lower()}"
            for leaf, each in zip(node.model_fields, value, strict=True)
        )
        return f"; write '{short(key)}={{{keys}}}'"
    if isinstance(value, bool) and "enabled" in node.model_fields:
        return f"; write {short(key)}.enabled={str(value).lower()}"
    taken = (
        leaf
        for leaf, field in node.model_fields.items()
        if str(value).lower() in options(field.annotation)
    )
    if leaf := next(taken, None):
        return f"; write {short(key)}.{leaf}={str(value).lower()}"
    if "enabled" in node.model_fields:
        enabled = "false" if str(value).lower() in ("0", "off", "no", "none") else "true"
        return f"; write {short(key)}.enabled={enabled}"
    defaults = (
        (leaf, field.get_default(call_default_factory=True))
        for leaf, field in node.model_fields.items()
    )
    leaf, default = next(
        (leaf, default)
        for leaf, default in defaults
        if isinstance(default, (bool, int, float, str))
    )
    return f", as in {short(key)}.{leaf}={spelled(default)}"


def unknown_key(cls: type[Node], field: str) -> str:
    known = frozenset(
        short(key) for key, _ in walk(cls.root or cls)
    )  # the whole tree: a key in the wrong node finds its own
    return foreign_names.unknown(cls.key(field), known)


def shown_value(value: Any) -> str:
    try:
        text = spelled(value)
    except ValueError:  # Python writes no whole number of more than 4300 digits
        text = "a number of many digits"
    return text if len(text) <= 60 else text[:57] + "..."
