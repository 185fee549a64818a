"""Builder: a recipe is lowered to a Fiddle graph, without torch, and the graph is built into a Job once everything is checked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

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
    """The Fiddle graph of `recipe`, a tree of graph_nodes in which every key that acts is one leaf; with `model` as `given` where
    there is one. What is changed in the graph is what `fdl.build` makes a job of, and what its recipe says; the recipe that was
    lowered does not change. Loads no torch.

    Raises ConfigError for what the recipe's rules refuse, and `hardware`, by default a CPU, or whoever multiplies there: `choice`,
    by default whoever can.
    """
    graph_nodes = nodes()

    recipe = checked_recipe(recipe)
    small = cut_if_smoke(recipe, model)
    make_plan(small, hardware or Hardware("cpu"), model, choice)
    if model is None and small.model.weights:
        family_of_weights(small.model)
    return graph_nodes.graph(job, recipe, model)


def nodes() -> ModuleType:
    """The module graph_nodes. Raises ConfigError where Fiddle, which it is made of, cannot be imported."""
    if sys.flags.optimize > 1:
        raise ConfigError(
            "PYTHONOPTIMIZE=2 (python -OO): Fiddle needs the docstrings that it drops; unset it, or"
            " set it to 1"
        )
    from fp8cfg.building import graph as graph_nodes

    return graph_nodes


@refuses_recipe_keys("set recipe.{key}")
def build(recipe: Recipe, model: nn.Module | None = None) -> Job:
    """The Job of `recipe` on this machine. Raises ConfigError, before any memory is taken, for a recipe that cannot run here,
    one that does not fit into memory among them.

    The recipe is copied: later changes to it do not reach the job. With `model` the job is around that one, converted in place
    and moved to the device, and the recipe's `model` node has no effect. Its parameters become float32 and then what the
    recipe's storage says; what it would leave in float32 beside linear layers has the compute dtype, over float32 masters. An
    nn.Linear is put into an nn.Sequential, for a root cannot be replaced in place.
    """
    graph_nodes = nodes()

    if model is None:
        recipe = checked_recipe(recipe)
        cut_if_smoke(recipe)
    else:
        from fp8cfg.conversion import convert

        recipe, model = convert.to_build(recipe, model)
    built = graph_nodes.built(graph_nodes.graph(job, recipe, model))
    assert isinstance(built, Job)
    return built


def job(**parts: Any) -> Job:
    """The Job of `parts`, what the nodes of a graph build, on this machine: the graph's target. Raises ConfigError as `build`."""
    graph_nodes = nodes()
    from fp8cfg.building.assembly import assemble  # it loads torch

    model = parts.pop("given", None)
    return assemble(graph_nodes.recipe_of(parts), model)
