"""Authors of values: who wrote each key of a recipe, a recipe or the schema, a preset, or the user in a word or in a file."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from fp8cfg.composition.config_groups import LEAVES, PARTS, Library
from fp8cfg.composition.defaults_list import SELF, steps
from fp8cfg.composition.flatten import flat, settings
from fp8cfg.composition.override_words import one
from fp8cfg.composition.parsed_words import parsed
from fp8cfg.composition.resolve import part_of
from fp8cfg.composition.yaml_recipe import full_names
from fp8cfg.config.key_names import full, short
from fp8cfg.config.preset_keys import preset_keys
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.tasks import stays


class Author(IntEnum):
    """Who wrote a value, by rank: a recipe or the schema, whose default it is; a preset that was chosen over the recipe; the user,
    in a word, or in a file with another value than the default."""

    RECIPE = 0
    PRESET = 1
    USER = 2


Authors = dict[str, Author]
"""Author by full key; where a key is not there, RECIPE."""


def of_words(
    words: Sequence[str],
    library: Library,
    authors: Mapping[str, Author] = {},
    recipe: Recipe | None = None,
) -> Authors:
    """The authors of a recipe, of which `authors` are known, once `words`, which are valid, are applied and have made `recipe`: it
    tells which values stayed under a task."""
    found, parts, values = dict(authors), Authors(), Authors()
    words = [word for word in words if not word.startswith("recipe=")]
    chosen = {group: stem for group, stem in (one(word, library) for word in words) if group}
    for group, stem in chosen.items():
        if library.own(group):
            said = part_of(group, stem, library)
            for other in said.chosen.keys() - chosen.keys() & LEAVES.keys():
                found |= _below(other)
            parts |= dict.fromkeys(
                _taken(group, said.values, flat(recipe) if recipe else {}), Author.PRESET
            )
        elif group in LEAVES:
            found |= _below(group)
    for word in words:
        group, text = one(word, library)
        if not group and text:
            name, value, _ = parsed(word)
            values |= dict.fromkeys(settings({full(name): value}), Author.USER)
    return {**found, **parts, **values}


def of_file(path: Path, data: Mapping[str, Any], library: Library) -> Authors:
    """The authors of the recipe in the file `path` with the content `data`. A file with every key is an export, which nobody
    wrote."""
    found, mine = Authors(), dict[str, Any]()
    for step in steps(data, path, library):
        group = step.choice.group
        if group == "recipe":
            found, mine = {}, {}
        elif group == SELF and not step.above:
            values = settings(full_names(dict(step.values)))
            if values.keys() >= defaults().keys():
                return {}
            mine = {key: value for key, value in values.items() if value != defaults()[key]}
            found |= dict.fromkeys(mine, Author.USER)
        elif group != SELF and step.path == path:
            own = None if group in LEAVES else part_of(group, step.choice.name, library)
            found |= (
                dict.fromkeys(_taken(group, own.values, mine), Author.PRESET)
                if own
                else _below(group)
            )
    return found


def of_object(recipe: Recipe) -> Authors:
    """The authors of a recipe that Python statements have changed, as far as it tells: its preset, of the fields of the `fp8` node
    that it wrote (config/preset_keys.py), but for nodes below that; and the user, who may have written anything else.
    """
    preset = {full(recipe.fp8.key(name)) for name in preset_keys(recipe.fp8)}
    return {key: Author.PRESET if key in preset else Author.USER for key in defaults()}


def task_of(words: Sequence[str], library: Library, file: Path | None = None) -> str | None:
    """The task that `words`, which are valid, or `file` choose."""
    chosen = [step.choice for step in steps(library.data(file), file, library)] if file else []
    found = [choice.name for choice in chosen if choice.group == "task"]
    found += [name for group, name in (one(word, library) for word in words) if group == "task"]
    return found[-1] if found else None


@functools.cache
def defaults() -> Mapping[str, Any]:
    """The schema's default of every full key."""
    return flat(Recipe())


def _taken(group: str, said: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """The keys of what a file of `group` says that it wrote: with a task, not those that stay at their `values`."""
    return [
        key
        for key, value in said.items()
        if group not in PARTS or key not in values or not stays(key, value, values[key])
    ]


def _below(group: str) -> Authors:
    """A preset of `group` writes every key of its node."""
    cls, home = LEAVES[group]
    return dict.fromkeys(flat(cls(), home), Author.PRESET)


def written(authors: Mapping[str, Author]) -> frozenset[str]:
    """The keys that the user wrote, by their short names."""
    return frozenset(short(key) for key, author in authors.items() if author is Author.USER)
