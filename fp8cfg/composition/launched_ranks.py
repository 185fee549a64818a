"""Ranks of a launcher: a layout that the machines of a recipe do not have is tried with those on which ranks were started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fp8cfg.composition import giving_way
from fp8cfg.composition.authors import Author, Authors
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.flatten import assigned
from fp8cfg.composition.giving_way import Settled
from fp8cfg.composition.parsed_words import parsed
from fp8cfg.config.key_names import full
from fp8cfg.config.recipe import Recipe


def machines() -> dict[str, int]:
    """The machines of a launcher, which all have as many ranks, by full key; none where there is no launcher, or they have not."""
    world = os.environ.get("WORLD_SIZE", "0")
    local = os.environ.get("LOCAL_WORLD_SIZE", world)
    if not (world.isdecimal() and local.isdecimal() and int(world) and int(local)) or int(
        world
    ) % int(local):
        return {}
    return {"trainer.num_nodes": int(world) // int(local), "trainer.devices": int(local)}


def composed(
    words: Sequence[str], library: Library, file: Path | None = None, base: Recipe | None = None
) -> Settled:
    """As `giving_way.composed`; of what is refused, with the machines of a launcher, unless `words` name some."""
    found = giving_way.composed(words, library, file, base)
    if (
        not found.problems
        or not (here := machines())
        or {full(parsed(word)[0]) for word in words} & here.keys()
    ):
        return found
    return giving_way.composed(
        [*words, *(f"{key}={value}" for key, value in here.items())], library, file, base
    )


def settled(recipe: Recipe, authors: Authors) -> Settled:
    """As `giving_way.settled`; of what is refused, with the machines of a launcher."""
    found = giving_way.settled(recipe, authors)
    if not found.problems or not (here := machines()):
        return found
    return giving_way.settled(
        assigned(recipe, here), {**authors, **dict.fromkeys(here, Author.USER)}
    )
