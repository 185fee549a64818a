"""Files of config groups of one's own: keys of a part of the recipe, merged over it, and choices of other groups to go with them.

    # @package _global_                  # experiment/small.yaml: experiment=small, or +experiment=small as Hydra has it
    defaults:
      - override /precision: bf16_fp8
    trainer: {max_steps: 50}

A precision or data preset is a whole node, which it replaces; these say a part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8cfg.composition.config_groups import PARTS, Library
from fp8cfg.composition.defaults_list import taken
from fp8cfg.composition.flatten import nested, settings
from fp8cfg.composition.yaml_recipe import full_names
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.files import read_text
from fp8cfg.config.key_names import full
from fp8cfg.config.recipe import fields
from fp8cfg.config.tasks import stays

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
            self, values={k: v for k, v in self.values.items() if not stays(k, v, base[k])}
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
