"""Keyword arguments of the Python interface that are keys of a recipe."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe import short_keys

P = ParamSpec("P")
R = TypeVar("R")


def refuses_recipe_keys(instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function reject a keyword argument that is a key of a recipe.

    Args:
        instead: What to do, with {key} for the key.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in known:
                    continue
                key = _key_by_last_part(name)
                if key:
                    raise ConfigError(
                        f"{function.__name__}: has no argument {name}; {instead.format(key=key)}"
                    )
            return function(*args, **kwargs)

        return call

    return decorate


def _key_by_last_part(name: str) -> str:
    """Returns the key of a recipe whose last part is `name`. Empty unless there is exactly one."""
    keys = [key for key in short_keys() if key.rpartition(".")[2] == name]
    if f"trainer.{name}" in keys:
        return f"trainer.{name}"
    return keys[0] if len(keys) == 1 else ""
