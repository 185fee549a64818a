"""`fp8cfg.lower` and `fp8cfg.build`: from a recipe to its graph and its job.

    recipe -> check; smoke size or custom model -> graph -> Job
                                                   lower    build

`lower` makes the graph without torch. `build` allocates memory on this machine.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fp8cfg.backends.choice import Choice, Hardware
from fp8cfg.building.job import Job
from fp8cfg.composition.value_sources import copy_sources
from fp8cfg.planning.job_plan import checked_recipe, cut_if_smoke, make_plan
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.hugging_face import family_of_weights
from fp8cfg.schema.keywords import refuses_recipe_keys
from fp8cfg.schema.recipe import Recipe

if TYPE_CHECKING:
    from types import ModuleType

    import fiddle as fdl
    from torch import nn


__all__ = ["Job", "build", "lower"]


def lower(
    recipe: Recipe,
    hardware: Hardware | None = None,
    model: nn.Module | None = None,
    choice: Choice | None = None,
) -> fdl.Config[Job]:
    """Lowers a recipe to a Fiddle graph, without loading torch.

    Each key with an effect is one leaf. If you edit the graph, `fdl.build` builds the edited job.
    `recipe` stays the same.

    Args:
        recipe: The recipe.
        hardware: Hardware to check the recipe for. Defaults to a CPU.
        model: A custom model to convert, instead of the recipe's Transformer.
        choice: The backend. By default it is chosen for `hardware`.

    Returns:
        The graph of `fp8cfg.building.graph.build_job`.

    Raises:
        ConfigError: The recipe breaks rules, or no backend runs it on `hardware`.
    """
    graph = import_graph()
    recipe, model = _fit(recipe, model)
    # The plan is dropped: it only checks here. `build_plan` makes another one for its machine.
    make_plan(recipe, hardware or Hardware("cpu"), model, choice)
    # Raises ConfigError for an unknown model family. Warns if model.weights has another model.
    if model is None and recipe.model.weights:
        family_of_weights(recipe.model)
    return graph.make_graph(recipe, model)


@refuses_recipe_keys("set recipe.{key}")
def build(recipe: Recipe, model: nn.Module | None = None) -> Job:
    """Builds a job on this machine.

    The job has a copy of the recipe, so you can change `recipe` afterwards. All ranks call it.

    Args:
        recipe: The recipe.
        model: A custom model, instead of the recipe's Transformer. `recipe.model` then has no
            effect. The model is converted in place and moved to the device. Its weights get the
            storage dtypes of the recipe. Parameters outside linear layers get the compute dtype and
            float32 masters, if storage would leave them in float32. A single nn.Linear is wrapped
            in an nn.Sequential, because a root module cannot be replaced in place.

    Returns:
        The job, for `fit` or your own training loop.

    Raises:
        ConfigError: The recipe does not run or does not fit into memory here. Raised before memory
            is allocated.
    """
    graph = import_graph()
    recipe, model = _fit(recipe, model)
    job = graph.construct(graph.make_graph(recipe, model))
    assert isinstance(job, Job)
    # The graph has only the values.
    copy_sources(recipe, job.recipe)
    return job


def _fit(recipe: Recipe, model: nn.Module | None) -> tuple[Recipe, nn.Module | None]:
    """Checks the recipe, reduces a smoke run, and fits the recipe to a custom model."""
    if model is None:
        return cut_if_smoke(checked_recipe(recipe)), None
    from fp8cfg.conversion import convert  # loads torch

    recipe, model = convert.prepare_build(recipe, model)
    return cut_if_smoke(recipe, model), model


def import_graph() -> ModuleType:
    """Imports building.graph. Raises ConfigError if Fiddle cannot be imported."""
    # Not at the top of the module: without docstrings the import of Fiddle itself fails.
    if sys.flags.optimize > 1:
        raise ConfigError(
            "PYTHONOPTIMIZE=2 (python -OO): it removes the docstrings that Fiddle needs; unset it, or"
            " set it to 1"
        )
    from fp8cfg.building import graph

    return graph
