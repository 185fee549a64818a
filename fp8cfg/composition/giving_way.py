"""Precedence of conflicting values: what a recipe, a preset or a default says gives way to what the user wrote.

The rules between keys say which key can give way to which, and with what value (config/refusal.py). Who wrote each key
(authors.py) decides whether it does. A value never gives way to one of a lower rank, nor to one of its own: two values that the
user wrote are refused, and so is a recipe that contradicts itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from fp8cfg.composition.authors import (
    Author,
    defaults,
    of_file,
    of_object,
    of_words,
    task_of,
    written,
)
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.flatten import assigned, flat
from fp8cfg.composition.resolve import unchecked
from fp8cfg.config import backend_capabilities, rules
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.hardware import Hardware
from fp8cfg.config.key_names import full, short
from fp8cfg.config.node import as_declared
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.refusal import LayoutRefusal, Refusal, holds
from fp8cfg.config.storage import as_held
from fp8cfg.config.tasks import FINE_TUNING
from fp8cfg.config.unread import unread
from fp8cfg.config.value_text import spelled

_TOLD = "_told"
"""Where `told` keeps values: copies take it along, and pydantic leaves it out of comparison and output."""
_MOST = 100
"""Values that give way in one recipe, each of which may make another do so."""


@dataclass(frozen=True)
class Change:
    """The value of the full `key`, `old`, gave way to those of other keys, `to` by their short names, and is `new`."""

    key: str
    old: Any
    new: Any
    author: Author
    to: Mapping[str, Any]

    @property
    def whose(self) -> str:
        """Whose value gave way, as the subject of a sentence."""
        if self.author is Author.RECIPE and self.old == defaults()[self.key]:
            return "the default"
        return f"what the {self.author.name.lower()} says"

    @property
    def word(self) -> str:
        """The new value as Hydra takes it, on the full key."""
        return f"{self.key}={json.dumps(self.new)}"

    @property
    def cause(self) -> str:
        """`to` in words."""
        return " and ".join(f"{key}={_shown(value)}" for key, value in self.to.items())


@dataclass(frozen=True)
class Settled:
    """A recipe in which values have given way, what did, and every line of the rules that still refuses it. `written` are the
    keys, by their short names, that the user wrote; `remarks` are other lines to say."""

    recipe: Recipe
    changes: tuple[Change, ...] = ()
    problems: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()
    remarks: tuple[str, ...] = ()

    @property
    def layout_alone(self) -> bool:
        """Whether its parallel layout is all that refuses it, where other words may be searched for."""
        return bool(self.problems) and all(
            isinstance(line, LayoutRefusal) for line in self.problems
        )

    @property
    def notes(self) -> list[str]:
        """A line for what gave way to one and the same."""
        found: dict[tuple[str, str], list[str]] = {}
        for c in self.changes:
            found.setdefault((c.whose, c.cause), []).append(
                f"{short(c.key)} {_shown(c.old)} -> {_shown(c.new)}"
            )
        given = [
            f"note: {', '.join(those)}: {whose} gives way to {cause}"
            for (whose, cause), those in found.items()
        ]
        return [*given, *self.remarks]


def composed(
    words: Sequence[str],
    library: Library,
    file: Path | None = None,
    base: Recipe | None = None,
    sweep: bool = False,
) -> Settled:
    """The recipe of `words`, as `compose` takes them, in which values have given way; with `sweep` as in one job of it. Raises
    ConfigError with every problem of a word or a file."""
    recipe = unchecked(words, library, file, base)
    of = of_file(file, library.data(file), library) if file else {}
    found = settled(recipe, of_words(words, library, of, recipe), sweep, tacitly=base is None)
    told(found.recipe)
    task, remarks, t = task_of(words, library, file), list(found.remarks), found.recipe.trainer
    if task in FINE_TUNING and not found.recipe.model.weights and not t.smoke:
        remarks.append(
            f"note: task={task}: model.weights=null, so it starts from random weights; write"
            " model.weights=FOLDER"
        )
    every = found.recipe.checkpoint.every_n_steps
    if every > t.max_steps and "checkpoint.every_n_steps" in found.written:
        remarks.append(
            f"note: checkpoint.every_n_steps={every}: saves at the end alone, the run ends with"
            f" trainer.max_steps={t.max_steps}"
        )
    return replace(found, remarks=tuple(remarks))


def settled(
    recipe: Recipe, authors: Mapping[str, Author], sweep: bool = False, tacitly: bool = True
) -> Settled:
    """`recipe` with every value that gives way to one of a higher rank. In a `sweep`, whose words are for all of its jobs, a
    default is no mistake in those where it has no effect. Not `tacitly`, what does no harm stays: a run that is resumed has it.
    """
    by_user, derived = written(authors), dict(authors)
    if sweep:
        by_user -= {short(key) for key, value in flat(recipe).items() if value == defaults()[key]}
    changes: dict[str, Change] = {}
    broken = rules.broken(recipe, by_user)
    for _ in range(_MOST):
        lines = [*broken, *_of_backend(recipe)]
        refusals = [
            line for line in lines if isinstance(line, Refusal) and (tacitly or not line.tacit)
        ]
        change = next(
            (c for line in refusals if (c := _given(line, recipe, authors, derived))), None
        )
        if change is None:
            break
        recipe = assigned(recipe, {change.key: change.new})
        broken = rules.broken(recipe, by_user)
        before = changes.pop(change.key, change)
        changes[change.key] = Change(change.key, before.old, change.new, change.author, change.to)
        derived[change.key] = max(derived.get(full(key), Author.RECIPE) for key in change.to)
    problems = [line for line in dict.fromkeys(broken) if holds(line, by_user)]
    return Settled(
        recipe, tuple(changes.values()), tuple(problems), by_user, tuple(unread(recipe, by_user))
    )


def told(recipe: Recipe) -> None:
    """Keep with `recipe`, whose remarks are for whoever composed it to say, its values: `fitted` has remarks on others alone."""
    vars(recipe)[_TOLD] = flat(recipe)


def fitted(recipe: Recipe) -> Recipe:
    """`recipe`, which Python statements have changed, as `build` takes it: a copy in which what its preset says has given way, with
    a line to the logger; itself where nothing does. What the rules refuse they refuse of the result. Raises ConfigError for a field
    of a subclass."""
    recipe = as_declared(recipe, Recipe)
    found = settled(recipe, of_object(recipe), tacitly=False)
    before = vars(recipe).get(_TOLD) or defaults()
    new = frozenset(short(key) for key, value in flat(found.recipe).items() if value != before[key])
    for line in replace(found, remarks=tuple(unread(found.recipe, new))).notes:
        logging.getLogger("fp8cfg").warning(line)
    return found.recipe


def _given(
    line: Refusal, recipe: Recipe, authors: Mapping[str, Author], derived: Mapping[str, Author]
) -> Change | None:
    """What gives way where `line` refuses `recipe`, None where nothing may. `derived` are the ranks of values that others gave way
    to, or that have given way themselves."""
    for name, new in line.gives:
        key, author = full(name), authors.get(full(name), Author.RECIPE)
        others = {to: _rank(full(to), author, derived) for to in line.to if to != name}
        rank = max(others.values(), default=Author.RECIPE)
        if author < rank and (old := attrgetter(key)(recipe)) != new:
            return Change(
                key,
                old,
                new,
                author,
                {to: attrgetter(full(to))(recipe) for to, its in others.items() if its == rank},
            )
    return None


def _rank(key: str, author: Author, derived: Mapping[str, Author]) -> Author:
    """The rank of the full `key` over a value of `author`: the shape of the model, whoever wrote it, goes before a preset, which
    was written for other models."""
    rank = derived.get(key, Author.RECIPE)
    return max(rank, Author.USER) if author is Author.PRESET and key.startswith("model.") else rank


def _of_backend(recipe: Recipe) -> list[str]:
    """What an explicit backend refuses, wherever it runs."""
    p = recipe.precision
    if p.backend == "auto" or not p.fp8.enabled:
        return []
    try:
        of = backend_capabilities.part(p.backend, "rules")
    except ConfigError:  # who runs the recipe says so
        return []
    return [*of.against_sharding(p), *of.refusals(as_held(p), Hardware("cpu"))]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else spelled(value)
