"""Recipe registry: shipped recipe functions, and those of installed packages under the entry point group `fp8cfg.recipes`.

Tasks say what a recipe is trained for: pretrain, sft (all weights are fine-tuned) and lora, files under `conf/task/`. Their values
are NeMo's for large models. A recipe keeps its value if that is a smaller one of SIZES, so that fine-tuning a tiny recipe takes a
minute too, and data that it names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import Any, Protocol

from fp8cfg.schema import packages
from fp8cfg.schema.data import SHIPPED
from fp8cfg.schema.errors import ConfigError, expect, refuse_if, suggest
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import CONF, NAME, read_yaml

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
            apply_task(made, task)
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


SIZES = (
    "model.seq_length",
    "trainer.max_steps",
    "trainer.global_batch_size",
    "trainer.val_check_interval",
    "optim.warmup_steps",
)
"""Keys whose value in a task is an upper bound."""
FINE_TUNING = ("sft", "lora")
"""Tasks that start from trained weights."""


def keeps_recipe_value(key: str, task_value: Any, recipe_value: Any) -> bool:
    """Whether `key` keeps the recipe's value under a task that sets `task_value`."""
    if key in SIZES:
        return bool(0 < recipe_value < task_value)
    return key == "data.name" and recipe_value not in SHIPPED


def apply_task(recipe: Recipe, name: str) -> None:
    """Assigns the values of the task `name` to `recipe`. Raises ConfigError with the nearest name if there is no such task."""
    tasks = sorted(p.stem for p in (CONF / "task").glob("*.yaml"))
    if name not in tasks:
        hint = suggest(str(name), tasks) or f"; there are {', '.join(tasks)}"
        raise ConfigError(f"task={name}: no such task{hint}")
    for node_name, values in _read_task(name).items():
        node = getattr(recipe, node_name)
        for leaf, value in values.items():
            if not keeps_recipe_value(f"{node_name}.{leaf}", value, getattr(node, leaf)):
                setattr(node, leaf, value)


@functools.cache
def _read_task(name: str) -> Mapping[str, Mapping[str, Any]]:
    return read_yaml(CONF / "task" / f"{name}.yaml")
