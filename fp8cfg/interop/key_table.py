"""Key table of another project: its keys with their meaning in a recipe.

A table works in both directions. `Entry.read` converts a setting of the project to recipe values
and `Entry.write` converts recipe values to a setting. `translation` applies a table to a
configuration or a recipe.

Two kinds of data in this package:
    settings: Values in the other project's configuration, by its keys.
    values: Recipe values by short keys, such as {"fp8.margin": 1}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fp8cfg.schema.errors import ConfigError, nearest, printable, refuse_if, suggest
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS

Values = Mapping[str, Any]
"""Recipe values by short keys."""
TYPO_SIMILARITY = 0.8
"""Least similarity (difflib) of a key and its misspelling."""
OMIT = object()
"""Result of `Entry.write` for an unnecessary key."""

FORMATS = {name: name for name in ("hybrid", "e4m3")}
AMAX_COMPUTE_ALGOS = {name: name for name in ("max", "most_recent")}


def always(values: Values) -> bool:
    return True


def runs_fp8(values: Values) -> bool:
    return bool(values["fp8.enabled"])


def uses_delayed_scaling(values: Values) -> bool:
    return runs_fp8(values) and SCALINGS[values["fp8.scaling"]].history


def no_lines(data: Any) -> list[str]:
    """Default of the callables of a `KeyTable`."""
    return []


@dataclass(frozen=True)
class Entry:
    """One key of another project.

    Attributes:
        key: The key. Upper-case keys do not exist in the project: `KeyTable.prepare` combines
            several settings into one of them.
        read: Converts a setting to recipe values. Raises ValueError with the expected form.
        write: Converts the values of a recipe to a setting, or to OMIT.
        applies: Whether `write` is called for a recipe.
    """

    key: str
    read: Callable[[Any], dict[str, Any]]
    write: Callable[[Values], Any]
    applies: Callable[[Values], bool] = always


class Unsupported(NamedTuple):
    """A key of the project without a recipe key.

    Attributes:
        reason: Text of the remark on the key.
        usual: Settings without a remark, such as the project's default.
    """

    reason: str
    usual: tuple[Any, ...] = ()


@dataclass(frozen=True)
class KeyTable:
    """Keys of another project, in lower case with underscores. Keys of sections have dots.

    Attributes:
        name: Name of the project.
        entries: The keys with a meaning for a recipe.
        aliases: Other names of these keys.
        defaults: The project's defaults where they differ from the recipe's.
        unsupported: Keys without a recipe key. A name with a dot at the end is a full section.
        prepare: Called before `entries`. Resolves dependent settings in place and returns remarks.
            Raises ConfigError for conflicts between settings.
        export_errors: Returns errors for recipes beyond the project's features.
        reasons: Reasons against the export of recipe keys. A name with a dot at the end is a node.
        caveats: Recipe keys with a counterpart that the project ignores or changes.
        extra_keys: Recipe keys outside of precision with a counterpart in the project.
        export_remarks: Returns remarks on values with another effect in the project.
        find_section_key: Returns the table's name of a key in a section of a job, or None.
    """

    name: str
    entries: tuple[Entry, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unsupported: Mapping[str, Unsupported] = field(default_factory=dict)
    prepare: Callable[[dict[str, Any]], list[str]] = no_lines
    export_errors: Callable[[Values], list[str]] = no_lines
    reasons: Mapping[str, str] = field(default_factory=dict)
    caveats: Mapping[str, str] = field(default_factory=dict)
    extra_keys: tuple[str, ...] = ()
    export_remarks: Callable[[Values], list[str]] = no_lines
    find_section_key: Callable[[str], str | None] | None = None

    def canonical_name(self, key: str) -> str:
        """Returns the table's name of a key or a flag in any spelling."""
        name = key.strip().lower().removeprefix("--").replace("-", "_")
        if name in self.aliases:
            return self.aliases[name]
        if self.find_section_key is None:
            return name
        return self.find_section_key(name) or name

    def has_entry(self, key: str) -> bool:
        """Returns whether a key, in any spelling, has a meaning for a recipe."""
        name = self.canonical_name(key)
        return any(entry.key == name for entry in self.entries)

    def first_key(self, section: str) -> str | None:
        """Returns the first key of a section, or None if the table has no such section."""
        for entry in self.entries:
            if entry.key.startswith(f"{section}."):
                return entry.key
        return None

    def suggest_key(self, key: str) -> str | None:
        """Returns the key that was probably meant by an unknown one, or None."""
        typo = self.most_similar_key(key, TYPO_SIMILARITY)
        if typo:
            return typo
        # The right key in the wrong section is likelier than a key that only looks similar.
        leaf = key.rpartition(".")[2]
        for name in self._names():
            if name.endswith(f".{leaf}"):
                return name
        return self.most_similar_key(key, 0.6)

    def most_similar_key(self, key: str, cutoff: float) -> str | None:
        """Returns the most similar key to an unknown one, or None.

        Args:
            key: The unknown key.
            cutoff: Least similarity of the names and of their sections, from 0 to 1 (difflib).
        """
        leaves: dict[str, list[str]] = {}
        for name in self._names():
            known_section, _, known_leaf = name.rpartition(".")
            leaves.setdefault(known_section, []).append(known_leaf)

        section, _, leaf = key.rpartition(".")
        similar: str | None = section
        if section not in leaves:
            similar = nearest(section, leaves, cutoff)
        if similar is None:
            return None
        match = nearest(leaf, leaves[similar], cutoff)
        # Only the section is misspelled, and the table does not list the keys of that section.
        if not match and similar != section and self.find_unsupported(f"{similar}.{leaf}"):
            match = leaf
        return f"{similar}.{match}".lstrip(".") if match else None

    def find_unsupported(self, name: str) -> Unsupported | None:
        """Returns why a key or the innermost section around it is unsupported, or None."""
        sections = [name[: i + 1] for i, character in enumerate(name) if character == "."]
        for candidate in (name, *reversed(sections)):
            if candidate in self.unsupported:
                return self.unsupported[candidate]
        return None

    def _names(self) -> list[str]:
        names = [entry.key for entry in self.entries if not entry.key.isupper()]
        return [*names, *self.aliases, *self.unsupported]


class Read(NamedTuple):
    """An imported recipe.

    Attributes:
        recipe: The recipe. Its rules are not checked yet.
        lost: Remarks on settings without an exact equivalent.
        unknown: Remarks on keys that do not exist in the other project.
    """

    recipe: Recipe
    lost: tuple[str, ...]
    unknown: tuple[str, ...]


class Written(NamedTuple):
    """An exported recipe.

    Attributes:
        value: Settings by key, or an object of the project's library.
        lost: Remarks on recipe keys without an exact equivalent.
    """

    value: Any
    lost: tuple[str, ...]


class UnknownObject(ConfigError):
    """An object of an unknown class. Exit code 2."""


class NotHere(ConfigError):
    """The library of the other project cannot be imported. Exit code 2."""


# Parsers of settings. Each accepts text too: flags and key=value arguments have no types.

_TRUTH = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1", "enabled"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0", "disabled"), False),
}


def parse_bool(value: Any) -> bool:
    """Accepts the same texts as the parsers of Python and Accelerate."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUTH:
        raise ValueError("expected true or false")
    return _TRUTH[text]


def is_on(value: Any) -> bool:
    """Returns whether `parse_bool` returns True. Invalid values are off."""
    return _TRUTH.get(str(value).strip().lower(), False)


def parse_int(value: Any) -> int:
    """Parses an integer. 8.0 and "1e3" are integers."""
    result = parse_float(value, "an integer")
    if not result.is_integer():
        raise ValueError("expected an integer")
    return int(result)


def parse_float(value: Any, expected: str = "a number") -> float:
    """Parses a finite number. `expected` is for the error message."""
    try:
        if isinstance(value, bool):  # an int in Python
            raise ValueError
        result = float(str(value).strip())
        if not math.isfinite(result):
            raise ValueError
    except ValueError:
        raise ValueError(f"expected {expected}") from None
    return result


def parse_floats(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of numbers")
    return tuple(parse_float(item) for item in value)


def parse_choice(value: Any, choices: Mapping[str, Any]) -> Any:
    """Returns the value of `choices` for a name. Ignores the name's case."""
    name = str(value).strip().lower()
    if name not in choices:
        raise ValueError("not an option" + suggest(name, choices))
    return choices[name]


# Common kinds of entries.


def same_value(
    key: str,
    recipe_key: str,
    parse: Callable[[Any], Any],
    applies: Callable[[Values], bool] = always,
) -> Entry:
    """A key with the same values as the recipe key."""
    return Entry(
        key,
        read=lambda setting: {recipe_key: parse(setting)},
        write=lambda values: values[recipe_key],
        applies=applies,
    )


def inverse_switch(key: str, recipe_key: str, applies: Callable[[Values], bool] = always) -> Entry:
    """A switch with the opposite meaning of the recipe key."""
    return Entry(
        key,
        read=lambda setting: {recipe_key: not parse_bool(setting)},
        write=lambda values: not values[recipe_key],
        applies=applies,
    )


def switch_for(key: str, recipe_key: str, value: Any) -> Entry:
    """A switch for one value of the recipe key. If it is off, the recipe key stays."""
    return Entry(
        key,
        read=lambda setting: {recipe_key: value} if parse_bool(setting) else {},
        write=lambda values: values[recipe_key] == value or OMIT,
    )


def renamed_choice(
    key: str,
    recipe_key: str,
    choices: Mapping[str, Any],
    applies: Callable[[Values], bool] = always,
) -> Entry:
    """A key with other names for the values of the recipe key.

    Args:
        key: The key.
        recipe_key: The recipe key.
        choices: Recipe values by the project's names, in lower case. The first of several names
            is written. Values without a name are omitted.
        applies: See `Entry`.
    """
    names: dict[Any, str] = {}
    for name, value in choices.items():
        names.setdefault(value, name)
    return Entry(
        key,
        read=lambda setting: {recipe_key: parse_choice(setting, choices)},
        write=lambda values: names.get(values[recipe_key], OMIT),
        applies=applies,
    )


def read_only(key: str, read: Callable[[Any], dict[str, Any]]) -> Entry:
    """A key for imports. Another key with the same meaning is exported."""
    return Entry(key, read, write=lambda values: OMIT)


def write_only(
    key: str, write: Callable[[Values], Any], applies: Callable[[Values], bool] = always
) -> Entry:
    """A key for exports. It is required by the project, and follows from other keys."""
    return Entry(key, read=lambda setting: {}, write=write, applies=applies)


# Text.


def flatten_keys(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one mapping with dotted keys. Empty mappings disappear.

    Raises:
        ConfigError: A key is both nested and dotted.
    """
    flat: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        leaves = {key: value}
        if isinstance(value, Mapping):
            leaves = flatten_keys(value, f"{key}.")
        refuse_if(
            [
                f"{printable(leaf)}: given twice, in its section and with dots; remove one"
                for leaf in leaves
                if leaf in flat
            ]
        )
        flat |= leaves
    return flat


def unread_remark(names: Sequence[str]) -> list[str]:
    """Returns one remark on the unread parts of a source, or none."""
    if not names:
        return []
    return [f"{', '.join(printable(name) for name in names)}: not read"]


def format_setting(key: str, value: Any) -> str:
    """Returns `key=value` with at most 40 characters of the value. A flag needs no value."""
    if value is True and key.startswith("--"):
        return key
    text = printable(str(value))
    if len(text) > 40:
        text = text[:37] + "..."
    return f"{key}={text}"
