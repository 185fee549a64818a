"""`fp8cfg.lower` and `fp8cfg.build`.

    recipe -> check, cut or fit -> graph -> Job

`lower` stops at the graph and loads no torch. `build` builds it on this machine.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fp8cfg.backends.choice import Choice, Hardware
from fp8cfg.building.job import Job
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
    """Lowers `recipe` to its Fiddle graph, without loading torch.

    Every key with an effect is one leaf. An edit of the graph changes what `fdl.build` builds and
    the job's recipe. It does not change `recipe`.

    Args:
        recipe: What to build.
        hardware: Where it must run. Defaults to a CPU.
        model: A custom model to convert, in place of the recipe's Transformer.
        choice: The backend, if the caller has chosen it.

    Raises:
        ConfigError: The recipe breaks rules, or no backend runs it on `hardware`.
    """
    graph = import_graph()
    recipe, model = _fit(recipe, model)
    make_plan(recipe, hardware or Hardware("cpu"), model, choice)
    if model is None and recipe.model.weights:
        family_of_weights(recipe.model)
    return graph.make_graph(recipe, model)


@refuses_recipe_keys("set recipe.{key}")
def build(recipe: Recipe, model: nn.Module | None = None) -> Job:
    """Builds a job on this machine. Later changes of `recipe` do not reach the job.

    Args:
        recipe: What to build.
        model: A custom model to convert, in place of the recipe's Transformer. It is converted in
            place and moved to the device, and `recipe.model` has no effect. Its parameters become
            float32, then get the storage dtypes of the recipe. Parameters outside of linear layers
            that storage leaves in float32 get the compute dtype over float32 masters. An nn.Linear
            is put into an nn.Sequential, since a root cannot be replaced in place.

    Raises:
        ConfigError: The recipe does not run here or does not fit into memory. Raised before any
            memory is allocated.
    """
    graph = import_graph()
    recipe, model = _fit(recipe, model)
    job = graph.construct(graph.make_graph(recipe, model))
    assert isinstance(job, Job)
    return job


def _fit(recipe: Recipe, model: nn.Module | None) -> tuple[Recipe, nn.Module | None]:
    """Checks the recipe. Cuts a smoke run, or fits the recipe to a custom model."""
    if model is None:
        return cut_if_smoke(checked_recipe(recipe)), None
    from fp8cfg.conversion import convert  # loads torch

    recipe, model = convert.to_build(recipe, model)
    return cut_if_smoke(recipe, model), model


def import_graph() -> ModuleType:
    """Imports building.graph. Raises ConfigError if Fiddle cannot be imported."""
    if sys.flags.optimize > 1:
        raise ConfigError(
            "PYTHONOPTIMIZE=2 (python -OO): Fiddle needs the docstrings that it drops; unset it, or"
            " set it to 1"
        )
    from fp8cfg.building import graph

    return graph
