"""Config groups: recipes, presets and tasks to choose by name, and the defaults lists of files.

A group is a folder of YAML files, below conf/ or below the user's --config-dir. The user may add
groups. The path of such a folder names the node that its files set (optim/, trainer/strategy/). A
file may name another node in its first line, as in Hydra: `# @package _global_` is the full recipe.

`Library` lists folders and reads files. `file_steps` reads the defaults list of a recipe's file.
`recipe_layers` turns both into layers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8cfg.composition.recipe_yaml import full_names, nested, settings
from fp8cfg.schema import foreign_names, presets, recipe_registry
from fp8cfg.schema.data import Data
from fp8cfg.schema.errors import ConfigError, nearest, refuse_if, suggest
from fp8cfg.schema.hub import PREFIX
from fp8cfg.schema.hugging_face import FROM_HF
from fp8cfg.schema.keys import PLUGIN, full
from fp8cfg.schema.node import Node
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.recipe import fields
from fp8cfg.schema.recipe_registry import keeps_recipe_value
from fp8cfg.schema.safe_files import CONF, NAME, default_recipe, read_text, read_yaml

REPLACING_GROUPS: dict[str, tuple[type[Node], str]] = {
    "precision": (Precision, PLUGIN),
    "data": (Data, "data"),
}
"""Groups with choices for one full node: the class of the node and its full key."""
MERGING_GROUPS = ("task",)
"""Shipped groups with choices that set only some keys of the recipe."""
GROUPS = ("recipe", *REPLACING_GROUPS, *MERGING_GROUPS)
"""Groups with shipped choices."""
_MAX_PRINTED_PATH = 1000
"""Longest path, in characters, that an error prints in full."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.yaml)(?<!\.yml)(?<!\.json)")
"""OWNER/NAME, but not the name of a file."""
_MAX_DEPTH = 3
"""Most nested folders of a user's group."""


class Library:
    """The choices of each group.

    A library lists each folder once and reads each file once. Make a new one to see changes on
    disk.

    Args:
        folder: The user's --config-dir, or None.

    Raises:
        ConfigError: If `folder` is not a folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None and not os.path.isdir(folder):
            name = str(folder)
            if len(name) > _MAX_PRINTED_PATH:
                name = f"{name[:40]}..."
            raise ConfigError(f"--config-dir {name}: no such folder")
        self.folder = folder
        if folder is not None:
            self.folder = folder.resolve()
        self._groups: list[str] | None = None
        self._choices: dict[str, list[str]] = {}
        self._data: dict[Path, dict[str, Any]] = {}

    def groups(self) -> list[str]:
        """Returns all groups: first the shipped ones, then the groups of the user's folder."""
        if self._groups is None:
            self._groups = [*GROUPS, *self._folder_groups()]
        return self._groups

    def _folder_groups(self) -> list[str]:
        """Returns the groups that only the user's folder has, by their relative path."""
        if self.folder is None:
            return []
        folders: set[Path] = set()
        for depth in range(1, _MAX_DEPTH + 1):
            folders |= {file.parent for file in self.folder.glob("*/" * depth + "*.yaml")}
        groups: list[str] = []
        for folder in sorted(folders):
            path = folder.relative_to(self.folder)
            is_named = all(NAME.fullmatch(part) for part in path.parts)
            # Hydra's own groups are in hydra/.
            if is_named and path.parts[0] not in (*GROUPS, "hydra"):
                groups.append(path.as_posix())
        return groups

    def merging_group(self, key: str) -> str | None:
        """Returns the group named by `key` if its choices merge into the recipe, otherwise None.

        These are tasks and the groups of the user's folder. The key may have dots instead of
        slashes.
        """
        group = key.replace(".", "/")
        if group in MERGING_GROUPS:
            return group
        if group not in GROUPS and group in self.groups():
            return group
        return None

    def package(self, group: str) -> str:
        """Returns the key of the node that a group sets, `_global_` for the full recipe."""
        if group in REPLACING_GROUPS:
            return REPLACING_GROUPS[group][1]
        if group in ("recipe", *MERGING_GROUPS):
            return "_global_"
        return group.replace("/", ".")

    def choices(self, group: str) -> list[str]:
        """Returns the names in a group, sorted: file stems and recipe functions."""
        if group not in self._choices:
            names: set[str] = set()
            for root in self._roots():
                for file in (root / group).glob("*.yaml"):
                    if NAME.fullmatch(file.stem) and file.is_file():
                        names.add(file.stem)
            if group == "recipe":
                names |= set(recipe_registry.recipes())
            self._choices[group] = sorted(names)
        return self._choices[group]

    def problem(self, group: str, name: str) -> str | None:
        """Returns the error line if `group=name` cannot be chosen, otherwise None."""
        stem, known = self.canonical_name(group, name), self.choices(group)
        if stem in known:
            return None
        if not name:
            return f"{group}=: needs a name; see fp8cfg list {group}"
        if name.startswith("$"):
            return f"{group}={name}: the shell did not replace this variable; write its value"
        # The name of an existing file: the user wants to train this file.
        file = name
        if not name.endswith((".yaml", ".yml", ".json")):
            file = f"{name}.yaml"
        if group == "recipe" and os.path.isfile(file):
            return f"recipe={name}: no such recipe; to run a file: fp8cfg {file}"
        if group == "data" and os.path.exists(name):
            return f"data={name}: no such data preset; to train on it: data.path={name}"
        if not NAME.fullmatch(stem):
            # An id of the hub: suggest from_hf, and the shipped recipe with a similar name.
            base = name.rpartition("/")[2].replace(".", "").replace("-", "_")
            if group == "recipe" and _HUB_ID.fullmatch(name) and base not in known:
                line = (
                    f"recipe={name}: a hub id is not a recipe; set recipe={FROM_HF}"
                    f" model.path={PREFIX}{name}"
                )
                suggestion = nearest(base, known)
                if suggestion:
                    line += f", or recipe={suggestion}"
                return line
            return (
                f"{group}={name}: expected a name of letters, digits and '_', not a path"
                f"{suggest(base, known) or f'; see fp8cfg list {group}'}"
            )
        return self._unknown_choice(group, name)

    def _unknown_choice(self, group: str, name: str) -> str:
        """Returns the error line for a valid name that the group does not have."""
        known = self.choices(group)
        kind = group if group in ("recipe", *MERGING_GROUPS) else f"{group} preset"
        line = f"{group}={name}: no such {kind}"
        synonym = foreign_names.meant(group, name)
        if synonym:
            return f"{line}; did you mean {synonym!r}?"
        # A common part of several names, such as llama or 8b: list all of them.
        family: list[str] = []
        for choice in known:
            is_size = group == "recipe" and choice.endswith(f"_{name}")  # "8b" of every family
            if choice.startswith(f"{name}_") or is_size:
                family.append(choice)
        if len(family) > 1:
            return f"{line}; did you mean one of {', '.join(family)}?"
        spellings = known
        if group == "precision":
            spellings = [*known, *presets.FUNCTIONS]
        return line + (suggest(name, spellings) or f"; see fp8cfg list {group}")

    def canonical_name(self, group: str, name: str) -> str:
        """Returns the choice that `name` spells.

        In the group precision, names of NeMo's functions are accepted too.
        """
        if group != "precision" or name in self.choices(group):
            return name
        return presets.stem(name)

    def file(self, group: str, stem: str) -> Path | None:
        """Returns the file of a choice, None if it has none.

        The user's files take precedence over shipped ones.

        Raises:
            ConfigError: The file is a link to a place outside of its folder.
        """
        for root in self._roots():
            path = root / group / f"{stem}.yaml"
            if NAME.fullmatch(stem) and path.is_file():
                if not path.resolve().is_relative_to(root.resolve()):
                    raise ConfigError(f"{group}={stem}: {path} is a link that leaves {root}")
                return path.resolve()
        return None

    def data(self, path: Path) -> dict[str, Any]:
        """Returns the content of a file. It is cached: do not change it.

        Raises:
            ConfigError: See `read_yaml`.
        """
        if path not in self._data:
            self._data[path] = read_yaml(path)
        return self._data[path]

    def _roots(self) -> list[Path]:
        """Returns the folders of choices, the user's first."""
        if self.folder is None:
            return [CONF]
        return [self.folder, CONF]


# Defaults lists: the recipe and the presets that a recipe's file builds on.

SELF = "_self_"
_MAX_BASES = 16
_KEYWORDS = ("override", "optional")


@dataclass(frozen=True)
class Choice:
    """An entry of a defaults list.

    Attributes:
        group: Group of the choice; `_self_` for the file's own values.
        name: Name of the choice; empty if the entry is null.
        key: The key of the file that makes the choice, as `key_lines` names it.
        optional: Whether a choice that does not exist is skipped.
        override: Whether it replaces the choice of a file below.
        standard: Whether it is the implicit default recipe.
        free: Whether overrides don't replace it: an entry of a list, a path or one with a package.
    """

    group: str
    name: str = ""
    key: str = ""
    optional: bool = False
    override: bool = False
    standard: bool = False
    free: bool = False


@dataclass(frozen=True)
class Step:
    """One step of a recipe's file: a recipe function, a preset, or the file's own values.

    Attributes:
        choice: The entry.
        path: The file with the entry.
        derived_files: The files built on that file.
        values: The file's own values, if the choice is `_self_`.
        chosen_by: The file and the key that chose this file.
    """

    choice: Choice
    path: Path
    derived_files: tuple[Path, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    chosen_by: tuple[Path, str] | None = None


def take_choices(data: dict[str, Any], library: Library) -> list[Choice]:
    """Removes the choices from a file's data and returns them in order, with `_self_`.

    Args:
        data: The file's content, changed in place.
        library: The choices of each group.

    Raises:
        ConfigError: An entry is invalid, or a group has two choices.
    """
    entries = _defaults_entries(data.pop("defaults", None), library)
    listed = {(entry.group, entry.name) for entry in entries}
    as_keys = [entry for entry in _choices_as_keys(data) if (entry.group, entry.name) not in listed]
    # Keys such as `precision: NAME` act just before the file's own values.
    position = len(entries)
    for index, entry in enumerate(entries):
        if entry.group == SELF:
            position = index
            break
    choices = [*entries[:position], *as_keys, *entries[position:]]
    if position == len(entries):
        choices.append(Choice(SELF))
    _check_chosen_once(choices)
    return choices


def _check_chosen_once(choices: Sequence[Choice]) -> None:
    """Raises ConfigError if a group has two choices without `override`."""
    names: dict[str, str] = {}
    for choice in choices:
        if choice.group == SELF or choice.override or choice.free or not choice.name:
            continue
        if names.setdefault(choice.group, choice.name) != choice.name:
            raise ConfigError(
                f"{choice.group}: given twice, as {names[choice.group]} and as {choice.name}; to"
                f" replace one write 'override /{choice.group}: {choice.name}'"
            )


Overriding = Mapping[str, tuple[Path, Choice]]
"""Choices by group that replace choices of files below, each with its file."""


def file_steps(
    data: Mapping[str, Any],
    path: Path,
    library: Library,
    derived_files: tuple[Path, ...] = (),
    overridden: Overriding | None = None,
    chosen_by: tuple[Path, str] | None = None,
) -> Iterator[Step]:
    """Yields the steps of a recipe's file, after the steps of its base recipe.

    Args:
        data: The file's content.
        path: The file.
        library: The choices of each group.
        derived_files: The files that build on this one.
        overridden: Choices of the files above that replace choices of this one.
        chosen_by: The file and the key that chose this file.

    Raises:
        ConfigError: An entry is invalid, or files build on one another in a circle.
    """
    values = dict(data)
    choices = take_choices(values, library)
    if path in derived_files or len(derived_files) >= _MAX_BASES:
        raise ConfigError("recipe: recipes build on one another in a circle")
    overriding = {choice.group: (path, choice) for choice in choices if choice.override}
    # Choices of files above win.
    overriding |= overridden or {}
    plain = [choice for choice in choices if not choice.override]
    # A file without a recipe builds on the default recipe.
    if not any(choice.group == "recipe" and choice.name for choice in plain):
        plain = [choice for choice in plain if choice.group != "recipe"]
        plain.insert(0, Choice("recipe", default_recipe(), standard=True))
    chosen_here = {choice.group for choice in plain if not choice.free}
    for entry in plain:
        source, choice = path, entry
        if not entry.free and entry.group in overriding:
            source, choice = overriding[entry.group]
        if choice.group == SELF:
            yield Step(choice, path, derived_files, values, chosen_by)
        elif choice.group == "recipe":
            overridden_below = {
                g: choice_above for g, choice_above in overriding.items() if g not in chosen_here
            }
            yield from _base_steps(choice, source, path, library, derived_files, overridden_below)
        elif choice.name and not _is_missing(choice, library):
            yield Step(choice, source, derived_files)


def _is_missing(choice: Choice, library: Library) -> bool:
    """Returns whether an optional choice does not exist."""
    return choice.optional and library.problem(choice.group, choice.name) is not None


def _base_steps(
    choice: Choice,
    source: Path,
    path: Path,
    library: Library,
    derived_files: tuple[Path, ...],
    overriding: Overriding,
) -> Iterator[Step]:
    """Yields the steps of the recipe `choice` that the file `path` builds on.

    Choices of `overriding` replace a choice of that recipe if it has one in the same group.
    Otherwise they act after it.
    """
    base = None
    if library.problem("recipe", choice.name) is None:
        base = library.file("recipe", choice.name)
    with_this_file = (*derived_files, path.resolve())
    passed: dict[str, tuple[Path, Choice]] = {}
    # A user's file with the name of a shipped recipe builds on the shipped one.
    if base is not None and base != path.resolve():
        for group, replacement in overriding.items():
            if _has_choice(group, base, library, with_this_file):
                passed[group] = replacement
        chosen_by = None
        if choice.key:
            chosen_by = (source, choice.key)
        yield from file_steps(library.data(base), base, library, with_this_file, passed, chosen_by)
    else:
        yield Step(choice, source, derived_files)
    for group, (file, replacement_choice) in overriding.items():
        if group not in passed and replacement_choice.name:
            yield Step(replacement_choice, file, derived_files)


def _has_choice(group: str, path: Path, library: Library, derived_files: tuple[Path, ...]) -> bool:
    """Returns whether a file, or a file that it builds on, chooses from `group`."""
    if path in derived_files or len(derived_files) >= _MAX_BASES:
        return False
    choices = take_choices(dict(library.data(path)), library)
    if any(choice.group == group and not choice.free for choice in choices):
        return True
    for choice in choices:
        if choice.group == "recipe" and choice.name:
            base = library.file("recipe", choice.name)
            return base is not None and _has_choice(group, base, library, (*derived_files, path))
    return False


def _choices_as_keys(data: dict[str, Any]) -> list[Choice]:
    """Removes the choices written as keys, such as `precision: bf16_fp8`, and returns them."""
    choices: list[Choice] = []
    for group in GROUPS:
        value = data.get(group)
        if group in data and (value is None or isinstance(value, str) or group == "recipe"):
            choices.append(_choice(group, data.pop(group), group))
    # The full key of `precision` is trainer.plugins, nested or with a dot.
    trainer = data.get("trainer")
    if isinstance(trainer, dict) and isinstance(trainer.get("plugins"), str):
        trainer = dict(trainer)
        choices.append(_choice("precision", trainer.pop("plugins"), PLUGIN))
        data["trainer"] = trainer
    if isinstance(data.get(PLUGIN), str):
        choices.append(_choice("precision", data.pop(PLUGIN), PLUGIN))
    return choices


def _defaults_entries(entries: Any, library: Library) -> list[Choice]:
    """Returns the choices of Hydra's `defaults`."""
    if not isinstance(entries, list | None):
        raise ConfigError(f"defaults={entries}: expected a list, as in defaults: [llama_8b]")
    choices: list[Choice] = []
    for index, entry in enumerate(entries or ()):
        key = f"defaults.{index}"
        if isinstance(entry, dict):
            for group, name in entry.items():
                choices += _entry_choices(group, name, f"{key}.{group}", library)
        elif entry == SELF:
            choices.append(Choice(SELF, key=key))
        elif isinstance(entry, str) and "/" in entry.partition("@")[0].lstrip("/"):
            # A config by its path, such as /precision/bf16.
            path, separator, package = entry.partition("@")
            group, _, name = path.lstrip("/").rpartition("/")
            for choice in _entry_choices(f"{group}{separator}{package}", name, key, library):
                choices.append(replace(choice, free=True))
        else:
            choices += _entry_choices("recipe", entry, key, library)
    if sum(choice.group == SELF for choice in choices) > 1:
        raise ConfigError("defaults: duplicate _self_")
    return choices


def _entry_choices(entry: str, name: Any, key: str, library: Library) -> list[Choice]:
    """Returns the choices of one entry `override /group@package: name`. The name may be a list.

    Raises:
        ConfigError: A keyword or group is unknown, or the package belongs to another group.
    """
    *keywords, target = entry.split()
    for keyword in keywords:
        if keyword not in _KEYWORDS:
            raise ConfigError(
                f"defaults: {entry}: no such keyword {keyword!r}{suggest(keyword, _KEYWORDS)}"
            )
    group, separator, package = target.partition("@")
    has_package = separator != ""
    group = group.lstrip("/")
    _check_group(entry, group, library)
    if has_package:
        _check_entry_package(entry, group, package, name, library)
    optional = "optional" in keywords
    override = "override" in keywords
    if isinstance(name, list) and name and group != "recipe":
        if override:
            raise ConfigError(
                f"defaults: {entry}: an override takes one name; write 'override /{group}:"
                f" {name[-1]}'"
            )
        # A list of names: all of them act, in order.
        choices = [_choice(group, item, key) for item in name]
        return [replace(choice, free=True, optional=optional) for choice in choices]
    choice = _choice(group, name, key)
    is_free = has_package and not override
    return [replace(choice, optional=optional, override=override, free=is_free)]


def _check_group(entry: str, group: str, library: Library) -> None:
    """Raises ConfigError unless the group of an entry exists."""
    if group in library.groups():
        return
    if group.split("/")[0] == "hydra":
        raise ConfigError(
            f"defaults: {entry}: Hydra's own settings are not part of a recipe; pass them on the"
            " command line"
        )
    raise ConfigError(f"defaults: {group}: no such group{suggest(group, library.groups())}")


def _check_entry_package(entry: str, group: str, package: str, name: Any, library: Library) -> None:
    """Raises ConfigError unless the package of an entry is the group's own node."""
    home = library.package(group)
    relative = re.sub(r"^_global_\.|^_here_$", "", package)
    if relative != home and not (relative == "" and group == "recipe"):
        raise ConfigError(
            f"defaults: {entry}: packages are fixed, {group} is at {home}; write '/{group}: {name}'"
        )


def _choice(group: str, name: Any, key: str) -> Choice:
    """Returns a choice. Raises ConfigError if `name` is not a name or null."""
    if name == "???":
        raise ConfigError(f"{group}=???: needs a name in this file; a run does not ask for it")
    if name == "":
        raise ConfigError(f"{group}: needs the name of a preset")
    if not isinstance(name, str | None):
        raise ConfigError(f"{group}={name}: needs the name of a preset")
    return Choice(group, name or "", key)


# Files of tasks and of the user's groups.

_PACKAGE_COMMENT = re.compile(r"\s*#\s*@package\s+(\S+)\s*")


@dataclass(frozen=True)
class Part:
    """Keys that a file of a task or of a user's group sets.

    Attributes:
        values: Value by full key, in the schema's types.
        chosen: Its choices in other groups, name by group.
        package: Full key of the node that the file's keys are relative to. Empty for the recipe.
    """

    values: dict[str, Any]
    chosen: dict[str, str]
    package: str = ""

    def over(self, group: str, base: Mapping[str, Any]) -> Part:
        """Returns the part without values that would make a recipe larger.

        Args:
            group: The group of the part. Only tasks are filtered.
            base: Values of the recipe, by full key.
        """
        if group not in MERGING_GROUPS:
            return self
        values: dict[str, Any] = {}
        for key, value in self.values.items():
            if not keeps_recipe_value(key, value, base[key]):
                values[key] = value
        return replace(self, values=values)

    @property
    def data(self) -> dict[str, Any]:
        """The values as nested plain data."""
        plain: dict[str, Any] = {}
        for key, value in self.values.items():
            plain[key] = list(value) if isinstance(value, tuple) else value
        return nested(plain)


def read_part(path: Path, group: str, library: Library) -> Part:
    """Reads a file of a task or of a user's group.

    Raises:
        ConfigError: A key is unknown, a value is invalid, or the package is not a node.
    """
    data = dict(library.data(path))
    chosen = _take_overrides(data, group, library)
    package = package_of(path, group) or library.package(group)
    if package == "_global_":
        return Part(settings(full_names(data)), chosen)
    # `_global_.optim` and `optim` are the same package.
    node = full(package.removeprefix("_global_."))
    if not any(key.startswith(f"{node}.") for key in fields()):
        raise ConfigError(
            f"{package}: not a node of a recipe; start the file with '# @package _global_' for keys"
            " of the whole recipe"
        )
    return Part(settings(nested({node: data})), chosen, node)


def package_of(path: Path, group: str) -> str | None:
    """Returns the package in a comment at the top of a file, or None."""
    for line in read_text(path).splitlines():
        match = _PACKAGE_COMMENT.fullmatch(line)
        if match is not None:
            # Hydra's placeholders for group and file name.
            package = match[1].replace("_group_", group.replace("/", "."))
            return package.replace("_name_", path.stem)
        # The comment must come before the first key.
        if line.strip() and not line.lstrip().startswith("#"):
            break
    return None


def check_package(path: Path, group: str, library: Library) -> None:
    """Raises ConfigError if a file of a shipped group names another package."""
    package, home = package_of(path, group), library.package(group)
    if package is not None and package.removeprefix("_global_.") != home:
        raise ConfigError(
            f"# @package {package}: packages are fixed, {group} is at {home}; remove the line"
        )


def _take_overrides(data: dict[str, Any], group: str, library: Library) -> dict[str, str]:
    """Removes `defaults` from `data` and returns its choices, name by group.

    They must be overrides, because every recipe has a choice in each shipped group already.
    """
    choices = take_choices({"defaults": data.pop("defaults", None)}, library)
    chosen: dict[str, str] = {}
    bases: list[str] = []
    repeated: list[str] = []
    own_groups: list[str] = []
    for choice in choices:
        if choice.group == SELF:
            continue
        if not choice.override:
            repeated.append(
                f"defaults: {choice.group}: every recipe already has this choice; write 'override"
                f" /{choice.group}: {choice.name}'"
            )
            # To Hydra, a name that is no recipe is a file of the same group.
            if choice.group == "recipe" and library.problem("recipe", choice.name):
                bases.append(
                    f"defaults: {choice.name}: a file of {group}/ cannot have a base; write its"
                    " keys here"
                )
        if library.merging_group(choice.group) and choice.group not in MERGING_GROUPS:
            own_groups.append(
                f"defaults: {choice.group}: a file can choose only in shipped groups; remove it and"
                f" pass {choice.group}={choice.name} on the command line"
            )
        if choice.override and choice.name and not _is_missing(choice, library):
            chosen[choice.group] = choice.name
    refuse_if(own_groups)
    refuse_if(bases)
    refuse_if(repeated)
    return chosen
