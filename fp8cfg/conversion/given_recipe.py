"""Recipes as functions for models of one's own take them: a Recipe, a precision, or another project's object, such as a handler of
Accelerate's (TERecipeKwargs, MSAMPRecipeKwargs, AORecipeKwargs, FP8RecipeKwargs) or a recipe of Transformer Engine's.
"""

from __future__ import annotations

import logging
from typing import Any

from fp8cfg.config.errors import ConfigError
from fp8cfg.config.precision import Precision
from fp8cfg.config.recipe import Recipe


def given_recipe(given: Any) -> Any:
    """The Recipe that `given` means, with a line to the logger for each thing in it that has no counterpart here; `given` itself
    where it is no such object."""
    if isinstance(given, Recipe):
        return given
    if isinstance(given, Precision):
        recipe = Recipe()
        recipe.precision = given
        return recipe
    from fp8cfg.interop import from_object

    try:
        found = from_object(given)
    except ConfigError as e:
        if "no object of a project that is known here" in str(e):
            return given
        raise
    for line in found.lost:
        logging.getLogger("fp8cfg").warning(f"{type(given).__name__}: {line}")
    return found.recipe


def of_no_effect(recipe: Recipe) -> list[str]:
    """A line for each thing in `recipe` that only its own Transformer has."""
    lines = []
    if every := recipe.log.fp8_stats_every_n_steps:
        lines.append(
            f"log.fp8_stats_every_n_steps={every}: has no effect on a model of your own; drop it,"
            " and call fp8cfg.numerics.quantization_statistics.collect(model, run) in your loop"
        )
    if recipe.lora.enabled:
        lines.append(
            "lora.enabled=true: its adapters stand in the Transformer of a recipe; give a model of"
            " your own PEFT's, by peft.get_peft_model(model, LoraConfig(...)), and write"
            " lora.enabled=false"
        )
    return lines
