"""Structured config: a recipe, or a node of one, as a dataclass that OmegaConf types, for Hydra applications with fp8cfg as a part.

OmegaConf 2.3 knows neither options nor bounds nor tuples, so options are text and tuples lists there: it checks names and kinds of
values, and the Recipe that is made of the composed node checks the rest.
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
    """An instance of the dataclass with the keys of `node`, by default a Recipe, and its values, for `ConfigStore.store(node=...)`;
    two of one kind of node merge. `Recipe(**cfg.fp8cfg)` makes a recipe of what is composed. Raises ConfigError for what is no
    node."""
    node = Recipe() if node is None else node
    if not isinstance(node, Node):
        raise ConfigError(
            f"structured_config: expected a Recipe or a node of one, got {type(node).__name__}; a"
            " preset is fp8cfg.bf16_with_fp8_mixed()"
        )
    return _instance(node)


def _instance(node: Node) -> Any:
    values = {name: getattr(node, name) for name in type(node).model_fields}
    return _dataclass(type(node))(**{name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    return (
        _instance(value)
        if isinstance(value, Node)
        else list(value)
        if isinstance(value, tuple)
        else value
    )


@functools.cache
def _dataclass(cls: type[Node]) -> Callable[..., Any]:
    """The dataclass of a node: one for each, since OmegaConf merges objects of one class alone."""
    found = []
    for name, info in cls.model_fields.items():
        default = info.get_default(call_default_factory=True)
        found.append(
            (
                name,
                _widened(info.annotation),
                dataclasses.field(default_factory=functools.partial(_plain, default)),
            )
        )
    return dataclasses.make_dataclass(cls.__name__, found, namespace={"__doc__": cls.__doc__})


def _widened(annotation: Any) -> Any:
    """`annotation` as OmegaConf takes it."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _widened(next(a for a in args if a is not types.NoneType)) | None
    if origin is typing.Literal:
        return str
    if origin is tuple:
        return list[args[0]]  # type: ignore[valid-type]
    return (
        _dataclass(annotation)
        if isinstance(annotation, type) and issubclass(annotation, Node)
        else annotation
    )
