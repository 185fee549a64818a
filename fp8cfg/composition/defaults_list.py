"""Defaults list: what a recipe's file builds on, in Hydra's order, flattened into the steps that make the recipe.

    defaults:                            # the later one wins; without _self_ the file's own values come last
      - llama_8b                         # a recipe, or another file of recipe/
      - /precision: bf16_fp8             # a choice of a group, at its home
      - optional /optim: mine            # if there is one
      - _self_                           # the values of this file
      - override /data: tiny             # in the place of what stands in this list, or in that of a recipe that it builds on

`recipe: NAME`, `precision: NAME`, `data: NAME` and `task: NAME` beside it are entries too, just before `_self_`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8cfg.composition.config_groups import GROUPS, Library
from fp8cfg.config.errors import ConfigError, suggest
from fp8cfg.config.files import default_recipe
from fp8cfg.config.key_names import PLUGIN

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
