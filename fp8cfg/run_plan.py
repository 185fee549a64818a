"""Plan of a run before there is a GPU: from a recipe, a GPU's name and a number of ranks to what runs, fits and gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fp8cfg import builder, smoke
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.refusal import LayoutRefusal
from fp8cfg.report import graph, plan_report
from fp8cfg.report.gpus import GPU, GPUS, named
from fp8cfg.report.memory.machines import machines
from fp8cfg.report.memory.nearest_fit import Line, words_alone
from fp8cfg.report.plan_report import Plan

MOST = 9_999_999
"""Ranks that can be planned for."""


def plan(recipe: Recipe, gpu: str | None = None, gpus: int | None = None) -> Plan:
    """Plan of `recipe` on `gpus` ranks, by default trainer.num_nodes x trainer.devices, each with the GPU called `gpu`, such as
    "h100"; without a name on a CPU, which emulates FP8. Loads no torch. Where no backend can run the recipe on that GPU the plan's
    `refusals` say why.

    Raises ConfigError for a recipe that breaks its rules, a GPU that is not in the table, and ranks that do not divide: with the
    words that run there where the layout is all that is wrong.
    """
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"plan: expected a Recipe, got {type(recipe).__name__}; compose(['recipe=llama_8b'])"
            " gives one"
        )
    if gpu is not None and not isinstance(gpu, str):
        raise ConfigError(f"gpu={gpu!r}: expected a name; there are {', '.join(GPUS)}")
    if gpus is not None and (type(gpus) is not int or not 1 <= gpus <= MOST):
        raise ConfigError(f"gpus={gpus!r}: expected a number of GPUs, 1 to {MOST}")
    found = named(gpu, "gpu=") if gpu else None
    recipe, problems = _settled(recipe, gpus)
    refuse_hardware(recipe, gpu, "gpu=")
    return planned(recipe.model_copy(deep=True), gpus, found, problems=problems)


def _settled(recipe: Recipe, gpus: int | None) -> tuple[Recipe, Sequence[str]]:
    """`recipe`, checked, and on so many `gpus` where its layout is for more than it has itself; or as it is, with its problems,
    where these are of its layout alone."""
    every = [recipe]
    if gpus is not None:
        nodes, devices = machines(gpus)
        every.append(
            recipe.model_copy(update={"trainer": {"num_nodes": nodes, "devices": devices}})
        )
    problems: Sequence[str] = ()
    for each in every:
        try:
            return builder.checked(each), ()
        except ConfigError as e:
            problems = e.problems
    if not all(isinstance(line, LayoutRefusal) for line in problems):
        raise ConfigError(problems)
    return every[-1], problems


def planned(
    recipe: Recipe,
    ranks: int | None,
    gpu: GPU | None,
    whole_line: Line = words_alone,
    problems: Sequence[str] = (),
) -> Plan:
    """Plan of a checked `recipe`, with what will be built. `whole_line` makes a command line of a fit that a refusal offers;
    without it its words stand alone. Of a recipe whose layout its own rules refuse, with these `problems`, there is no plan: raises
    ConfigError with what runs there."""
    world = ranks or recipe.trainer.num_nodes * recipe.trainer.devices
    recipe = recipe if problems else smoke.cut(recipe, world)
    found = plan_report.make(recipe, world, gpu, whole_line, problems)
    if found.choice is None:
        return found
    return replace(
        found,
        built=graph.built(recipe, *builder.planned(recipe, found.hardware, choice=found.choice)),
    )


def refuse_hardware(recipe: Recipe, gpu: str | None, option: str) -> None:
    """Raise ConfigError where trainer.accelerator and the name `gpu` contradict each other; `option` is what names one."""
    accelerator = recipe.trainer.accelerator
    if gpu and accelerator == "cpu":
        raise ConfigError(
            f"{option}{gpu}: trainer.accelerator=cpu runs on none; drop one of the two"
        )
    if accelerator == "cuda" and not gpu:
        raise ConfigError(
            f"trainer.accelerator=cuda: name the GPU, as in {option}h100; there are"
            f" {', '.join(GPUS)}"
        )
