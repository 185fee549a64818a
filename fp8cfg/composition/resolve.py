"""Recipe resolution: a base recipe, presets and values are merged in that order. Rules between keys are not checked here.

Words of the command line are merged by Hydra; a recipe's file is merged key by key onto the recipe that it builds on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fp8cfg.composition.config_groups import LEAVES, Library
from fp8cfg.composition.flatten import deep_merge, listed, nested
from fp8cfg.composition.hydra_compose import merge
from fp8cfg.composition.override_words import parse
from fp8cfg.composition.yaml_lines import key_lines
from fp8cfg.composition.yaml_recipe import choices_in, full_names
from fp8cfg.config import foreign_names, recipe_registry
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.files import STDIN, default_recipe
from fp8cfg.config.hugging_face_folder import FROM_HF, shaped
from fp8cfg.config.key_names import full
from fp8cfg.config.recipe import Recipe

T = TypeVar("T")
_MAX_BASES = 16


def unchecked(words: Sequence[str], library: Library, file: Path | None = None, base: Recipe | None = None) -> Recipe:
    """The Recipe of `words`, as `compose` takes them; its rules between keys are not checked. Raises ConfigError with every
    problem of a word or a file."""
    given = recipe_from(file, library) if file else base
    chosen, values = parse(words, library, given is not None)
    if given is None and "recipe" not in chosen:
        chosen["recipe"] = default_recipe()
    nodes = {group: node(group, stem, library) for group, stem in chosen.items()}
    if given is not None:
        nodes["recipe"] = listed(given)
    recipe = Recipe(**merge(nodes, chosen, values))
    path = recipe.model.path
    if given is None and chosen["recipe"] == FROM_HF:
        if path is None:
            raise ConfigError(f"recipe={FROM_HF}: needs model.path, the folder of a Hugging Face checkpoint")
        nodes["recipe"] = listed(_from_hf(path))
        recipe = Recipe(**merge(nodes, chosen, values))
    elif path is not None and path != (given or Recipe(**nodes["recipe"])).model.path:
        raise ConfigError(f"model.path={path}: gives a shape to recipe={FROM_HF} alone; of other recipes write "
                          f"model.weights={path}")
    return recipe


def _from_hf(folder: str) -> Recipe:
    """The recipe from_hf with the shape that a folder has."""
    base = recipe_registry.named(FROM_HF)
    base.model.path = folder
    return shaped(base)


def node(group: str, stem: str, library: Library) -> dict[str, Any]:
    """The complete node of the choice `stem` of `group`, which `library.problem` does not refuse, as plain data. Raises
    ConfigError, naming the file where one is at fault."""
    path = library.file(group, stem)
    if group == "recipe":
        return listed(recipe_from(path, library) if path else recipe_registry.named(stem))
    assert path is not None, f"{group}={stem} is no choice"
    data = library.data(path)
    return listed(_in_file(path, lambda: LEAVES[group][0](**data)))


def recipe_from(path: Path, library: Library, above: tuple[Path, ...] = ()) -> Recipe:
    """The recipe in the file `path`; `above` are the files that build on it."""
    data = library.data(path)
    return _in_file(path, lambda: recipe_of(data, path, library, above))


def recipe_of(data: dict[str, Any], path: Path, library: Library, above: tuple[Path, ...] = ()) -> Recipe:
    """The recipe that the file `path` with the content `data` says; `above` are the files that build on it."""
    if project := foreign_names.project(data):
        raise ConfigError(f"has the keys of another project; write: fp8cfg import {project} {path}")
    data = dict(data)
    chosen = {group: choice.name for group, choice in choices_in(data).items()}
    problems = [p for group, name in chosen.items() if (p := library.problem(group, name))]
    if problems:  # all at once: what is wrong with the values does not depend on the recipe that they change
        try:
            Recipe(**deep_merge(listed(Recipe()), full_names(data)))
        except ConfigError as e:
            problems += e.problems
    refuse_if(problems)
    if path in above or len(above) >= _MAX_BASES:
        raise ConfigError("recipe: recipes build on one another in a circle")
    base = _base(chosen.get("recipe") or default_recipe(), path, library, above)
    model = deep_merge({}, full_names(data)).get("model")
    folder = model.get("path") if isinstance(model, dict) else None
    if chosen.get("recipe") == FROM_HF and isinstance(folder, str):
        base = _from_hf(folder)
    values = listed(base)
    for group, (_, home) in LEAVES.items():
        if group in chosen:
            values = deep_merge(values, nested({home: node(group, library.stem(group, chosen[group]), library)}))
    return Recipe(**deep_merge(values, full_names(data)))


def _base(name: str, inside: Path, library: Library, above: tuple[Path, ...]) -> Recipe:
    """The recipe `name` that the file `inside` builds on; a file of the same name builds on the shipped recipe."""
    path = library.file("recipe", name)
    if path is None or path == inside.resolve():
        return recipe_registry.named(name)
    return recipe_from(path, library, (*above, inside.resolve()))


def _in_file(path: Path, build: Callable[[], T]) -> T:
    """`build()`, with the file's name before each line of a ConfigError, and the line of the key that it begins with."""
    try:
        return build()
    except ConfigError as e:
        lines = {full(key): line for key, line in key_lines(path).items()} if path == STDIN or path.is_file() else {}
        raise ConfigError([p if p.startswith(str(path)) else f"{path}{_line(p, lines)}: {p}" for p in e.problems]) from None


def _line(problem: str, lines: Mapping[str, int]) -> str:
    """`:4` for a problem of a key that stands in line 4; of a key that does not stand there nothing."""
    line = lines.get(full(re.split("[=:]", problem, maxsplit=1)[0]))
    return f":{line}" if line else ""
