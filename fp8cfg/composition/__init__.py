"""Recipe composition: command-line words, YAML files and Python calls give one and the same Recipe."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.layers import Rank
from fp8cfg.composition.precedence import Settled, composed, from_file_layers
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
    """The checked Recipe that `python -m fp8cfg *overrides` trains.

    `overrides` are words such as `recipe=llama_8b`, `precision=bf16_fp8`, `fp8.margin=1`, in any order: presets are chosen
    first, then values are set, the last one of a key winning. `config_dir` adds a folder with `recipe/`, `precision/` and
    `data/` YAML files of one's own. `file`, a recipe's YAML file, or `base`, a recipe, stands in place of `recipe=`. What
    the recipe, a preset or a default says gives way where it contradicts a word, with a line to the logger `fp8cfg`; a layout
    that the recipe's own machines do not have is that of the ranks which a launcher has started. Raises ConfigError with every
    problem found.
    """
    words = [] if overrides is None else list(overrides)
    if isinstance(overrides, (str, Mapping)) or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            "compose: expected a list of words, as in compose(['recipe=llama_8b', 'fp8.margin=1'])"
        )
    if base is not None and not isinstance(base, Recipe):
        raise ConfigError(
            f"compose: base: expected a Recipe, got {type(base).__name__}; a name is a word, as in"
            " recipe=llama_8b"
        )
    library = Library(Path(config_dir) if config_dir else None)
    path = Path(file) if file else None
    return _checked(composed(words, library, path, base, on_ranks=True))


def from_yaml(text_or_path: str | Path, config_dir: str | Path | None = None) -> Recipe:
    """The checked Recipe of a YAML file (a Path) or of YAML text (a str), in which values give way as in `compose`. Raises
    ConfigError with every problem."""
    library = Library(Path(config_dir) if config_dir else None)
    if isinstance(text_or_path, Path):
        return _checked(from_file_layers(file_layers(text_or_path, library, Rank.USER)))
    if "\n" not in text_or_path and text_or_path.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(
            f"from_yaml: {text_or_path}: a str is the text itself; write"
            f" from_yaml(Path({text_or_path!r}))"
        )
    data = parse_yaml(text_or_path, "YAML")
    return _checked(from_file_layers(data_layers(data, Path("YAML"), library)))


def _checked(found: Settled) -> Recipe:
    refuse_if(found.problems)
    for line in found.notes:
        logging.getLogger("fp8cfg").warning(line)
    fp8 = found.recipe.fp8
    record(fp8, [name for name in type(fp8).model_fields if fp8.key(name) not in found.written])
    return found.recipe
