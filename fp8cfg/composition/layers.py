"""Layers of a recipe: the source, the place and the values of each change.

A recipe is a fold of layers: the last layer with a key sets its value. The list of layers is the
only record. Precedence, conflicts, "has no effect" and `explain` read it. `recipe_layers` collects
the layers of a command line or a file. `precedence` resolves conflicts between them.
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
    """Precedence in a conflict: a value yields only to a value of a higher rank."""

    RECIPE = 0  # the recipe, or the schema's default if the recipe does not set the key
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
        text: The argument, the name of a recipe function, or the cause of a change.
        file: The file. Line numbers are computed on demand, so composing does not need them.
        node: Full key of the node that the file's keys are relative to.
        key: The key of the file that makes the layer, such as `precision`.
    """

    text: str = ""
    file: Path | None = None
    node: str = ""
    key: str = ""

    def line(self, key: str) -> int | None:
        """Returns the line of the full `key` in the file, None if the file does not have it."""
        if self.file is None:
            return None
        lines = key_lines(self.file)
        if self.key:
            return lines.get(self.key)
        # The file may use short or full names.
        for written, line in lines.items():
            if full(f"{self.node}.{written}".lstrip(".")) == key:
                return line
        return None


@dataclass(frozen=True)
class Layer:
    """Values that one author set in one place.

    Attributes:
        source: Kind of the layer.
        location: The place of the values.
        values: Value by full key, in the schema's types.
        rank: Precedence of the values in a conflict.
        implied: Keys that the layer resets only because it replaces their full node.
        group: Group of the choice that made the layer, such as a preset, otherwise empty.
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
        """The recipe with these values. It is shared by rules and backends: do not change it."""
        return Recipe(**nested(self.values))

    @functools.cached_property
    def written(self) -> frozenset[str]:
        """Short names of the keys that the user set."""
        return frozenset(short(key) for key in self.values if self.author(key) is Rank.USER)

    def author(self, key: str) -> Rank:
        """Returns the rank of the layer that set `key`, before conflicts were resolved."""
        for layer in reversed(self.history[key]):
            # An exported file has every key, so a default in a file expresses no wish.
            is_export = layer.source is Source.FILE and layer.values[key] == defaults()[key]
            if layer.source is not Source.CONFLICT and not is_export:
                return layer.rank
        return Rank.RECIPE

    def rank_as_cause(self, key: str) -> Rank:
        """Returns the rank with which `key` makes others yield.

        A value that yielded itself has the rank of its cause.
        """
        last = self.history[key][-1]
        if last.source is Source.CONFLICT:
            return last.rank
        return self.author(key)


def fold(layers: Iterable[Layer]) -> Folded:
    """Applies the layers in order: the last layer with a key sets its value."""
    # Every key has a history, because the first layer is the schema's defaults.
    history: dict[str, list[Layer]] = {key: [] for key in defaults()}
    for layer in layers:
        for key in layer.values:
            history[key].append(layer)
    values = {key: layers[-1].values[key] for key, layers in history.items()}
    return Folded(values, history)


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Returns the schema's default of every full key."""
    # Cached, so read-only.
    return MappingProxyType(flat(Recipe()))


def default_layer() -> Layer:
    """Returns the lowest layer: the schema's defaults."""
    return Layer(Source.DEFAULT, Location(), defaults())


def node_layer(node: Node, source: Source, location: Location, rank: Rank) -> Layer:
    """Returns the layer of a node that replaces another node, with every key below it."""
    home = full(type(node).home)
    return Layer(source, location, flat(node, home), rank, _unset_keys(node, home))


def stated_values(recipe: Recipe) -> dict[str, Any]:
    """Returns the values of a recipe by full key, without unset defaults.

    A default stays if it was set explicitly.
    """
    unset = _unset_keys(recipe)
    values: dict[str, Any] = {}
    for key, value in flat(recipe).items():
        if key not in unset or value != defaults()[key]:
            values[key] = value
    return values


def _unset_keys(node: Node, home: str = "") -> frozenset[str]:
    """Returns the full keys below `node` that nobody set. `home` is its own key."""
    unset: set[str] = set()
    for name in type(node).model_fields:
        key = f"{home}.{name}".lstrip(".")
        value = getattr(node, name)
        if isinstance(value, Node):
            unset |= _unset_keys(value, key)
        # pydantic records assigned fields, even at their default.
        elif name not in node.model_fields_set:
            unset.add(key)
    return frozenset(unset)


def key_history(folded: Folded, key: str) -> list[Layer]:
    """Returns the layers that set the full `key`, in order. The last one has the recipe's value.

    A preset that does not mention the key is left out, unless it resets a changed value.
    """
    layers: list[Layer] = []
    for layer in folded.history[key]:
        is_first = len(layers) < 2  # the first of all is the schema's default
        if key in layer.implied and is_first:
            continue
        layers.append(layer)
    return layers


def shipped_choices(layers: Iterable[Layer]) -> dict[str, str]:
    """Returns the chosen recipe function and presets, by group.

    Implicit defaults and presets of the user's folder are left out.
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
