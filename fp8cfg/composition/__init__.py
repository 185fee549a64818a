"""Recipe composition: command-line arguments, YAML files and Python calls give the same Recipe."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.layers import Rank
from fp8cfg.composition.precedence import ResolvedRecipe, compose_file_layers, composed
from fp8cfg.composition.recipe_layers import data_layers, file_layers
from fp8cfg.composition.recipe_yaml import to_yaml
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.keys import record
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import parse_yaml

__all__ = ["compose", "from_yaml", "to_yaml"]


def compose(
    overrides: Iterable[str] = (),
    config_dir: str | Path | None = None,
    file: str | Path | None = None,
    base: Recipe | None = None,
) -> Recipe:
    """Returns the checked Recipe for the command line `python -m fp8cfg *overrides`.

    Your overrides win. If a value of the recipe, a preset or a default contradicts them, it is
    changed, with a note to the logger `fp8cfg`. If a launcher has started ranks and the layout does
    not fit the recipe's machines, the launcher's machines are used.

    Args:
        overrides: Arguments such as `recipe=llama_8b`, `precision=bf16_fp8` or `fp8.margin=1`, in
            any order. Presets are applied before values. The last value of a key wins.
        config_dir: Folder with your own `recipe/`, `precision/` and `data/` YAML files.
        file: YAML file of a recipe, instead of `recipe=`.
        base: A Recipe, instead of `recipe=`.

    Raises:
        ConfigError: With every problem.
    """
    arguments = [] if overrides is None else list(overrides)
    # A str is iterable too: its letters are no arguments.
    if isinstance(overrides, (str, Mapping)) or not all(isinstance(a, str) for a in arguments):
        raise ConfigError(
            "compose: expected a list of overrides, as in compose(['recipe=llama_8b', 'fp8.margin=1'])"
        )
    if base is not None and not isinstance(base, Recipe):
        raise ConfigError(
            f"compose: base: expected a Recipe, got {type(base).__name__}; pass a name as an"
            " override, as in recipe=llama_8b"
        )
    if base is not None and file is not None:
        raise ConfigError("compose: file and base are two recipes; remove one of them")
    library = Library(Path(config_dir) if config_dir else None)
    path = None if file is None else Path(file)
    return _checked(composed(arguments, library, path, base, on_ranks=True))


def from_yaml(text_or_path: str | Path, config_dir: str | Path | None = None) -> Recipe:
    """Returns the checked Recipe of a YAML file (a Path) or of YAML text (a str).

    Conflicting defaults and presets are changed as in `compose`.

    Raises:
        ConfigError: With every problem.
    """
    library = Library(Path(config_dir) if config_dir else None)
    if isinstance(text_or_path, Path):
        return _checked(compose_file_layers(file_layers(text_or_path, library, Rank.USER)))
    # A path as a str is a common mistake.
    if "\n" not in text_or_path and text_or_path.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(
            f"from_yaml: {text_or_path}: a str is read as YAML text; for a file use"
            f" from_yaml(Path({text_or_path!r}))"
        )
    data = parse_yaml(text_or_path, "YAML")
    return _checked(compose_file_layers(data_layers(data, Path("YAML"), library)))


def _checked(resolved: ResolvedRecipe) -> Recipe:
    """Logs the notes and returns the recipe. Raises ConfigError with its problems."""
    refuse_if(resolved.problems)
    for line in resolved.notes:
        logging.getLogger("fp8cfg").warning(line)
    fp8 = resolved.recipe.fp8
    # Recorded for `build`: a preset's fields may still yield to values assigned in Python.
    of_preset = [name for name in type(fp8).model_fields if fp8.key(name) not in resolved.written]
    record(fp8, of_preset)
    return resolved.recipe
