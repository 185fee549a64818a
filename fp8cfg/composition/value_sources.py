"""Source of each value of a recipe, recorded when the recipe is composed."""

from __future__ import annotations

from fp8cfg.composition.layers import Folded, Layer, Source, defaults, key_history
from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.schema.recipe import Recipe

# Key of the recorded sources in a recipe's `__dict__`. It is not a field: pydantic copies it with
# the recipe, but comparison and export ignore it.
_SOURCES = "_sources"


def record_sources(recipe: Recipe, folded: Folded) -> None:
    """Records in `recipe` which layer set each value."""
    sources = {}
    for key, value in folded.values.items():
        sources[key] = (value, _source(key_history(folded, key)[-1]))
    vars(recipe)[_SOURCES] = sources


def copy_sources(recipe: Recipe, target: Recipe) -> None:
    """Copies the record of `recipe` to `target`, a recipe that was built from its values."""
    vars(target)[_SOURCES] = vars(recipe).get(_SOURCES, {})


def value_sources(recipe: Recipe) -> dict[str, str]:
    """Returns the source of each value.

    Args:
        recipe: A composed recipe, or one made in Python.

    Returns:
        A text by full key, such as "command line: fp8.margin=1", "preset: bf16_fp8" or "schema
        default". "Python" for values that were assigned to the object, "trainer.smoke=true" for
        values of a smoke run.
    """
    recorded = vars(recipe).get(_SOURCES, {})
    sources = {}
    for key, value in flat(recipe).items():
        composed_value, source = recorded.get(key, (defaults()[key], Source.DEFAULT.value))
        if value != composed_value:
            source = "trainer.smoke=true" if recipe.trainer.smoke else "Python"
        sources[key] = source
    return sources


def _source(layer: Layer) -> str:
    """Returns the kind of a layer, with its name, file or argument."""
    kind = layer.source.value
    name = layer.name or layer.location.text
    if not name and layer.location.file:
        name = str(layer.location.file)
    if not name:
        return kind
    if layer.source is Source.CONFLICT:
        return f"{kind} {name}"
    return f"{kind}: {name}"
