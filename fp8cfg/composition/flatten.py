"""Flat view of a recipe: a table from the full name of each key to its value, and back to nested mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.config.node import Node
from fp8cfg.config.recipe import Recipe, fields


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
