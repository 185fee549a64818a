"""Structured config: a recipe or a node as a dataclass, for Hydra applications that use fp8cfg.

OmegaConf 2.3 has no options, bounds or tuples. Options become str and tuples become lists.
OmegaConf checks names and types, and `Recipe(**config)` checks the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any

from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe


def structured_config(node: Node | None = None) -> Any:
    """Returns `node` as an instance of a dataclass, for `ConfigStore.store(node=...)`.

    Use `Recipe(**cfg.fp8cfg)` to create a recipe from the composed config. Two instances of the
    same node class can be merged.

    Args:
        node: A Recipe, or one of its nodes. Defaults to a Recipe.

    Raises:
        ConfigError: `node` is not a node.
    """
    if node is None:
        node = Recipe()
    if not isinstance(node, Node):
        raise ConfigError(
            f"structured_config: expected a Recipe or a node of one, got {type(node).__name__}; a"
            " preset is fp8cfg.bf16_with_fp8_mixed()"
        )
    return _instance(node)


def _instance(node: Node) -> Any:
    """Returns a node as an instance of its dataclass."""
    values = {name: _plain(getattr(node, name)) for name in type(node).model_fields}
    return _dataclass(type(node))(**values)


def _plain(value: Any) -> Any:
    """Returns a value for OmegaConf: nodes as dataclasses, tuples as lists."""
    if isinstance(value, Node):
        return _instance(value)
    if isinstance(value, tuple):
        return list(value)
    return value


@functools.cache  # one class for each node, because OmegaConf merges only objects of one class
def _dataclass(cls: type[Node]) -> Callable[..., Any]:
    """Returns the dataclass of a node's class."""
    members: list[tuple[str, Any, Any]] = []
    for name, info in cls.model_fields.items():
        default = info.get_default(call_default_factory=True)
        # A factory, because dataclasses reject lists and other mutable defaults.
        factory = functools.partial(_plain, default)
        annotation = _omegaconf_type(info.annotation)
        members.append((name, annotation, dataclasses.field(default_factory=factory)))
    return dataclasses.make_dataclass(cls.__name__, members, namespace={"__doc__": cls.__doc__})


def _omegaconf_type(annotation: Any) -> Any:
    """Returns the type annotation that OmegaConf supports."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        # OmegaConf has no unions except with None.
        first = next(arg for arg in args if arg is not types.NoneType)
        return _omegaconf_type(first) | None
    if origin is typing.Literal:
        return str
    if origin is tuple:
        return list[_omegaconf_type(args[0])]  # type: ignore[misc]
    if isinstance(annotation, type) and issubclass(annotation, Node):
        return _dataclass(annotation)
    return annotation
