"""Authors of values: who wrote each key of a recipe, a recipe or the schema, a preset, or the user in a word or in a file."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from fp8cfg.composition.config_groups import GROUPS, LEAVES
from fp8cfg.composition.flatten import flat, settings
from fp8cfg.composition.override_words import parsed
from fp8cfg.composition.yaml_recipe import choices_in, full_names
from fp8cfg.config.key_names import PLUGIN, full, short
from fp8cfg.config.recipe import Recipe


class Author(IntEnum):
    """Who wrote a value, by rank: a recipe or the schema, whose default it is; a preset that was chosen over the recipe; the user,
    in a word, or in a file with another value than the default."""

    RECIPE = 0
    PRESET = 1
    USER = 2


Authors = dict[str, Author]
"""Author by full key; where a key is not there, RECIPE."""


def of_words(words: Sequence[str], authors: Mapping[str, Author] = {}) -> Authors:
    """The authors of a recipe, of which `authors` are known, once `words`, which are valid, are applied."""
    found = dict(authors)
    values: dict[str, Author] = {}
    for word in words:
        name, value, _ = parsed(word)
        group = "precision" if name == PLUGIN else name
        if group not in GROUPS or isinstance(value, dict):
            values |= dict.fromkeys(settings({full(name): value}), Author.USER)
        elif group in LEAVES and value is not None:
            found |= _below(group)
    return {**found, **values}


def of_file(data: Mapping[str, Any]) -> Authors:
    """The authors of the recipe in a file with the content `data`. A file with every key is an export, which nobody wrote."""
    data, found = dict(data), Authors()
    for group in choices_in(data):
        found |= _below(group) if group in LEAVES else {}
    values = settings(full_names(data))
    if values.keys() >= defaults().keys():
        return {}
    return found | {key: Author.USER for key, value in values.items() if value != defaults()[key]}


@functools.cache
def defaults() -> Mapping[str, Any]:
    """The schema's default of every full key."""
    return flat(Recipe())


def _below(group: str) -> Authors:
    """A preset of `group` writes every key of its node."""
    cls, home = LEAVES[group]
    return dict.fromkeys(flat(cls(), home), Author.PRESET)


def written(authors: Mapping[str, Author]) -> frozenset[str]:
    """The keys that the user wrote, by their short names."""
    return frozenset(short(key) for key, author in authors.items() if author is Author.USER)
