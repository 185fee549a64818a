"""Preset values that a given model cannot have: they give way, with a line to the logger; what the user wrote is refused.

A preset keeps some layers at each end in high precision, and holds weights in FP8 alone, for the large models that it was written
for. A first experiment is small, and has an optimizer of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fp8cfg.composition.authors import Author
from fp8cfg.composition.flatten import flat
from fp8cfg.composition.giving_way import settled
from fp8cfg.config.key_names import full
from fp8cfg.config.preset_keys import preset_keys
from fp8cfg.config.recipe import Recipe

_ENDS = ("high_precision_at_start", "high_precision_at_end")
GIVE_WAY = frozenset({*_ENDS, "params"})
"""Fields of the `fp8` node that do where a preset wrote them."""


def fit_layers(recipe: Recipe, lists: Mapping[str, int]) -> Recipe:
    """`recipe` for a model with the layer lists `lists` (name -> length), of which model.num_layers is the longest: the preset's
    layers at both ends leave at least one in FP8, and are none where the model has no list."""
    may = [name for name in _ENDS if name in preset_keys(recipe.fp8)]
    if not lists:
        return _said(
            recipe,
            {name: 0 for name in may if getattr(recipe.fp8, name)},
            "a model without a list of like layers",
        )
    authors = dict.fromkeys(flat(recipe), Author.USER) | {
        full(f"fp8.{name}"): Author.PRESET for name in may
    }
    fitting = settled(recipe, authors, tacitly=False).recipe.fp8
    layers = recipe.model.num_layers
    return _said(
        recipe,
        {name: getattr(fitting, name) for name in may},
        f"a model of {layers} layer{'s' if layers > 1 else ''}",
    )


def leave_parameters(recipe: Recipe) -> Recipe:
    """`recipe` for a model whose parameters stay as they are: the preset's fp8.params is off."""
    return _said(
        recipe,
        {"params": False} if "params" in preset_keys(recipe.fp8) else {},
        "parameters that stay as they are",
    )


def _said(recipe: Recipe, values: Mapping[str, int], to: str) -> Recipe:
    """A copy of `recipe` with `values` in its `fp8` node, and a line for those that change; they stay the preset's."""
    changed = {name: value for name, value in values.items() if getattr(recipe.fp8, name) != value}
    if not changed:
        return recipe
    those = ", ".join(
        f"fp8.{name} {getattr(recipe.fp8, name)} -> {value}" for name, value in changed.items()
    )
    logging.getLogger("fp8cfg").warning(f"note: {those}: what the preset says gives way to {to}")
    recipe = recipe.model_copy(deep=True)
    recipe.fp8 = changed
    return recipe
