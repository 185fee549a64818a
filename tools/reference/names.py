"""Preset reference: recipes, precision presets, data presets and tasks by name, with the description and settings of each file."""

from __future__ import annotations

import re

from fp8cfg.cli.list import entries
from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.report.key_explanation import shown
from fp8cfg.schema.presets import FUNCTIONS, precision_preset
from fp8cfg.schema.recipe import Recipe, short
from fp8cfg.schema.recipe_registry import named
from tools.reference.markdown import code, table

LAYOUT = re.compile(r", (?:(?:one|two|four|\d+) nodes?|(?:tensor|pipeline|context) parallel \d+)\b")
"""Parts of a description that have columns of their own here."""


def page() -> str:
    return "\n\n".join(
        [
            "# Recipes and presets",
            "The choices of `recipe=`, `precision=`, `data=` and `task=`. `fp8cfg list` prints them too. `--config-dir FOLDER` adds your own "
            "files. A precision preset replaces all precision values of the recipe. Keys on the same command line still win. Its Python "
            "function has NeMo's or Megatron-Bridge's name for it, if they have one. [Choose a precision](../choosing-a-precision.md) tells you which one to use.",
            "## recipe",
            "GPUs is the number that the recipe is meant for. In a layout, TP is tensor, PP pipeline and CP context parallelism.",
            table(
                ["name", "description", "GPUs", "layout"],
                [_recipe(e.name, e.about) for e in entries("recipe", None)],
            ),
            "## precision",
            table(
                ["name", "Python", "what it is", "sets"],
                [_precision(e.name, e.about) for e in entries("precision", None)],
            ),
            "## data",
            table(["name", "what it is"], [[code(e.name), e.about] for e in entries("data", None)]),
            "## task",
            table(["name", "what it is"], [[code(e.name), e.about] for e in entries("task", None)]),
        ]
    )


def _recipe(name: str, about: str) -> list[str]:
    trainer = named(name).trainer
    strategy = trainer.strategy
    sizes = {
        "TP": strategy.tensor_model_parallel_size,
        "PP": strategy.pipeline_model_parallel_size,
        "CP": strategy.context_parallel_size,
    }
    layout = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    gpus = trainer.num_nodes * trainer.devices
    return [code(name), LAYOUT.sub("", about), f"{gpus:,}", layout]


def _precision(name: str, about: str) -> list[str]:
    functions = " ".join(
        code(f) for f, preset in FUNCTIONS.items() if preset == name and f != name
    ) or code(name)
    recipe = Recipe()
    before = flat(recipe)
    recipe.precision = precision_preset(name)
    settings = [f"{short(k)}={shown(v)}" for k, v in flat(recipe).items() if v != before[k]]
    return [code(name), functions, about, code(" ".join(settings)) or "the defaults"]
