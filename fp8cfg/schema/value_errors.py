"""Error messages about unknown keys and invalid values.

pydantic reports the field and the kind of error. These functions add the key, the value as the user
wrote it, and a correction.
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
"""The expected value, by pydantic's error type."""
_TYPE_NAMES = {"NoneType": "null", "tuple": "a list"}


def walk(cls: NodeClass, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields the full name and the field of every key and node below a node class.

    Args:
        cls: The node class.
        prefix: Prefix of the names, empty or with a dot at the end.
    """
    for name, field in cls.model_fields.items():
        yield prefix + name, field
        node = field.annotation
        if isinstance(node, type) and issubclass(node, pydantic.BaseModel):
            yield from walk(node, f"{prefix}{name}.")


def options(annotation: Any) -> list[str]:
    """Returns the strings of a Literal, also inside a union. Empty for other annotations."""
    # opt_level is Literal["O1", ...] | None, so unions are searched too.
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return [option for option in arguments if isinstance(option, str)]
    return [option for inner in arguments for option in options(inner)]


def problems(cls: NodeClass, error: pydantic.ValidationError) -> list[str]:
    """Returns one line for each problem in a pydantic error about a node of class `cls`."""
    lines: list[str] = []
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        # ConfigError is a ValueError. pydantic wraps it if the validator of a nested node raises it.
        if isinstance(cause, ConfigError):
            lines += cause.problems
        elif details["type"] in ("extra_forbidden", "no_such_attribute"):
            lines += unknown_keys(cls, str(details["loc"][0]), details["input"])
        else:
            lines.append(_problem(cls, details))
    return list(dict.fromkeys(lines))


def unknown_key(cls: NodeClass, field: str) -> str:
    """Returns the message about a field that the node class `cls` does not have."""
    return foreign_names.unknown(cls.key(field), _all_keys(cls))


def unknown_keys(cls: NodeClass, field: str, value: Any) -> list[str]:
    """Returns the messages about an unknown field, one for each key inside if it is a mapping."""
    if isinstance(value, Mapping):
        return foreign_names.unknown_lines(cls.key(field), _all_keys(cls), value)
    return [unknown_key(cls, field)]


def _all_keys(cls: NodeClass) -> frozenset[str]:
    """Returns the short names of all keys of a recipe, to find a key in the right node."""
    # Before Recipe is defined there is no root yet.
    return frozenset(short(key) for key, _ in walk(cls.root or cls))


def shown_value(value: Any) -> str:
    """Formats a value for a message, in at most 60 characters. A node is only named."""
    if isinstance(value, pydantic.BaseModel):
        return type(value).__name__
    try:
        text = spelled(value)
    except ValueError:
        # Python refuses to print integers of more than 4300 digits.
        text = "a number of many digits"
    if len(text) > 60:
        return text[:57] + "..."
    return text


def _problem(cls: NodeClass, details: ErrorDetails) -> str:
    """Returns the message about one value. The first kind of error that applies decides."""
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
            bound_text = f"{bound:d}" if isinstance(bound, int) else f"{bound:g}"
            return f"{setting}: must be {words} {bound_text}"
    # A tuple of fixed length, such as optim.betas.
    if kind in ("too_short", "too_long", "missing") and isinstance(value, tuple):
        count = len(typing.get_args(annotation))
        return f"{setting}: expected {count} values, got {len(value)}"
    if kind == "string_too_short":
        return f"{setting}: needs a name"
    if kind == "string_pattern_mismatch":
        return f"{setting}: use only letters, digits, '_', '.' and '-', at most 64 characters"
    if value == "":
        return f"{setting}: needs a value"
    # Lightning takes plugins=[...]. Our trainer.plugins is a single node.
    if kind == "model_type" and _is_node_in_list(value):
        return f"{key}: expected a single value, got a list; write it without brackets"
    expected = _EXPECTED.get(kind)
    if expected is None:
        return f"{setting}: {details['msg']}"
    type_name = type(value).__name__
    got = _TYPE_NAMES.get(type_name, type_name)
    return f"{setting}: expected {expected}, got {got}{_advice(cls, field, kind, value)}"


def _is_node_in_list(value: Any) -> bool:
    """Returns whether the value is a list with one node. Lists arrive as tuples."""
    if not isinstance(value, tuple) or len(value) != 1:
        return False
    return isinstance(value[0], pydantic.BaseModel)


def _nearest_option(key: str, value: Any, annotation: Any) -> str:
    """Returns the end of a message about an unknown option: a translation, or the nearest option."""
    ours = foreign_names.meant(key, value)
    if ours is None:
        return suggest(spelled(value), options(annotation))
    # The option together with other keys: "current fp8.granularity=row".
    if " " in ours:
        return f"; write {key}={ours}"
    return f"; did you mean {ours!r}?"


def _advice(cls: NodeClass, field: str, kind: str, value: Any) -> str:
    """Returns the correction of a value of the wrong type, or an empty string if none is obvious."""
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
        # An item of a list: the other items are unknown here, so the message cannot write the list.
        if annotation == tuple[str, ...]:
            return "; put it in quotes"
        return _advice_for_string(key, value)
    if kind in ("int_type", "float_type"):
        return _advice_for_number(key, value)
    return ""


def _advice_for_list(key: str, value: Any) -> str:
    """Spells a comma-separated string as a list."""
    if not isinstance(value, str):
        return ""
    items = [item.strip(" '\"") for item in value.strip("[] ").split(",")]
    return f'; write "{key}={items}"'


def _advice_for_bool(key: str, value: Any) -> str:
    """Spells a word such as yes or off as true or false."""
    # YAML 1.2 has only true and false. YAML 1.1 read these words as booleans too.
    word = str(value).lower()
    if word in ("true", "false"):
        return "; write it without quotes"
    if word in _TRUE_WORDS:
        return f"; write {key}=true"
    if word in _FALSE_WORDS:
        return f"; write {key}=false"
    return ""


def _advice_for_string(key: str, value: Any) -> str:
    """Spells a number as a string, or a list of paths as a mixture."""
    # A float has lost its original text, such as 1.10, so the message cannot quote it.
    if isinstance(value, float):
        return "; put it in quotes"
    if isinstance(value, int):
        return f"; write '{key}=\"{spelled(value)}\"'"
    if key == "data.path" and isinstance(value, tuple):
        return several_files(value)
    return ""


def _advice_for_number(key: str, value: Any) -> str:
    """Spells a list with one number, a string, or a number with separators or a unit."""
    number = value
    while isinstance(number, tuple) and len(number) == 1:
        number = number[0]
    if number is not value:
        # type, not isinstance: true is no number.
        if type(number) in (int, float):
            return f"; write {key}={number}"
        return ""
    if not isinstance(value, str):
        return ""
    if _NUMBER.fullmatch(value):
        # YAML 1.2 reads 012 as a string. YAML 1.1 read it as octal.
        without_zeros = re.sub(r"(?<![\d.])0+(?=\d)", "", value)
        if without_zeros != value:
            return f"; write {key}={without_zeros}"
        return "; write it without quotes"
    if THOUSANDS.fullmatch(value):
        return f"; write it out, as {re.sub('[,_]', '', value)}"
    match = _NUMBER_WITH_UNIT.fullmatch(value)
    if match is None:
        return ""
    # 64k may mean 64000 or 65536 tokens, so the message has both.
    power = {"k": 1, "m": 2, "g": 3, "b": 3}[match[2].lower()]
    decimal, binary = float(match[1]) * 1000**power, float(match[1]) * 1024**power
    return f"; write it out, as {decimal:.0f} or {binary:.0f}"


def several_files(paths: Sequence[Any]) -> str:
    """Returns the end of a message about several paths for data.path: a mixture."""
    parts = ", ".join(f"{{path: {path}, weight: 1}}" for path in paths)
    return f"; write 'data.mixture=[{parts}]'"


def _advice_for_node(key: str, node: NodeClass, value: Any) -> str:
    """Returns the correction of a value for a node that is neither a node nor a mapping."""
    if key == "precision":
        ours = foreign_names.meant(key, value)
        if ours:
            return f"; did you mean {ours!r}?"
        # A preset function without parentheses, fp8cfg.bf16_with_fp8_mixed.
        if callable(value):
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
    """Returns the correction of a value for a whole node.

    Args:
        key: Full name of the node.
        node: Class of the node.
        value: True or false for `enabled`, an option of one of its keys, or a list with one value
            per key. For other values the first key with a plain default is the example.
    """
    name, fields = short(key), node.model_fields
    if _has_value_per_key(node, value):
        pairs = zip(fields, value, strict=True)
        keys = ", ".join(f"{field}: {str(item).lower()}" for field, item in pairs)
        return f"; write '{name}={{{keys}}}'"
    word = spelled(value).lower()
    if isinstance(value, bool) and "enabled" in fields:
        return f"; write {name}.enabled={word}"
    # In Python a level can be assigned to recipe.storage.
    if name == "storage" and word in ("o1", "o2", "o3"):
        return f"; write opt_level={word.upper()}"
    for field, info in fields.items():
        if word in options(info.annotation):
            return f"; write {name}.{field}={word}"
    if "enabled" in fields:
        enabled = "false" if word in ("0", "off", "no", "none", "null") else "true"
        return f"; write {name}.enabled={enabled}"
    for field, info in fields.items():
        default = info.get_default(call_default_factory=True)
        if isinstance(default, bool | int | float | str):
            return f", as in {name}.{field}={spelled(default)}"
    return ""
