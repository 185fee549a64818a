"""Recipes of layers, before conflicts are resolved, and the layers of a key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.layers import Layer, default_layer, fold, key_history
from fp8cfg.composition.overrides import Overrides
from fp8cfg.composition.precedence import ResolvedRecipe, composed
from fp8cfg.composition.recipe_layers import collect_layers, data_layers
from fp8cfg.schema.keys import full
from fp8cfg.schema.recipe import Recipe


def recipe_of_arguments(arguments: Sequence[str], library: Library) -> Recipe:
    """The recipe of a command line, whose rules are not checked."""
    return fold(collect_layers(Overrides.parse(arguments, library), library)).recipe


def recipe_of_data(data: dict[str, Any], library: Library) -> Recipe:
    """The recipe of a file's content, whose rules are not checked."""
    return fold([default_layer(), *data_layers(data, Path("f.yaml"), library)]).recipe


def compose_layers(
    arguments: Sequence[str] = (), folder: Path | None = None, file: Path | None = None
) -> ResolvedRecipe:
    """The composed recipe with its layers."""
    return composed(list(arguments), Library(folder), file)


def layers_of(settled: ResolvedRecipe, key: str) -> list[Layer]:
    """The layers of `key`, by its short or full name, in order."""
    return key_history(settled.folded, full(key))
