"""Recipe YAML: reading a file's values by their full names, and writing a recipe as YAML.

recipe: llama_8b          # base recipe: config_groups.py
precision: bf16_fp8       # preset, named as on the command line
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


def flat(node: Node, prefix: str = "") -> dict[str, Any]:
    """Returns the value of every leaf below `node` by full key. `prefix` is the node's own key."""
    values: dict[str, Any] = {}
    for name in type(node).model_fields:
        value = getattr(node, name)
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Node):
            values |= flat(value, key)
        else:
            values[key] = value
    return values


def flat_data(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings by dotted key."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            values |= flat_data(value, key)
        else:
            values[key] = value
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested mappings from dotted keys: {"a.b": 1} becomes {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, leaf = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree


def listed(node: Node) -> dict[str, Any]:
    """Returns `node` as plain data: mappings, lists instead of tuples, and scalars."""
    data: dict[str, Any] = _with_lists(node.model_dump())
    return data


def _with_lists(value: Any) -> Any:
    """Replaces tuples by lists, also inside of mappings."""
    if isinstance(value, dict):
        return {key: _with_lists(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_lists(inner) for inner in value]
    return value


def deep_merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns `base` updated with `changes`. Mappings are merged, other values replaced."""
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            value = deep_merge(inner, value)
        merged[key] = value
    return merged


def assigned(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Returns a copy of `recipe` with new values.

    Args:
        recipe: The recipe.
        values: New values by full key.

    Raises:
        ConfigError: With every invalid value.
    """
    return recipe.model_copy(update=nested(values), deep=True)


def owner(key: str) -> tuple[type[Node], str]:
    """Returns the class with the field of the full `key`, and the field's name."""
    parent, _, leaf = key.rpartition(".")
    if not parent:
        return Recipe, leaf
    return fields()[parent].annotation, leaf


def typed(key: str, value: Any) -> Any:
    """Returns `value` in the schema's type for the full `key`.

    Options get their canonical spelling, and lists become tuples.

    Raises:
        ConfigError: The value is invalid.
    """
    cls, leaf = owner(key)
    # The other fields have defaults, so this checks one value.
    return getattr(cls(**{leaf: value}), leaf)


def settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that nested `data` sets by full key, in the schema's types.

    The name of a preset as the value of a node sets all keys of the node.

    Raises:
        ConfigError: A value is invalid.
    """
    values: dict[str, Any] = {}
    for key, value in flat_data(data).items():
        converted = typed(key, value)
        if isinstance(converted, Node):
            values |= flat(converted, key)
        else:
            values[key] = converted
    return values


def is_node(key: str) -> bool:
    """Returns whether the full `key` is a node with keys below it."""
    if key not in fields():
        return False
    annotation = fields()[key].annotation
    return isinstance(annotation, type) and issubclass(annotation, Node)


def key_lines(path: Path) -> dict[str, int]:
    """Returns the line of each dotted key in a file, from 1.

    Entries of a list have their index as name. `read_yaml` must have accepted the file.
    """
    text = read_text(path).replace("\t", " ")  # JSON has tabs between its values
    lines: dict[str, int] = {}
    root = yaml.compose(text, yaml.SafeLoader)
    if root is not None:
        _add_lines(root, "", lines)
    return lines


def _add_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    """Adds the line of each key below a YAML node whose key, with a dot, is `prefix`."""
    if isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            lines[f"{prefix}{index}"] = entry.start_mark.line + 1
            _add_lines(entry, f"{prefix}{index}.", lines)
    if not isinstance(node, yaml.MappingNode):
        return
    # Keys of the mapping override keys that `<<` merges into it.
    own_keys_first = sorted(node.value, key=lambda item: item[0].value == "<<")
    for key, value in own_keys_first:
        if key.value == "<<":  # keys that are merged in
            if not isinstance(value, yaml.SequenceNode):
                _add_lines(value, prefix, lines)
                continue
            for mapping in value.value:
                _add_lines(mapping, prefix, lines)
        elif prefix + key.value not in lines:
            lines[prefix + key.value] = key.start_mark.line + 1
            _add_lines(value, f"{prefix}{key.value}.", lines)


_SCHEMA_LINE = "# A whole recipe of fp8cfg, as composed.\n"


def to_yaml(recipe: Recipe) -> str:
    """Returns the whole recipe as YAML text. `from_yaml` reads it back as an equal recipe.

    Raises:
        ConfigError: `recipe` is not a Recipe.
    """
    expect("to_yaml", recipe, Recipe, "a Recipe, such as job.recipe")
    return _SCHEMA_LINE + dump_yaml(listed(recipe))


def full_names(data: dict[str, Any]) -> dict[str, Any]:
    """Returns `data` with short names at its top level replaced by full names.

    Raises:
        ConfigError: A key is given under both names.
    """
    out: dict[str, Any] = {}
    for key, value in data.items():
        # A full name has dots, so it becomes nested mappings.
        tree = nested({full(key): value})
        twice = _common_leaf(out, tree)
        if twice:
            raise ConfigError(f"{twice}: set twice, by its short and its full name")
        out = deep_merge(out, tree)
    return out


def _common_leaf(a: Any, b: Any, at: str = "") -> str | None:
    """Returns the first key where two trees overlap and one has a leaf, None if none."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return at
    for key in a:
        if key in b:
            common = _common_leaf(a[key], b[key], f"{at}.{key}".lstrip("."))
            if common is not None:
                return common
    return None
