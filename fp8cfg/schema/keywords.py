"""Keyword arguments of Python functions with the name of a recipe key."""

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
    """Makes a function reject keyword arguments with the name of a recipe key.

    `fit(job, max_steps=10)` then has an error with the key, instead of a TypeError.

    Args:
        instead: Advice for the message, with {key} for the key.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # Unknown names without a key fall through to Python's own TypeError.
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
    """Returns the recipe key with the last part `name`, or "" if there is none or more than one."""
    # A key of `trainer` wins over keys of other nodes.
    keys = [key for key in short_keys() if key.rpartition(".")[2] == name]
    if f"trainer.{name}" in keys:
        return f"trainer.{name}"
    return keys[0] if len(keys) == 1 else ""
