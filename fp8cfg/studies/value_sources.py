"""Sources of the values in a run's recipe: command line, recipe function, preset or default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.layers import Source, defaults, key_history
from fp8cfg.composition.precedence import ResolvedRecipe, composed
from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.report.key_explanation import source_text
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe import Recipe

DEFAULT = Source.DEFAULT.value
"""Text for a default of the schema."""
RECIPE_FILES = (".yaml", ".yml", ".json")


def value_sources(recipe: Recipe, command: Any) -> dict[str, str]:
    """Returns the source of each value of a run's recipe.

    The run folder has the command of the run, but no sources. So the command is composed again with
    the present recipe files and presets. A source only counts if it has the same value.

    Args:
        recipe: The recipe of the run.
        command: The `command` of its environment.json, unchecked.

    Returns:
        A text by full key, such as "command line: fp8.margin=1". "recipe.yaml" for an unknown
        source.
    """
    settled = _composed_again(command)
    sources = {}
    for key, value in flat(recipe).items():
        sources[key] = DEFAULT if value == defaults()[key] else "recipe.yaml"
        if settled is not None:
            # The last layer decides the value.
            layer = key_history(settled.folded, key)[-1]
            if layer.values[key] == value:
                sources[key] = source_text(layer, key)
    return sources


def _composed_again(command: Any) -> ResolvedRecipe | None:
    """Composes the recipe of a command. None if the command does not train a recipe."""
    # environment.json may be edited by hand or come from another version.
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return None
    if not command or not _is_fp8cfg(Path(command[0])):
        return None
    words, file, folder = _split(command[1:])
    if words is None:
        return None
    # The recipe file may be gone, or invalid in this version.
    try:
        return composed(words, Library(folder), file)
    except (ConfigError, OSError):
        return None


def _is_fp8cfg(program: Path) -> bool:
    """Whether a program is fp8cfg."""
    # The program of `python -m fp8cfg` is the path of __main__.py.
    return program.stem == "fp8cfg" or program.parts[-2:] == ("fp8cfg", "__main__.py")


def _split(arguments: Sequence[str]) -> tuple[list[str] | None, Path | None, Path | None]:
    """Splits the arguments of a command that trains.

    Args:
        arguments: The arguments after the program.

    Returns:
        Overrides, recipe file and folder of --config-dir. The overrides are None for verbs other
        than train and for other options: they may change the recipe in ways unknown here.
    """
    words: list[str] = []
    files: list[Path] = []
    folder = None
    left = [argument for argument in arguments if argument != "train"]
    while left:
        argument = left.pop(0)
        name, _, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            folder = Path(value or (left.pop(0) if left else ""))
        elif argument.startswith("-"):
            return None, None, None
        elif "=" in argument or argument[:1] in "+~":
            words.append(argument)
        elif argument.endswith(RECIPE_FILES):
            files.append(Path(argument))
        else:
            return None, None, None
    if len(files) > 1:
        return None, None, None
    return words, files[0] if files else None, folder


def is_default(source: str) -> bool:
    """Whether a text of `value_sources` is the default of the schema."""
    return source == DEFAULT


def differing(recipes: Sequence[Recipe]) -> Mapping[str, list[Any]]:
    """Returns the full keys with different values, with the value of each recipe."""
    values = [flat(recipe) for recipe in recipes]
    found = {}
    for key in values[0]:
        row = [each[key] for each in values]
        if any(value != row[0] for value in row):
            found[key] = row
    return found
