"""Recipe registry: shipped recipe functions, and those of installed packages under the entry point group `fp8cfg.recipes`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

from fp8cfg.config import entry_points
from fp8cfg.config.errors import ConfigError, suggest
from fp8cfg.config.files import NAME
from fp8cfg.config.recipe import Recipe

F = TypeVar("F", bound=Callable[[], Recipe])
_RECIPES: dict[str, Callable[[], Recipe]] = {}


def recipe(fn: F) -> F:
    """Register the recipe function `fn` under its own name, so that `recipe=NAME` finds it."""
    name = fn.__name__
    if not NAME.fullmatch(name):
        raise ConfigError(f"recipe {name}: a recipe's name is letters, digits and '_'")
    other = _RECIPES.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (fn.__module__, fn.__qualname__):
        raise ConfigError(f"recipe {name}: registered twice, by {other.__module__} and by {fn.__module__}")
    _RECIPES[name] = fn
    return fn


def of_package(package: str) -> list[str]:
    """The names of the recipes that the modules of `package` have registered so far."""
    return [name for name, fn in _RECIPES.items() if fn.__module__.startswith(f"{package}.")]


@functools.cache
def _load() -> None:
    package = importlib.import_module("fp8cfg.recipes")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for point in entry_points.offered("fp8cfg.recipes"):
        entry_points.load(point)


def recipes() -> dict[str, Callable[[], Recipe]]:
    """Every registered recipe function by name."""
    _load()
    return dict(_RECIPES)


def named(name: str) -> Recipe:
    """The recipe `name`, freshly built. Raises ConfigError with the nearest name where there is none."""
    known = recipes()
    if name not in known:
        raise ConfigError(f"recipe={name}: no such recipe" + suggest(name, known))
    return known[name]()
