"""Precedence of conflicting values: what a recipe, a preset or a default says gives way to what the user wrote.

The rules between keys say which key can give way to which, and with what value (config/refusal.py). Who wrote each key
(precedence.py) decides whether it does. A value never gives way to one of a lower rank, nor to one of its own: two values that the
user wrote are refused, and so is a recipe that contradicts itself.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

from fp8cfg.composition.config_groups import LEAVES, PARTS, SELF, Library, steps
from fp8cfg.composition.merge import part_of, unchecked
from fp8cfg.composition.overrides import one, parsed
from fp8cfg.composition.recipe_yaml import assigned, flat, full_names, settings
from fp8cfg.schema import backends, rules
from fp8cfg.schema.backends import Hardware
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import full, preset_keys, short, spelled
from fp8cfg.schema.node import as_declared
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import FINE_TUNING, keeps_recipe_value
from fp8cfg.schema.refusal import LayoutRefusal, Refusal, changed, holds
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import as_held


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
    that it wrote (schema/keys.py), but for nodes below that; and the user, who may have written anything else.
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
        if group not in PARTS
        or key not in values
        or not keeps_recipe_value(key, value, values[key])
    ]


def _below(group: str) -> Authors:
    """A preset of `group` writes every key of its node."""
    cls, home = LEAVES[group]
    return dict.fromkeys(flat(cls(), home), Author.PRESET)


def written(authors: Mapping[str, Author]) -> frozenset[str]:
    """The keys that the user wrote, by their short names."""
    return frozenset(short(key) for key, author in authors.items() if author is Author.USER)


def unread(recipe: Recipe, written: Collection[str]) -> Iterator[str]:
    """A line for each of the keys `written`, by their short names. Sizes are often cut for a trial, so none is refused."""
    m, o, steps = recipe.model, recipe.optim, recipe.trainer.max_steps
    if (
        m.sliding_window is not None
        and m.sliding_window >= m.seq_length
        and "model.sliding_window" in written
    ):
        yield (
            f"note: model.sliding_window={m.sliding_window}: masks nothing,"
            f" model.seq_length={m.seq_length} is no longer; an exported checkpoint states it"
        )
    if (
        (every := m.window_attn_skip_freq)
        and every > m.num_layers
        and "model.window_attn_skip_freq" in written
    ):
        yield (
            f"note: model.window_attn_skip_freq={every}: leaves the window to all layers, there are"
            f" model.num_layers={m.num_layers}"
        )
    p, good = recipe.precision, recipe.precision.loss_scale_window
    if (
        p.compute == "fp16"
        and p.loss_scale is None
        and good >= steps
        and "precision.loss_scale_window" in written
    ):
        yield (
            f"note: precision.loss_scale_window={good}: doubles no scale, the run ends with"
            f" trainer.max_steps={steps}"
        )
    yield from _history(recipe, written)
    if o.warmup_steps < steps - 1:  # the step after warm-up is the first of the decay
        return
    found = [
        said
        for name in ("min_lr", "lr_decay_style")
        if f"optim.{name}" in written
        for said in changed(o, name)
    ]
    if found:
        yield (
            f"note: {', '.join(found)}: of the decay, and there is none;"
            f" optim.warmup_steps={o.warmup_steps}, trainer.max_steps={steps}"
        )


def _history(recipe: Recipe, written: Collection[str]) -> Iterator[str]:
    """Of a history of amaxes that no step reads whole. One amax is all that the rules leave to read with it."""
    f = recipe.fp8
    if not f.enabled or not SCALINGS[f.scaling].history or "fp8.amax_history_len" not in written:
        return
    if f.amax_compute_algo == "most_recent" and f.amax_history_len > 1:
        yield (
            f"note: fp8.amax_history_len={f.amax_history_len}: fp8.amax_compute_algo=most_recent"
            " reads the last amax alone"
        )


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
        of = backends.part(p.backend, "rules")
    except ConfigError:  # who runs the recipe says so
        return []
    return [*of.against_sharding(p), *of.refusals(as_held(p), Hardware("cpu"))]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else spelled(value)


def machines() -> dict[str, int]:
    """The machines of a launcher, which all have as many ranks, by full key; none where there is no launcher, or they have not."""
    world = os.environ.get("WORLD_SIZE", "0")
    local = os.environ.get("LOCAL_WORLD_SIZE", world)
    if not (world.isdecimal() and local.isdecimal() and int(world) and int(local)) or int(
        world
    ) % int(local):
        return {}
    return {"trainer.num_nodes": int(world) // int(local), "trainer.devices": int(local)}


def composed_ranks(
    words: Sequence[str], library: Library, file: Path | None = None, base: Recipe | None = None
) -> Settled:
    """As `giving_way.composed`; of what is refused, with the machines of a launcher, unless `words` name some."""
    found = composed(words, library, file, base)
    if (
        not found.problems
        or not (here := machines())
        or {full(parsed(word)[0]) for word in words} & here.keys()
    ):
        return found
    return composed(
        [*words, *(f"{key}={value}" for key, value in here.items())], library, file, base
    )


def settled_ranks(recipe: Recipe, authors: Authors) -> Settled:
    """As `giving_way.settled`; of what is refused, with the machines of a launcher."""
    found = settled(recipe, authors)
    if not found.problems or not (here := machines()):
        return found
    return settled(assigned(recipe, here), {**authors, **dict.fromkeys(here, Author.USER)})
