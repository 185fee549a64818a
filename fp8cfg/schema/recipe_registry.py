"""Recipe registry: shipped recipe functions, and those of installed packages under the entry point group `fp8cfg.recipes`."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from os import PathLike, fspath
from typing import Any, Protocol

from fp8cfg.schema import packages, tasks
from fp8cfg.schema.errors import ConfigError, expect, refuse_if, suggest
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import NAME

_RECIPES: dict[str, RecipeFunction] = {}


class RecipeFunction(Protocol):
    """A recipe function: returns a fresh Recipe, with what its arguments say on top. `dir` is log.dir, `num_nodes` and
    `num_gpus_per_node` are the machines of the trainer; `precision` is a preset's name, a Precision or a mapping; `task` is
    pretrain, sft or lora, whose values the others go before; `parts` are other keys of a recipe: data, optim, model, lora, trainer,
    checkpoint, log, each a node or a mapping, which merges. Raises ConfigError as assignment does.
    """

    __name__: str
    __qualname__: str

    def __call__(
        self,
        *,
        name: str | None = None,
        dir: str | PathLike[str] | None = None,
        num_nodes: int | None = None,
        num_gpus_per_node: int | None = None,
        precision: Any = None,
        task: str | None = None,
        **parts: Any,
    ) -> Recipe: ...


_ARGUMENTS = {
    "name": "name",
    "dir": "log.dir",
    "num_nodes": "trainer.num_nodes",
    "num_gpus_per_node": "trainer.devices",
    "precision": "precision",
}
"""Keys of the arguments that NeMo's recipe functions have too; None leaves one as it is."""


def recipe(fn: Callable[..., Recipe]) -> RecipeFunction:
    """Register the recipe function `fn` under its own name, so that `recipe=NAME` finds it. What is returned takes the arguments of
    a RecipeFunction, and those of `fn`, which go before them."""
    expect(
        "recipe",
        fn,
        Callable,  # type: ignore[arg-type]
        "a function that gives a Recipe; those of fp8cfg.recipes are called",
    )
    own = {
        name: p
        for name, p in inspect.signature(fn).parameters.items()
        if p.kind is not p.VAR_KEYWORD
    }

    @functools.wraps(fn)
    def make(*args: Any, **given: Any) -> Recipe:
        made, problems = (
            fn(*args, **{name: given.pop(name) for name in own if name in given}),
            list[str](),
        )
        if "task" not in own and (task := given.pop("task", None)) is not None:
            tasks.apply(made, task)
        for name, value in given.items():
            if value is None and name in _ARGUMENTS:
                continue
            *path, leaf = _ARGUMENTS.get(name, name).split(".")
            try:
                setattr(
                    functools.reduce(getattr, path, made),
                    leaf,
                    fspath(value) if name == "dir" else value,
                )
            except ConfigError as e:
                problems += e.problems
        refuse_if(problems)
        return made

    more = [
        p
        for p in inspect.signature(RecipeFunction.__call__).parameters.values()
        if p.name not in ("self", *own)
    ]
    signature = inspect.Signature([*own.values(), *more], return_annotation=Recipe)
    make.__signature__ = signature  # type: ignore[attr-defined]
    _register(make)
    return make


def _register(fn: RecipeFunction) -> None:
    name = fn.__name__
    if not NAME.fullmatch(name):
        raise ConfigError(f"recipe {name}: a recipe's name is letters, digits and '_'")
    other = _RECIPES.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (
        fn.__module__,
        fn.__qualname__,
    ):
        raise ConfigError(
            f"recipe {name}: registered twice, by {other.__module__} and by {fn.__module__}"
        )
    _RECIPES[name] = fn


def of_package(package: str) -> list[str]:
    """The names of the recipes that the modules of `package` have registered so far."""
    return [name for name, fn in _RECIPES.items() if fn.__module__.startswith(f"{package}.")]


@functools.cache
def _load() -> None:
    package = importlib.import_module("fp8cfg.recipes")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for point in packages.offered("fp8cfg.recipes"):
        packages.load(point)


def recipes() -> dict[str, RecipeFunction]:
    """Every registered recipe function by name."""
    _load()
    return dict(_RECIPES)


def named(name: str) -> Recipe:
    """The recipe `name`, freshly built. Raises ConfigError with the nearest name where there is none."""
    known = recipes()
    if name not in known:
        raise ConfigError(f"recipe={name}: no such recipe" + suggest(name, known))
    return known[name]()
