"""Error messages about keys that do not exist and values that the schema rejects.

pydantic says which field is wrong and why. These functions add the full key, the value as the user
wrote it, and what to write instead.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic.fields import FieldInfo

from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError, suggest
from fp8cfg.schema.keys import full, short, spelled
from fp8cfg.schema.units import EXAMPLES

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

NodeClass = Any
"""A subclass of schema.node.Node, which imports this file."""

_TRUE_WORDS = ("yes", "on", "1", "y", "enabled")
_FALSE_WORDS = ("no", "off", "0", "n", "disabled")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_NUMBER_WITH_UNIT = re.compile(r"(\d+\.?\d*) ?([kKmMgGbB])")
THOUSANDS = re.compile(r"\d{1,3}([,_]\d{3})+")
"""A number with separators, as printed or as in Python: 50,257 and 50_257."""
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
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
"""The expected value for pydantic's error types."""
_TYPE_NAMES = {"NoneType": "null", "tuple": "a list"}


def walk(cls: NodeClass, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields every key below a node class with its field, nodes included.

    Args:
        cls: The class.
        prefix: What the names of the keys begin with.
    """
    for name, field in cls.model_fields.items():
        yield prefix + name, field
        node = field.annotation
        if isinstance(node, type) and issubclass(node, pydantic.BaseModel):
            yield from walk(node, f"{prefix}{name}.")


def options(annotation: Any) -> list[str]:
    """Returns the strings of a Literal, also inside a union. Empty for other annotations."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return [option for option in arguments if isinstance(option, str)]
    return [option for inner in arguments for option in options(inner)]


def problems(cls: NodeClass, error: pydantic.ValidationError) -> list[str]:
    """Returns one line for each problem that pydantic found in a node of class `cls`."""
    lines: list[str] = []
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # a validator of a nested node
            lines += cause.problems
        elif details["type"] in ("extra_forbidden", "no_such_attribute"):
            lines += unknown_keys(cls, str(details["loc"][0]), details["input"])
        else:
            lines.append(_problem(cls, details))
    return list(dict.fromkeys(lines))


def unknown_key(cls: NodeClass, field: str) -> str:
    """Returns the message about a `field` that class `cls` does not have."""
    return foreign_names.unknown(cls.key(field), _all_keys(cls))


def unknown_keys(cls: NodeClass, field: str, value: Any) -> list[str]:
    """Returns a message for each key of the mapping `value` of an unknown `field`."""
    if isinstance(value, Mapping):
        return foreign_names.unknown_lines(cls.key(field), _all_keys(cls), value)
    return [unknown_key(cls, field)]


def _all_keys(cls: NodeClass) -> frozenset[str]:
    """Short names of all keys of a recipe. A key in the wrong node is found in its own."""
    return frozenset(short(key) for key, _ in walk(cls.root or cls))


def shown_value(value: Any) -> str:
    """Returns a value for a message, at most 60 characters."""
    try:
        text = spelled(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        text = "a number of many digits"
    if len(text) > 60:
        return text[:57] + "..."
    return text


def _problem(cls: NodeClass, details: ErrorDetails) -> str:
    """Returns the message about one value."""
    field, value, kind = str(details["loc"][0]), details["input"], details["type"]
    key = cls.key(field)
    annotation = cls.model_fields[field].annotation
    setting = f"{key}={shown_value(value)}"
    if kind == "literal_error" or options(annotation):
        return f"{setting}: not an option{_nearest_option(key, value, annotation)}"
    context = details.get("ctx", {})
    for name, words in _BOUNDS.items():
        if name in context:
            bound = context[name]
            shown = f"{bound:d}" if isinstance(bound, int) else f"{bound:g}"
            return f"{setting}: must be {words} {shown}"
    if kind in ("too_short", "too_long", "missing") and isinstance(value, tuple):
        count = len(typing.get_args(annotation))
        return f"{setting}: expected {count} values, got {len(value)}"
    if kind == "string_too_short":
        return f"{setting}: needs a name"
    if kind == "string_pattern_mismatch":
        return f"{setting}: letters, digits, '_', '.' and '-' alone, at most 64 of them"
    if value == "":
        return f"{setting}: needs a value"
    if kind == "model_type" and _is_node_in_list(value):
        return f"{key}: expected one, got a list; write it without the list"
    expected = _EXPECTED.get(kind)
    if expected is None:
        return f"{setting}: {details['msg']}"
    type_name = type(value).__name__
    got = _TYPE_NAMES.get(type_name, type_name)
    return f"{setting}: expected {expected}, got {got}{_advice(cls, field, kind, value)}"


def _is_node_in_list(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != 1:
        return False
    return isinstance(value[0], pydantic.BaseModel)


def _nearest_option(key: str, value: Any, annotation: Any) -> str:
    """Returns the end of a message about an unknown option: what the user may have meant."""
    ours = foreign_names.meant(key, value)
    if ours is None:
        return suggest(str(value), options(annotation))
    if " " in ours:  # the option together with other keys
        return f"; write {key}={ours}"
    return f"; did you mean {ours!r}?"


def _advice(cls: NodeClass, field: str, kind: str, value: Any) -> str:
    """Returns what to write instead of a value of another type, if that is plain."""
    key, annotation = cls.key(field), cls.model_fields[field].annotation
    if kind == "model_type":
        return _advice_for_node(key, annotation, value)
    if field in cls.units and isinstance(value, str):
        unit = cls.units[field]
        return f"; write {unit}, or {EXAMPLES[unit]}"
    if kind == "tuple_type" and annotation == tuple[str, ...]:
        return _advice_for_list(key, value)
    if kind == "bool_type":
        return _advice_for_bool(key, value)
    if kind == "string_type":
        return _advice_for_string(key, value)
    if kind in ("int_type", "float_type"):
        return _advice_for_number(key, value)
    return ""


def _advice_for_list(key: str, value: Any) -> str:
    if not isinstance(value, str):
        return ""
    items = [item.strip(" '\"") for item in value.strip("[] ").split(",")]
    return f'; write "{key}={items}"'


def _advice_for_bool(key: str, value: Any) -> str:
    word = str(value).lower()
    if word in ("true", "false"):
        return "; write it without quotes"
    if word in _TRUE_WORDS:
        return f"; write {key}=true"
    if word in _FALSE_WORDS:
        return f"; write {key}=false"
    return ""


def _advice_for_string(key: str, value: Any) -> str:
    if isinstance(value, float):
        return "; put it in quotes"  # a float has lost the text that it was written as
    if isinstance(value, int):
        return f"; write '{key}=\"{spelled(value)}\"'"
    if key == "data.path" and isinstance(value, tuple):
        return several_files(value)
    return ""


def _advice_for_number(key: str, value: Any) -> str:
    number = value
    while isinstance(number, tuple) and len(number) == 1:
        number = number[0]
    if number is not value:  # a list with one number
        if type(number) in (int, float):
            return f"; write {key}={number}"
        return ""
    if not isinstance(value, str):
        return ""
    if _NUMBER.fullmatch(value):
        without_zeros = re.sub(r"(?<![\d.])0+(?=\d)", "", value)
        if without_zeros != value:
            return f"; write {key}={without_zeros}"
        return "; write it without quotes"
    if THOUSANDS.fullmatch(value):
        return f"; write it out, as {re.sub('[,_]', '', value)}"
    match = _NUMBER_WITH_UNIT.fullmatch(value)
    if match is None:
        return ""
    power = {"k": 1, "m": 2, "g": 3, "b": 3}[match[2].lower()]
    decimal, binary = float(match[1]) * 1000**power, float(match[1]) * 1024**power
    return f"; write it out, as {decimal:.0f} or {binary:.0f}"


def several_files(paths: Sequence[Any]) -> str:
    """Returns what to write instead of several paths for data.path."""
    parts = ", ".join(f"{{path: {path}, weight: 1}}" for path in paths)
    return f"; write 'data.mixture=[{parts}]'"


def _advice_for_node(key: str, node: NodeClass, value: Any) -> str:
    """Returns what to write instead of a value that is neither a node nor a mapping."""
    if key == "precision":
        ours = foreign_names.meant(key, value)
        if ours:
            return f"; did you mean {ours!r}?"
        if callable(value):  # a preset function without its call
            return f"; write {value.__name__}()"
        return ""
    if isinstance(value, str | bool) or _has_value_per_key(node, value):
        return example(full(key), node, value)
    return ""


def _has_value_per_key(node: NodeClass, value: Any) -> bool:
    """Returns whether a list has one value per key of `node`.

    Accelerate writes override_linear_precision as such a list.
    """
    return isinstance(value, list | tuple) and len(value) == len(node.model_fields)


def example(key: str, node: NodeClass, value: Any) -> str:
    """Returns what to write instead of a value for a whole node.

    Args:
        key: The full name of the node.
        node: Its class.
        value: The value: true or false for its switch, an option of one of its keys, or a list
            with a value for each key. For anything else the first key is the example.
    """
    name, fields = short(key), node.model_fields
    if _has_value_per_key(node, value):
        pairs = zip(fields, value, strict=True)
        keys = ", ".join(f"{field}: {str(each).lower()}" for field, each in pairs)
        return f"; write '{name}={{{keys}}}'"
    word = str(value).lower()
    if isinstance(value, bool) and "enabled" in fields:
        return f"; write {name}.enabled={word}"
    for field, info in fields.items():
        if word in options(info.annotation):
            return f"; write {name}.{field}={word}"
    if "enabled" in fields:
        enabled = "false" if word in ("0", "off", "no", "none") else "true"
        return f"; write {name}.enabled={enabled}"
    for field, info in fields.items():
        default = info.get_default(call_default_factory=True)
        if isinstance(default, bool | int | float | str):
            return f", as in {name}.{field}={spelled(default)}"
    return ""
