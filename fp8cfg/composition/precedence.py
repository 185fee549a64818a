"""Precedence of conflicting values: recipe, presets and defaults yield to the user's values.

The rules list the keys that can yield, with their new values (schema/violation.py). The layers have
the author of each key (layers.py). A value yields only to values of a higher rank. Two conflicting
values of the user are an error, and so is a conflict within a recipe.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.layers import (
    Folded,
    Layer,
    Location,
    Rank,
    Source,
    default_layer,
    defaults,
    fold,
)
from fp8cfg.composition.overrides import Overrides
from fp8cfg.composition.recipe_layers import check_model_path, collect_layers, file_layers
from fp8cfg.composition.recipe_yaml import assigned, flat, typed
from fp8cfg.composition.value_sources import record_sources
from fp8cfg.schema import backends, rules
from fp8cfg.schema.backends import Hardware
from fp8cfg.schema.changed_fields import changed
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import full, preset_keys, short, spelled
from fp8cfg.schema.node import as_declared
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import FINE_TUNING
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import with_resolved_params
from fp8cfg.schema.violation import Violation

# Key of the reported values in a node's `__dict__`. It is not a field: pydantic copies it with the
# node, but comparison and export ignore it.
_REPORTED = "_told"
# Most values that yield in one recipe. Each may cause the next one.
_MAX_CHANGES = 100


@dataclass(frozen=True)
class Change:
    """A value that yielded to another one.

    Attributes:
        key: Full key of the value.
        old: The old value.
        new: The new value.
        rank: Rank of the old value.
        cause: The values that it yielded to, as text.
    """

    key: str
    old: Any
    new: Any
    rank: Rank
    cause: str

    @property
    def subject(self) -> str:
        """The changed value as the subject of a sentence."""
        if self.rank is Rank.RECIPE and self.old == defaults()[self.key]:
            return "the default"
        return f"the {self.rank.name.lower()}'s value"

    @property
    def override(self) -> str:
        """The new value as an argument for Hydra, with its full key."""
        return f"{self.key}={json.dumps(self.new)}"


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe whose conflicts are resolved.

    Attributes:
        recipe: The recipe.
        layers: Its layers. Their fold has its values.
        problems: The violations that reject it.
        written: Short names of the keys that the user set.
        remarks: Lines about valid settings without the expected effect.
    """

    recipe: Recipe
    layers: Sequence[Layer] = ()
    problems: Sequence[Violation] = ()
    written: frozenset[str] = frozenset()
    remarks: Sequence[str] = ()

    @functools.cached_property
    def folded(self) -> Folded:
        """The values and the layers of every key."""
        return fold(self.layers)

    @property
    def layout_alone(self) -> bool:
        """Whether only the parallel layout is wrong, so other settings may be tried."""
        return bool(self.problems) and all(
            violation.source == "layout" for violation in self.problems
        )

    @property
    def changes(self) -> list[Change]:
        """The values that yielded, one change per key."""
        latest: dict[str, Layer] = {}
        for layer in self.layers:
            if layer.source is Source.CONFLICT:
                for key in layer.values:
                    # Move the key to the end: notes have the order of the last changes.
                    latest.pop(key, None)
                    latest[key] = layer
        written = fold(layer for layer in self.layers if layer.source is not Source.CONFLICT)
        return [
            Change(
                key,
                written.values[key],
                layer.values[key],
                written.author(key),
                layer.location.text,
            )
            for key, layer in latest.items()
        ]

    @property
    def notes(self) -> list[str]:
        """One line for all values that yielded to the same cause, then the remarks."""
        grouped: dict[tuple[str, str], list[str]] = {}
        for change in self.changes:
            text = f"{short(change.key)} {_shown(change.old)} -> {_shown(change.new)}"
            grouped.setdefault((change.subject, change.cause), []).append(text)
        lines = [
            f"note: {', '.join(texts)}: {subject} is changed to fit {cause}"
            for (subject, cause), texts in grouped.items()
        ]
        return [*lines, *self.remarks]


def composed(
    arguments: Sequence[str],
    library: Library,
    file: Path | None = None,
    base: Recipe | None = None,
    sweep: bool = False,
    on_ranks: bool = False,
) -> ResolvedRecipe:
    """Composes a recipe and resolves its conflicts.

    Args:
        arguments: Arguments of the command line. See `compose`.
        library: The choices of each group.
        file: The recipe's file, instead of `recipe=`.
        base: The recipe, instead of `recipe=`. Its harmless conflicts are kept.
        sweep: Whether this is one job of a sweep. All jobs share the arguments, so a default
            without effect is not an error.
        on_ranks: Whether to try a rejected layout with a launcher's machines too.

    Raises:
        ConfigError: With every problem of an argument or a file.
    """
    try:
        overrides = Overrides.parse(arguments, library, file is not None or base is not None)
    except ConfigError as error:
        raise ConfigError([*error.problems, *_file_problems(file, library)]) from None
    layers = collect_layers(overrides, library, file, base)
    resolved = resolve_conflicts(layers, sweep, change_harmless=base is None)
    # A launcher's machines count only if the recipe's own do not work: a recipe must not depend on
    # the machine that composes it.
    if on_ranks and resolved.problems and not overrides.keys & machines().keys():
        layers += _launcher_layers()
        resolved = resolve_conflicts(layers, sweep, change_harmless=base is None)
    return _with_run_remarks(resolved)


def compose_file_layers(layers: Sequence[Layer]) -> ResolvedRecipe:
    """Resolves the conflicts of a file's layers, with a launcher's machines if necessary."""
    layers = [default_layer(), *layers]
    check_model_path(layers)
    resolved = resolve_conflicts(layers)
    # Without a launcher nothing changes.
    if resolved.problems:
        resolved = resolve_conflicts([*layers, *_launcher_layers()])
    return _with_run_remarks(resolved)


def _file_problems(file: Path | None, library: Library) -> list[str]:
    """Returns the problems of a recipe's file, to report with problems of arguments."""
    if file is None:
        return []
    try:
        file_layers(file, library, Rank.USER)
    except ConfigError as error:
        return error.problems
    return []


def resolve_conflicts(
    layers: Sequence[Layer], sweep: bool = False, change_harmless: bool = True
) -> ResolvedRecipe:
    """Adds a layer for each value that yields to a higher rank, until none does.

    Args:
        layers: The layers of a recipe, in order.
        sweep: See `composed`.
        change_harmless: Whether to resolve harmless conflicts too. A resumed recipe keeps them.
    """
    layers = list(layers)
    folded = fold(layers)
    written = _written(folded, sweep)
    # One value yields at a time: its new value may solve other violations or cause new ones.
    for _ in range(_MAX_CHANGES):
        problems = rules.broken(folded.recipe, written)
        change = None
        # A backend only makes values yield here. Its errors depend on the hardware and come later,
        # when the recipe is planned or built.
        for violation in (*problems, *_backend_problems(folded.recipe)):
            if violation.is_harmless and not change_harmless:
                continue
            change = _yielding_layer(violation, folded)
            if change is not None:
                break
        if change is None:
            break
        layers.append(change)
        folded = fold(layers)
    errors = [violation for violation in problems if violation.is_error(written)]
    remarks = tuple(settings_without_effect(folded.recipe, written))
    return ResolvedRecipe(folded.recipe, tuple(layers), tuple(errors), written, remarks)


def _written(folded: Folded, sweep: bool) -> frozenset[str]:
    """Returns short names of the user's keys, in a sweep without keys at their default."""
    if not sweep:
        return folded.written
    return frozenset(
        key for key in folded.written if folded.values[full(key)] != defaults()[full(key)]
    )


def _yielding_layer(violation: Violation, folded: Folded) -> Layer | None:
    """Returns a layer with the first allowed fix, None if no value may yield."""
    for name, new in violation.fixes:
        key = full(name)
        author = folded.author(key)
        ranks = {
            cause: _rank_over(author, cause, folded)
            for cause in violation.caused_by
            if cause != name
        }
        strongest = max(ranks.values(), default=Rank.RECIPE)
        # Equal ranks don't yield: the user may mean either value. A value that has the
        # fix already would yield forever.
        if author >= strongest or folded.values[key] == new:
            continue
        causes = [cause for cause, rank in ranks.items() if rank == strongest]
        text = " and ".join(f"{cause}={_shown(folded.values[full(cause)])}" for cause in causes)
        # The new value makes others yield with the rank of its cause, not of its author.
        rank = max(folded.rank_as_cause(full(cause)) for cause in causes)
        return Layer(Source.CONFLICT, Location(text), {key: typed(key, new)}, rank)
    return None


def _rank_over(author: Rank, cause: str, folded: Folded) -> Rank:
    """Returns the rank of the key `cause` in a conflict with a value of `author`."""
    if author is Rank.PRESET and cause.startswith("model."):
        return Rank.USER  # presets were written for other models than this one
    return folded.rank_as_cause(full(cause))


def _backend_problems(recipe: Recipe) -> list[Violation]:
    """Returns the values that an explicitly chosen backend rejects on any hardware."""
    precision = recipe.precision
    if precision.backend == "auto" or not precision.fp8.enabled:
        return []
    try:
        backend_rules = backends.part(precision.backend, "rules")
    except ConfigError:  # the backend is not installed; whoever runs the recipe reports it
        return []
    return [
        *backend_rules.against_sharding(precision),
        *backend_rules.refusals(with_resolved_params(precision), Hardware("cpu")),
    ]


def _shown(value: Any) -> str:
    """Returns a value for a note. Floats have no trailing digits."""
    if isinstance(value, float):
        return f"{value:g}"
    return spelled(value)


def settings_without_effect(recipe: Recipe, written: Collection[str]) -> Iterator[str]:
    """Yields one line for each of the user's keys without effect in this recipe.

    None of these is an error, because trial runs often have reduced sizes.

    Args:
        recipe: The recipe.
        written: Short names of the keys that the user set.
    """
    model, optim, precision = recipe.model, recipe.optim, recipe.precision
    steps = recipe.trainer.max_steps
    window, frequency = model.sliding_window, model.window_attn_skip_freq
    if "model.sliding_window" in written and window is not None and window >= model.seq_length:
        yield (
            f"note: model.sliding_window={window}: has no effect with"
            f" model.seq_length={model.seq_length}; an exported checkpoint keeps it"
        )
    if "model.window_attn_skip_freq" in written and frequency and frequency > model.num_layers:
        yield (
            f"note: model.window_attn_skip_freq={frequency}: all layers have the window, because"
            f" model.num_layers={model.num_layers}"
        )
    has_dynamic_scale = precision.compute == "fp16" and precision.loss_scale is None
    growth = precision.loss_scale_window
    if "precision.loss_scale_window" in written and has_dynamic_scale and growth >= steps:
        yield (
            f"note: precision.loss_scale_window={growth}: the scale never grows, because the run"
            f" ends with trainer.max_steps={steps}"
        )
    fp8 = recipe.fp8
    has_history = fp8.enabled and SCALINGS[fp8.scaling].history
    reads_last_amax = fp8.amax_compute_algo == "most_recent" and fp8.amax_history_len > 1
    if "fp8.amax_history_len" in written and has_history and reads_last_amax:
        yield (
            f"note: fp8.amax_history_len={fp8.amax_history_len}:"
            " fp8.amax_compute_algo=most_recent reads only the last amax"
        )
    if optim.warmup_steps < steps - 1:  # the decay begins with the step after the warm-up
        return
    idle: list[str] = []
    for name in ("min_lr", "lr_decay_style"):
        if f"optim.{name}" in written:
            idle += changed(optim, name)
    if idle:
        yield (
            f"note: {', '.join(idle)}: has no effect, the learning rate never decays;"
            f" optim.warmup_steps={optim.warmup_steps}, trainer.max_steps={steps}"
        )


def _with_run_remarks(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Adds remarks about initial weights and checkpoints of a run."""
    recipe = resolved.recipe
    steps, interval = recipe.trainer.max_steps, recipe.checkpoint.every_n_steps
    task = None
    for layer in resolved.layers:
        if layer.group == "task":
            task = layer.name
    lines: list[str] = []
    # A smoke run needs no weights.
    if task in FINE_TUNING and not recipe.model.weights and not recipe.trainer.smoke:
        lines.append(
            f"note: task={task}: model.weights=null, so it starts from random weights; set"
            " model.weights=FOLDER"
        )
    if interval > steps and "checkpoint.every_n_steps" in resolved.written:
        lines.append(
            f"note: checkpoint.every_n_steps={interval}: saves only at the end, because the run"
            f" ends with trainer.max_steps={steps}"
        )
    mark_reported(resolved.recipe)
    record_sources(resolved.recipe, resolved.folded)
    return replace(resolved, remarks=(*resolved.remarks, *lines))


# Recipes changed in Python.


def resolve_recipe(
    recipe: Recipe, ranks: Mapping[str, Rank], change_harmless: bool = True
) -> ResolvedRecipe:
    """Resolves the conflicts of a Recipe object.

    Args:
        recipe: The recipe.
        ranks: Rank of each value by full key. Missing keys have the rank RECIPE.
        change_harmless: See `resolve_conflicts`.
    """
    values = flat(recipe)
    layers = [default_layer()]
    # A Python recipe has no history. Make one layer per rank, the lowest first.
    for rank in Rank:
        of_rank = {
            key: value for key, value in values.items() if ranks.get(key, Rank.RECIPE) is rank
        }
        layers.append(Layer(Source.ASSIGNED, Location(), of_rank, rank))
    resolved = resolve_conflicts(layers, change_harmless=change_harmless)
    changes = {change.key: change.new for change in resolved.changes}
    if not changes:
        return replace(resolved, recipe=recipe)
    return replace(resolved, recipe=assigned(recipe, changes))  # keeps what its nodes record


def ranks_of_python_recipe(recipe: Recipe) -> dict[str, Rank]:
    """Returns the ranks of a recipe's values by full key, for a recipe changed in Python.

    Fields of the `fp8` node that a preset set (schema/keys.py) have the rank PRESET. All other
    values count as set by the user.
    """
    ranks = dict.fromkeys(defaults(), Rank.USER)
    for name in preset_keys(recipe.fp8):
        ranks[full(recipe.fp8.key(name))] = Rank.PRESET
    return ranks


def mark_reported(recipe: Recipe) -> None:
    """Records the values of `recipe`, so that remarks about them are not repeated."""
    vars(recipe)[_REPORTED] = flat(recipe)


def resolved_for_build(recipe: Recipe) -> Recipe:
    """Returns the recipe for `build`: a copy in which preset values have yielded.

    Logs each change. Returns `recipe` itself if nothing changes. Values that break rules
    stay.

    Raises:
        ConfigError: The recipe has a field of a subclass.
    """
    recipe = as_declared(recipe, Recipe)
    resolved = resolve_recipe(recipe, ranks_of_python_recipe(recipe), change_harmless=False)
    # `compose` has reported its recipe already. Only values assigned since then are new.
    reported = vars(recipe).get(_REPORTED) or defaults()
    result = resolved.recipe
    new = frozenset(short(key) for key, value in flat(result).items() if value != reported[key])
    for line in replace(resolved, remarks=tuple(settings_without_effect(result, new))).notes:
        logging.getLogger("fp8cfg").warning(line)
    return result


# A launcher's machines.


def machines() -> dict[str, int]:
    """Returns a launcher's nodes and devices by full key.

    Empty without a launcher, or if its machines have different numbers of ranks.
    """
    world = os.environ.get("WORLD_SIZE", "0")
    local = os.environ.get("LOCAL_WORLD_SIZE", world)
    if not (world.isdecimal() and local.isdecimal() and int(world) and int(local)):
        return {}
    if int(world) % int(local):
        return {}  # the last machine has fewer ranks
    return {"trainer.num_nodes": int(world) // int(local), "trainer.devices": int(local)}


def _launcher_layers() -> list[Layer]:
    """Returns the layer of a launcher's machines. Empty without a launcher."""
    values = machines()
    if not values:
        return []
    return [Layer(Source.LAUNCHER, Location("WORLD_SIZE"), values, Rank.USER)]
