"""Recipe YAML: the values that a recipe file sets, by their full names; and writing a recipe as YAML.

recipe: llama_8b          # what it builds on: config_groups.py
precision: bf16_fp8       # presets, by the names that the command line knows
fp8: {margin: 1}          # values, by short or full names
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fp8cfg.schema.errors import ConfigError, expect
from fp8cfg.schema.keys import full
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe, fields
from fp8cfg.schema.safe_files import dump_yaml, read_text


def flat(node: Node, at: str = "") -> dict[str, Any]:
    """Full key -> value of every leaf below `node`, whose own key is `at`; an empty `at` is the recipe."""
    out: dict[str, Any] = {}
    for name in type(node).model_fields:
        value, key = getattr(node, name), f"{at}.{name}" if at else name
        out |= flat(value, key) if isinstance(value, Node) else {key: value}
    return out


def flat_data(data: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """As `flat`, of nested mappings."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{at}.{name}" if at else name
        out |= flat_data(value, key) if isinstance(value, Mapping) else {key: value}
    return out


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings from a table of dotted keys: {"a.b": 1} gives {"a": {"b": 1}}."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        *path, leaf = key.split(".")
        node = out
        for name in path:
            node = node.setdefault(name, {})
        node[leaf] = value
    return out


def listed(node: Node) -> dict[str, Any]:
    """`node` as plain data: mappings, lists (for tuples) and scalars."""

    def lists(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: lists(v) for k, v in value.items()}
        return [lists(v) for v in value] if isinstance(value, (list, tuple)) else value

    plain: dict[str, Any] = lists(node.model_dump())
    return plain


def deep_merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it; mappings merge, everything else replaces."""
    out = dict(base)
    for key, value in changes.items():
        under = out.get(key)
        out[key] = (
            deep_merge(under, value)
            if isinstance(under, dict) and isinstance(value, dict)
            else value
        )
    return out


def assigned(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """A copy of `recipe` with `values`, by their full keys. Raises ConfigError with every value that is not valid."""
    return recipe.model_copy(update=nested(values), deep=True)


def owner(key: str) -> tuple[type[Node], str]:
    """The class that has the field of the full `key`, and the field's name."""
    parent, _, leaf = key.rpartition(".")
    return (fields()[parent].annotation if parent else Recipe), leaf


def typed(key: str, value: Any) -> Any:
    """`value` as the schema holds it under the full `key`: options in their spelling, lists as tuples. Raises ConfigError
    where it is not valid there."""
    cls, leaf = owner(key)
    return getattr(cls(**{leaf: value}), leaf)


def settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """The values that nested `data` sets, as the schema holds them, by full keys. A preset's name given for a node sets all
    of its keys. Raises ConfigError where one is not valid."""
    out: dict[str, Any] = {}
    for key, value in flat_data(data).items():
        made = typed(key, value)
        out |= flat(made, key) if isinstance(made, Node) else {key: made}
    return out


def is_node(key: str) -> bool:
    """Whether the full `key` is a node, with keys of its own."""
    annotation = fields()[key].annotation if key in fields() else None
    return isinstance(annotation, type) and issubclass(annotation, Node)


def key_lines(path: Path) -> dict[str, int]:
    """The line of each dotted key in the file `path`, which `read_yaml` has accepted; the entries of a list have their index
    for a name."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node | None, at: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in sorted(
                node.value, key=lambda item: item[0].value == "<<"
            ):  # own keys before merged ones
                if key.value == "<<":
                    for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                        walk(merged, at)
                elif at + key.value not in found:
                    found[at + key.value] = key.start_mark.line + 1
                    walk(value, f"{at}{key.value}.")
        elif isinstance(node, yaml.SequenceNode):
            for index, entry in enumerate(node.value):
                found[f"{at}{index}"] = entry.start_mark.line + 1
                walk(entry, f"{at}{index}.")

    walk(
        yaml.compose(read_text(path).replace("\t", " "), yaml.SafeLoader), ""
    )  # JSON has tabs between its values
    return found


_SCHEMA_LINE = "# A whole recipe of fp8cfg, as composed.\n"


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML text; `from_yaml` reads it back equal. Raises ConfigError for what is no Recipe."""
    expect("to_yaml", recipe, Recipe, "a Recipe, such as job.recipe")
    return _SCHEMA_LINE + dump_yaml(listed(recipe))


def full_names(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with short names at its top replaced by full ones. Raises ConfigError where one key is given both ways."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        tree = nested({full(key): value})
        twice = _common_leaf(out, tree)
        if twice:
            raise ConfigError(f"{twice}: given twice, under its short and its full name")
        out = deep_merge(out, tree)
    return out


def _common_leaf(a: Any, b: Any, at: str = "") -> str | None:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return at
    return next(
        (
            found
            for k in a
            if k in b and (found := _common_leaf(a[k], b[k], f"{at}.{k}".lstrip(".")))
        ),
        None,
    )
