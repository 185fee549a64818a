"""Layers: who set which keys of a recipe, where, and to what.

A recipe is a fold of layers: the last layer that has a key sets its value. The list of layers is
the only record. Precedence, conflicts, "has no effect" and `explain` read it. `recipe_layers`
collects the layers of a command line or a file; `precedence` resolves conflicts between them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fp8cfg.composition.recipe_yaml import flat, key_lines, nested
from fp8cfg.schema.keys import full, short
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import CONF


class Rank(IntEnum):
    """Precedence in a conflict: a value yields to one of a higher rank, and to no other."""

    RECIPE = 0  # the recipe, or the schema if the recipe leaves the default
    PRESET = 1
    USER = 2


class Source(Enum):
    """Kind of a layer, as `fp8cfg explain` prints it."""

    DEFAULT = "schema default"
    RECIPE = "recipe function"
    CHECKPOINT = "checkpoint"
    PRESET = "preset"
    FILE = "recipe file"
    COMMAND_LINE = "command line"
    LAUNCHER = "launcher"
    ASSIGNED = "assigned"
    CONFLICT = "changed to fit"


@dataclass(frozen=True)
class Location:
    """Where a layer comes from: an argument, a file, or a name.

    Attributes:
        text: The argument, the name of a recipe function, or the values that a value yielded to.
        file: The file. Its lines are looked up only when somebody asks, so composing reads none.
        node: Full key of the node that the file's keys are relative to.
        key: The one key of the file that stands for the whole layer, such as its `precision:`.
    """

    text: str = ""
    file: Path | None = None
    node: str = ""
    key: str = ""

    def line(self, key: str) -> int | None:
        """Line of the full `key` in the file; None if the file does not have it."""
        if self.file is None:
            return None
        lines = key_lines(self.file)
        if self.key:
            return lines.get(self.key)
        for written, line in lines.items():
            if full(f"{self.node}.{written}".lstrip(".")) == key:
                return line
        return None


@dataclass(frozen=True)
class Layer:
    """What one author set in one place.

    Attributes:
        source: Kind of the layer.
        location: Where its values are written.
        values: Value by full key, as the schema holds it.
        rank: Precedence of the values in a conflict.
        implied: Keys that the layer resets only because it replaces their whole node.
        group: Group of the choice that a preset, a task or a recipe was chosen from, else empty.
        name: Name of that choice.
        chosen_by: The argument, or the key of a file, that made the choice. None for a default.
    """

    source: Source
    location: Location
    values: Mapping[str, Any]
    rank: Rank = Rank.RECIPE
    implied: frozenset[str] = frozenset()
    group: str = ""
    name: str = ""
    chosen_by: Location | None = None


@dataclass(frozen=True)
class Folded:
    """The value of each key, and the layers that set it, in order."""

    values: Mapping[str, Any]
    history: Mapping[str, Sequence[Layer]]

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The recipe of the values. Rules and backends share this object; nobody changes it."""
        return Recipe(**nested(self.values))

    @functools.cached_property
    def written(self) -> frozenset[str]:
        """Short names of the keys that the user wrote."""
        return frozenset(short(key) for key in self.values if self.author(key) is Rank.USER)

    def author(self, key: str) -> Rank:
        """Rank of the layer that set `key`, before conflicts were resolved."""
        for layer in reversed(self.history[key]):
            # An exported file has every key, so a default in a file expresses no wish.
            is_export = layer.source is Source.FILE and layer.values[key] == defaults()[key]
            if layer.source is not Source.CONFLICT and not is_export:
                return layer.rank
        return Rank.RECIPE

    def rank_as_cause(self, key: str) -> Rank:
        """Rank with which `key` makes others yield. A value that yielded has its cause's rank."""
        last = self.history[key][-1]
        if last.source is Source.CONFLICT:
            return last.rank
        return self.author(key)


def fold(layers: Iterable[Layer]) -> Folded:
    """Lays the layers over one another: the last one that has a key sets its value."""
    # Every key has a history, because the first layer is the schema's defaults.
    history: dict[str, list[Layer]] = {key: [] for key in defaults()}
    for layer in layers:
        for key in layer.values:
            history[key].append(layer)
    values = {key: layers[-1].values[key] for key, layers in history.items()}
    return Folded(values, history)


@functools.cache
def defaults() -> Mapping[str, Any]:
    """The schema's default of every full key."""
    return MappingProxyType(flat(Recipe()))


def default_layer() -> Layer:
    """The layer at the bottom: the schema's defaults."""
    return Layer(Source.DEFAULT, Location(), defaults())


def node_layer(node: Node, source: Source, location: Location, rank: Rank) -> Layer:
    """Returns the layer of a node that replaces another node, with every key below it."""
    home = full(type(node).home)
    return Layer(source, location, flat(node, home), rank, _unset_keys(node, home))


def stated_values(recipe: Recipe) -> dict[str, Any]:
    """Value by full key, without keys that nobody set and that have the schema's default."""
    unset = _unset_keys(recipe)
    values: dict[str, Any] = {}
    for key, value in flat(recipe).items():
        if key not in unset or value != defaults()[key]:
            values[key] = value
    return values


def _unset_keys(node: Node, home: str = "") -> frozenset[str]:
    """Full keys below `node`, whose own key is `home`, that nobody set."""
    unset: set[str] = set()
    for name in type(node).model_fields:
        key = f"{home}.{name}".lstrip(".")
        value = getattr(node, name)
        if isinstance(value, Node):
            unset |= _unset_keys(value, key)
        elif name not in node.model_fields_set:
            unset.add(key)
    return frozenset(unset)


def key_history(folded: Folded, key: str) -> list[Layer]:
    """Returns the layers that set the full `key`, in order; the last one has the recipe's value.

    A preset that does not mention the key is left out, unless it resets a value to the default.
    """
    layers: list[Layer] = []
    for layer in folded.history[key]:
        is_first = len(layers) < 2  # the first of all is the schema's default
        if key in layer.implied and is_first:
            continue
        layers.append(layer)
    return layers


def shipped_choices(layers: Iterable[Layer]) -> dict[str, str]:
    """Returns the recipe function and the presets that were chosen, by group.

    Defaults that nobody chose and presets of the user's own folder are left out.
    """
    chosen: dict[str, str] = {}
    for layer in layers:
        # A later choice of the group replaces an earlier one, even if it cannot be named itself.
        if layer.source is Source.RECIPE:
            chosen.pop("recipe", None)
            if layer.chosen_by is not None:
                chosen["recipe"] = layer.name
        elif layer.source is Source.PRESET and layer.group in ("precision", "data"):
            chosen.pop(layer.group, None)
            if layer.location.file is not None and layer.location.file.is_relative_to(CONF):
                chosen[layer.group] = layer.name
    return chosen
