"""Config groups: recipes, precision presets and data presets that can be chosen by name, shipped or from a given folder, and every
other group that the folder has.

A group of one's own is a folder of files with keys of the recipe: those of the node with its path (optim/, trainer/strategy/), or
of the one that the file names in its first line, as in Hydra: `# @package _global_` is the recipe itself.

A library lists each folder and reads each file once, however many words and files name it; what is composed of them is
merge.py's. Make another to see what has changed on disk.
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
from fp8cfg.schema.errors import ConfigError, refuse_if, suggest
from fp8cfg.schema.keys import PLUGIN, full
from fp8cfg.schema.node import Node
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.recipe import fields
from fp8cfg.schema.recipe_registry import keeps_recipe_value
from fp8cfg.schema.safe_files import CONF, NAME, default_recipe, read_text, read_yaml

LEAVES: dict[str, tuple[type[Node], str]] = {
    "precision": (Precision, PLUGIN),
    "data": (Data, "data"),
}
"""Groups whose choices are one node: the node's class, and its home in the recipe."""
PARTS = ("task",)
"""Groups whose choices are some keys of the whole recipe, merged over it, as those of a group of one's own can be."""
GROUPS = ("recipe", *LEAVES, *PARTS)
"""Groups of which there are shipped choices."""
_LONG = 1000
"""Letters of a path that is printed whole."""
_DEEP = 3
"""Folders, one in another, of which the path of a group is made."""


class Library:
    """The choices of each group. Raises ConfigError where `folder` is not a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None and not os.path.isdir(folder):
            named = name if len(name := str(folder)) <= _LONG else f"{name[:40]}..."
            raise ConfigError(f"--config-dir {named}: no such folder")
        self.folder = folder.resolve() if folder else None
        self._groups: list[str] | None = None
        self._choices: dict[str, list[str]] = {}
        self._data: dict[Path, dict[str, Any]] = {}

    def groups(self) -> list[str]:
        """Every group: those with shipped choices, and then those of the folder alone, by its path."""
        if self._groups is None:
            found = (
                {
                    p.parent
                    for n in range(_DEEP)
                    for p in self.folder.glob("*/" * (n + 1) + "*.yaml")
                }
                if self.folder
                else set()
            )
            paths = (p.relative_to(self.folder) for p in sorted(found) if self.folder)
            own = (
                path.as_posix()
                for path in paths
                if all(NAME.fullmatch(part) for part in path.parts)
            )
            self._groups = [
                *GROUPS,
                *(group for group in own if group.split("/")[0] not in (*GROUPS, "hydra")),
            ]
        return self._groups

    def own(self, key: str) -> str | None:
        """The group of parts that `key` names, shipped or the folder's, with '/' or '.' in it; None where it is none."""
        group = key.replace(".", "/")
        return group if group in PARTS or (group not in GROUPS and group in self.groups()) else None

    def home(self, group: str) -> str:
        """The key of the node that choices of `group` are of; of the whole recipe _global_."""
        return (
            LEAVES[group][1]
            if group in LEAVES
            else "_global_"
            if group in ("recipe", *PARTS)
            else group.replace("/", ".")
        )

    def choices(self, group: str) -> list[str]:
        """The names that `group` offers, sorted; file stems and recipe functions."""
        if group not in self._choices:
            files = (p for root in self._roots() for p in (root / group).glob("*.yaml"))
            names = {p.stem for p in files if NAME.fullmatch(p.stem) and p.is_file()}
            self._choices[group] = sorted(
                names | set(recipe_registry.recipes() if group == "recipe" else ())
            )
        return self._choices[group]

    def problem(self, group: str, name: str) -> str | None:
        """The line that refuses `group=name`, or None where it can be chosen."""
        stem, known = self.stem(group, name), self.choices(group)
        if stem in known:
            return None
        if not name:
            return f"{group}=: needs the name of a choice; fp8cfg list {group} has them"
        if name.startswith("$"):
            return f"{group}={name}: is a variable, which no shell has replaced; write its value"
        file = name if name.endswith((".yaml", ".yml", ".json")) else f"{name}.yaml"
        if group == "recipe" and os.path.isfile(file):
            return f"recipe={name}: no such recipe; a file stands by itself: fp8cfg {file}"
        if not NAME.fullmatch(stem):
            near = suggest(name.rpartition("/")[2].replace(".", "").replace("-", "_"), known)
            return (
                f"{group}={name}: a choice is a name of letters, digits and '_', not a path" + near
            )
        spellings = [*known, *(presets.FUNCTIONS if group == "precision" else ())]
        refusal = (
            f"{group}={name}: no such {group if group in ('recipe', *PARTS) else group + ' preset'}"
        )
        sized = f"_{name}" if group == "recipe" else "."  # 8b, of every family
        family = [
            choice for choice in known if choice.startswith(f"{name}_") or choice.endswith(sized)
        ]
        if ours := foreign_names.meant(group, name):
            return f"{refusal}; did you mean {ours!r}?"
        if len(family) > 1:
            return f"{refusal}; did you mean one of {', '.join(family)}?"
        return refusal + (suggest(name, spellings) or f"; fp8cfg list {group} has them")

    def stem(self, group: str, name: str) -> str:
        """The choice that `name` spells: functions of NeMo and hyphens are understood for precision."""
        return name if group != "precision" or name in self.choices(group) else presets.stem(name)

    def file(self, group: str, stem: str) -> Path | None:
        """The file of a choice, one's own before a shipped one; None where there is none."""
        for root in self._roots():
            path = root / group / f"{stem}.yaml"
            if NAME.fullmatch(stem) and path.is_file():
                if not path.resolve().is_relative_to(root.resolve()):
                    raise ConfigError(f"{group}={stem}: {path} is a link that leaves {root}")
                return path.resolve()
        return None

    def data(self, path: Path) -> dict[str, Any]:
        """The keys and values of the file `path`, which are not to be changed. Raises ConfigError as `read_yaml` does."""
        if path not in self._data:
            self._data[path] = read_yaml(path)
        return self._data[path]

    def _roots(self) -> list[Path]:
        return [*([self.folder] if self.folder else []), CONF]


SELF = "_self_"
_MAX_BASES = 16
_KEYWORDS = ("override", "optional")


@dataclass(frozen=True)
class Choice:
    """An entry: the choice `name` of `group`, or the values of the file itself where that is `_self_`; `key` is the key that names
    it, as `yaml_lines.key_lines` has it. One that is `standard` is said by nobody; one that is `free`, of a list of choices, by its
    path or with its package, stands beside others of its group, and no override reaches it."""

    group: str
    name: str = ""
    key: str = ""
    optional: bool = False
    override: bool = False
    standard: bool = False
    free: bool = False


@dataclass(frozen=True)
class Step:
    """A recipe function, a preset, or the own values (`values`) of the file `path`, which says `choice`; `above` are the files that
    build on that one, and `by` the file and the key that chose it."""

    choice: Choice
    path: Path
    above: tuple[Path, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    by: tuple[Path, str] | None = None


def taken(data: dict[str, Any], library: Library) -> list[Choice]:
    """Take the entries out of `data`, in their order, `_self_` among them. Raises ConfigError for what is no entry, and for two
    choices of one group."""
    listed = _entries(data.pop("defaults", None), library)
    named = list(_named(data))
    at = next((i for i, entry in enumerate(listed) if entry.group == SELF), len(listed))
    found = [
        *listed[:at],
        *(n for n in named if not any((n.group, n.name) == (o.group, o.name) for o in listed)),
        *listed[at:],
    ]
    if at == len(listed):
        found.append(Choice(SELF))
    once: dict[str, str] = {}
    for entry in found:
        if entry.group == SELF or entry.override or entry.free or not entry.name:
            continue
        if once.setdefault(entry.group, entry.name) != entry.name:
            raise ConfigError(
                f"{entry.group}: given twice, as {once[entry.group]} and as {entry.name}; to"
                f" replace one write 'override /{entry.group}: {entry.name}'"
            )
    return found


def steps(
    data: Mapping[str, Any],
    path: Path,
    library: Library,
    above: tuple[Path, ...] = (),
    overridden: Mapping[str, tuple[Path, Choice]] | None = None,
    by: tuple[Path, str] | None = None,
) -> Iterator[Step]:
    """The steps of the recipe file `path` with the content `data`, those of the recipes that it builds on first. `overridden` are
    choices, by group, of the files `above`. Raises ConfigError for an entry that cannot be, and for files in a circle.
    """
    values = dict(data)
    found = taken(values, library)
    if path in above or len(above) >= _MAX_BASES:
        raise ConfigError("recipe: recipes build on one another in a circle")
    instead = {c.group: (path, c) for c in found if c.override} | dict(overridden or {})
    plain = [(path, c) for c in found if not c.override]
    if not any(c.group == "recipe" and c.name for _, c in plain):
        plain = [
            (path, Choice("recipe", default_recipe(), standard=True)),
            *(s for s in plain if s[1].group != "recipe"),
        ]
    standing = {c.group for _, c in plain if not c.free}
    for said in plain:
        where, choice = said if said[1].free else instead.get(said[1].group, said)
        if choice.group == SELF:
            yield Step(choice, path, above, values, by)
        elif choice.group == "recipe":
            yield from _based(
                choice,
                where,
                path,
                library,
                above,
                {g: s for g, s in instead.items() if g not in standing},
            )
        elif choice.name and not (choice.optional and library.problem(choice.group, choice.name)):
            yield Step(choice, where, above)


def _based(
    choice: Choice,
    where: Path,
    path: Path,
    library: Library,
    above: tuple[Path, ...],
    instead: Mapping[str, tuple[Path, Choice]],
) -> Iterator[Step]:
    """The steps of the recipe that the file `path` builds on; `instead` act in it where it has such a group, and else after it. A
    file of a shipped recipe's name builds on that recipe."""
    base = None if library.problem("recipe", choice.name) else library.file("recipe", choice.name)
    here = (*above, path.resolve())
    passed = dict[str, tuple[Path, Choice]]()
    if base and base != path.resolve():
        passed = {
            group: said for group, said in instead.items() if _stands(group, base, library, here)
        }
        yield from steps(
            library.data(base),
            base,
            library,
            here,
            passed,
            (where, choice.key) if choice.key else None,
        )
    else:
        yield Step(choice, where, above)
    yield from (
        Step(c, of, above) for group, (of, c) in instead.items() if group not in passed and c.name
    )


def _stands(group: str, path: Path, library: Library, above: tuple[Path, ...]) -> bool:
    """Whether the file `path`, or one that it builds on, has an entry of `group`."""
    if path in above or len(above) >= _MAX_BASES:
        return False
    found = taken(dict(library.data(path)), library)
    base = next(
        (library.file("recipe", c.name) for c in found if c.group == "recipe" and c.name), None
    )
    return any(c.group == group and not c.free for c in found) or bool(
        base and _stands(group, base, library, (*above, path))
    )


def _named(data: dict[str, Any]) -> Iterator[Choice]:
    """Take the presets out of `data` that are named in the place of keys."""
    for group in GROUPS:
        if group in data and (
            data[group] is None or isinstance(data[group], str) or group == "recipe"
        ):
            yield from _choice(group, data.pop(group), group)
    if isinstance(data.get("trainer"), dict) and isinstance(data["trainer"].get("plugins"), str):
        data["trainer"] = dict(data["trainer"])
        yield from _choice("precision", data["trainer"].pop("plugins"), PLUGIN)
    if isinstance(data.get(PLUGIN), str):
        yield from _choice("precision", data.pop(PLUGIN), PLUGIN)


def _entries(entries: Any, library: Library) -> list[Choice]:
    """The entries of Hydra's `defaults`."""
    if not isinstance(entries, list | None):
        raise ConfigError(f"defaults={entries}: expected a list, as in defaults: [llama_8b]")
    found: list[Choice] = []
    for index, entry in enumerate(entries or ()):
        key = f"defaults.{index}"
        if isinstance(entry, dict):
            for said, name in entry.items():
                found += _grouped(said, name, f"{key}.{said}", library)
        elif entry == SELF:
            found.append(Choice(SELF, key=key))
        elif isinstance(entry, str) and "/" in entry.partition("@")[0].lstrip(
            "/"
        ):  # a config by its path: /precision/bf16
            path, at, package = entry.partition("@")
            group, _, name = path.lstrip("/").rpartition("/")
            found += [
                replace(c, free=True) for c in _grouped(f"{group}{at}{package}", name, key, library)
            ]
        else:
            found += _grouped("recipe", entry, key, library)
    if sum(c.group == SELF for c in found) > 1:
        raise ConfigError("defaults: _self_ stands twice")
    return found


def _grouped(said: str, name: Any, key: str, library: Library) -> list[Choice]:
    """The choices of an entry `said: name`. Raises ConfigError for what is not taken: a package that is not the group's home."""
    *keywords, group = said.split()
    if wrong := next((word for word in keywords if word not in _KEYWORDS), None):
        raise ConfigError(f"defaults: {said}: no such keyword {wrong!r}{suggest(wrong, _KEYWORDS)}")
    group, at, package = group.partition("@")
    group = group.lstrip("/")
    if group not in library.groups():
        if group.split("/")[0] == "hydra":
            raise ConfigError(
                f"defaults: {said}: settings of Hydra itself are not part of a recipe; the command"
                " line takes them"
            )
        raise ConfigError(f"defaults: {group}: no such group{suggest(group, library.groups())}")
    home = library.home(group)
    if at and re.sub(r"^_global_\.|^_here_$", "", package) not in (
        home,
        "" if group == "recipe" else home,
    ):
        raise ConfigError(
            f"defaults: {said}: packages are fixed, {group} stands at {home}; write '/{group}:"
            f" {name}'"
        )
    if isinstance(name, list) and name and group != "recipe":
        listed = [c for one in name for c in _choice(group, one, key)]
        if "override" in keywords:
            raise ConfigError(
                f"defaults: {said}: one choice replaces another; write 'override /{group}:"
                f" {name[-1]}'"
            )
        return [replace(c, free=True, optional="optional" in keywords) for c in listed]
    optional, override = "optional" in keywords, "override" in keywords
    return [
        replace(c, optional=optional, override=override, free=bool(at) and not override)
        for c in _choice(group, name, key)
    ]


def _choice(group: str, name: Any, key: str) -> Sequence[Choice]:
    if name == "???":
        raise ConfigError(
            f"{group}=???: needs the name of a choice in this file; a run asks for none"
        )
    if name == "" or not isinstance(name, str | None):
        raise ConfigError(f"{group}{'' if name == '' else f'={name}'}: needs the name of a preset")
    return [Choice(group, name or "", key)]


_HEADER = re.compile(r"\s*#\s*@package\s+(\S+)\s*")


@dataclass(frozen=True)
class Part:
    """The values of a file, as the schema holds them, by full keys; the choices that it makes in other groups; and the key of the
    node that stands before each key as the file has it."""

    values: dict[str, Any]
    chosen: dict[str, str]
    package: str = ""

    def over(self, group: str, base: Mapping[str, Any]) -> Part:
        """What is merged over a recipe with the values `base`, by full keys: of a task what does not make it larger."""
        if group not in PARTS:
            return self
        return replace(
            self,
            values={k: v for k, v in self.values.items() if not keeps_recipe_value(k, v, base[k])},
        )

    @property
    def data(self) -> dict[str, Any]:
        """The values as nested plain data."""
        return nested(
            {key: list(v) if isinstance(v, tuple) else v for key, v in self.values.items()}
        )


def part(path: Path, group: str, library: Library) -> Part:
    """What the file `path` of `group`, one of one's own, says. Raises ConfigError for keys that are none, and for a package that is
    no node."""
    data = dict(library.data(path))
    chosen = _overrides(data, group, library)
    package = package_of(path, group) or library.home(group)
    at = "" if package == "_global_" else full(package.removeprefix("_global_."))
    if at and (at not in fields() or not _has_keys(at)):
        raise ConfigError(
            f"{package}: no node of a recipe; begin the file with '# @package _global_' for keys of"
            " the whole recipe"
        )
    values = settings(nested({at: data}) if at else full_names(data))
    return Part(values, chosen, at)


def package_of(path: Path, group: str) -> str | None:
    """The package that the comments at the top of the file `path` name, written out; None where they name none."""
    for line in read_text(path).splitlines():
        if found := _HEADER.fullmatch(line):
            return found[1].replace("_group_", group.replace("/", ".")).replace("_name_", path.stem)
        if line.strip() and not line.lstrip().startswith("#"):
            break
    return None


def refuse_package(path: Path, group: str, library: Library) -> None:
    """Raise ConfigError where the file `path` of a shipped `group` names another package than the home of that group."""
    package, home = package_of(path, group), library.home(group)
    if package is not None and package.removeprefix("_global_.") != home:
        raise ConfigError(
            f"# @package {package}: packages are fixed, {group} stands at {home}; drop the line"
        )


def _overrides(data: dict[str, Any], group: str, library: Library) -> dict[str, str]:
    """Take `defaults` out of `data`: choices of other groups, which stand in the recipe already."""
    named = {"defaults": data.pop("defaults", None)}
    found = taken(named, library)
    plain = [c for c in found if c.group != "_self_" and not c.override]
    others = [
        c.name for c in plain if c.group == "recipe" and library.problem("recipe", c.name)
    ]  # to Hydra of the file's group
    refuse_if(
        [
            f"defaults: {name}: a file of {group}/ builds on no other; write its keys here"
            for name in others
        ]
    )
    refuse_if(
        [
            f"defaults: {c.group}: stands in every recipe already; write 'override /{c.group}:"
            f" {c.name}'"
            for c in plain
        ]
    )
    own = [c for c in found if library.own(c.group) and c.group not in PARTS]
    refuse_if(
        [f"defaults: {c.group}: a group of your own is a word: {c.group}={c.name}" for c in own]
    )
    return {
        c.group: c.name
        for c in found
        if c.override and c.name and not (c.optional and library.problem(c.group, c.name))
    }


def _has_keys(key: str) -> bool:
    return any(name.startswith(f"{key}.") for name in fields())
