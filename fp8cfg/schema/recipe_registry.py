"""Recipe registry: shipped recipe functions, and recipes of installed packages.

Packages register recipes under the entry point group `fp8cfg.recipes`.

Tasks are files under `conf/task/`: pretrain, sft (fine-tuning of all weights) and lora. Their values
are NeMo's for large models. A recipe keeps a smaller value of the keys in SIZES, so that fine-tuning
a tiny recipe takes a minute. It also keeps its own data.
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
from fp8cfg.schema.recipe import Recipe, read_task
from fp8cfg.schema.safe_files import NAME

_RECIPES: dict[str, RecipeFunction] = {}


class RecipeFunction(Protocol):
    """A recipe function. It returns a new Recipe with its arguments applied.

    Args:
        name: Name of the recipe.
        dir: log.dir.
        num_nodes: trainer.num_nodes.
        num_gpus_per_node: trainer.devices.
        precision: Name of a preset, a Precision or a mapping.
        task: pretrain, sft or lora. All other arguments win over the values of the task.
        parts: Other keys of a recipe: data, optim, model, lora, trainer, checkpoint, log. Each is
            a node, or a mapping that merges.

    Raises:
        ConfigError: As an assignment.
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
"""Arguments that NeMo's recipe functions have too, with their keys. None leaves the key as it is."""


def recipe(fn: Callable[..., Recipe]) -> RecipeFunction:
    """Registers a recipe function under its own name, so that `recipe=NAME` finds it.

    Returns:
        A function with the arguments of `fn`, followed by those of a RecipeFunction.
    """
    expect(
        "recipe",
        fn,
        Callable,  # type: ignore[arg-type]
        "a function that returns a Recipe; call the functions of fp8cfg.recipes",
    )
    # Arguments of `fn` are passed to it. All other arguments are assigned to its recipe afterwards.
    own_parameters = {}
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            own_parameters[name] = parameter

    @functools.wraps(fn)
    def make_recipe(*args: Any, **arguments: Any) -> Recipe:
        own_arguments = {}
        for name in own_parameters:
            if name in arguments:
                own_arguments[name] = arguments.pop(name)
        new = fn(*args, **own_arguments)
        task = None if "task" in own_parameters else arguments.pop("task", None)
        # The task comes first: all other arguments win over its values.
        if task is not None:
            apply_task(new, task)
        _assign_arguments(new, arguments)
        return new

    # The signature serves help(), completion, and Fiddle's check of argument names.
    common_parameters = []
    for parameter in inspect.signature(RecipeFunction.__call__).parameters.values():
        if parameter.name not in ("self", *own_parameters):
            common_parameters.append(parameter)
    signature = inspect.Signature(
        [*own_parameters.values(), *common_parameters], return_annotation=Recipe
    )
    make_recipe.__signature__ = signature  # type: ignore[attr-defined]
    _register(make_recipe)
    return make_recipe


def _assign_arguments(new: Recipe, arguments: Mapping[str, Any]) -> None:
    """Assigns the arguments of a recipe function. Raises ConfigError with all problems at once."""
    problems: list[str] = []
    for name, value in arguments.items():
        if value is None and name in _ARGUMENTS:
            continue
        *path, leaf = _ARGUMENTS.get(name, name).split(".")
        node = functools.reduce(getattr, path, new)
        try:
            setattr(node, leaf, fspath(value) if name == "dir" else value)
        except ConfigError as error:
            problems += error.problems
    refuse_if(problems)


def _register(fn: RecipeFunction) -> None:
    """Adds `fn` to the registry. Raises ConfigError for a taken or invalid name."""
    name = fn.__name__
    if not NAME.fullmatch(name):
        raise ConfigError(f"recipe {name}: a name has only letters, digits and '_'")
    registered = _RECIPES.get(name)
    if registered is not None:
        # A repeated notebook cell or a reloaded module replaces its own recipes.
        is_same = (registered.__module__, registered.__qualname__) == (
            fn.__module__,
            fn.__qualname__,
        )
        if not is_same:
            raise ConfigError(
                f"recipe {name}: registered twice, by {registered.__module__} and by"
                f" {fn.__module__}"
            )
    _RECIPES[name] = fn


def of_package(package: str) -> list[str]:
    """Returns the names of recipes from modules of `package`, as far as they are imported."""
    return [name for name, fn in _RECIPES.items() if fn.__module__.startswith(f"{package}.")]


def recipes() -> dict[str, RecipeFunction]:
    """Returns all registered recipe functions by name."""
    _import_recipes()
    return dict(_RECIPES)


@functools.cache
def _import_recipes() -> None:
    """Imports the shipped recipes, then the recipes of installed packages. They register themselves."""
    # Shipped recipes come first, so packages cannot take their names.
    package = importlib.import_module("fp8cfg.recipes")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for point in packages.offered("fp8cfg.recipes"):
        packages.load(point)


def named(name: str) -> Recipe:
    """Returns a new recipe.

    Args:
        name: Name of a registered recipe function.

    Raises:
        ConfigError: The name is unknown. The message has the nearest name.
    """
    known = recipes()
    if name not in known:
        raise ConfigError(f"recipe={name}: no such recipe{suggest(name, known)}")
    return known[name]()


SIZES = (
    "model.seq_length",
    "trainer.max_steps",
    "trainer.global_batch_size",
    "trainer.val_check_interval",
    "optim.warmup_steps",
)
"""Keys with an upper bound in a task. A recipe with a smaller value keeps it."""
FINE_TUNING = ("sft", "lora")
"""Tasks that start from trained weights."""


def keeps_recipe_value(key: str, task_value: Any, recipe_value: Any) -> bool:
    """Returns whether `key` keeps the recipe's value under a task.

    Args:
        key: Short name of the key.
        task_value: Value of the task.
        recipe_value: Value of the recipe.
    """
    # 0 turns a feature off, such as val_check_interval=0, so it is no smaller size.
    if key in SIZES:
        return bool(0 < recipe_value < task_value)
    return key == "data.name" and recipe_value not in SHIPPED


def apply_task(recipe: Recipe, name: str) -> None:
    """Assigns the values of a task to `recipe`, except where the recipe keeps its own.

    Args:
        recipe: The recipe. It is changed in place.
        name: pretrain, sft or lora.

    Raises:
        ConfigError: The task is unknown.
    """
    for node_name, values in read_task(name).items():
        node = getattr(recipe, node_name)
        for leaf, value in values.items():
            if not keeps_recipe_value(f"{node_name}.{leaf}", value, getattr(node, leaf)):
                setattr(node, leaf, value)
