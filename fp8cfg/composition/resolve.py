"""Composition alone: what `compose` checks, before it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8cfg.composition.library import Library
from fp8cfg.composition.yaml_recipe import listed, recipe_from
from fp8cfg.config.files import default_recipe
from fp8cfg.config.recipe import Recipe


def unchecked(words: Sequence[str], library: Library, file: Path | None = None, base: Recipe | None = None) -> Recipe:
    """The Recipe of `words`, as `compose` takes them; its rules between keys are not checked. Raises ConfigError with every
    problem of a word or a file."""
    from fp8cfg.composition.hydra_compose import merge
    from fp8cfg.composition.override_words import parse

    given = recipe_from(file, library) if file else base
    chosen, values = parse(words, library, given is not None)
    if given is None:
        chosen.setdefault("recipe", default_recipe())
    nodes = {group: library.node(group, name) for group, name in chosen.items()}
    if given is not None:
        nodes["recipe"] = listed(given)
    return Recipe(**merge(nodes, chosen, values))
