"""Config groups: recipes, precision presets and data presets that can be chosen by name, shipped or from a given folder, and every
other group that the folder has.

A group of one's own is a folder of files with keys of the recipe: those of the node with its path (optim/, trainer/strategy/), or
of the one that the file names in its first line, as in Hydra: `# @package _global_` is the recipe itself.

A library lists each folder and reads each file once, however many words and files name it; what is composed of them is
resolve.py's. Make another to see what has changed on disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fp8cfg.config import foreign_names, presets, recipe_registry
from fp8cfg.config.data import Data
from fp8cfg.config.errors import ConfigError, suggest
from fp8cfg.config.files import CONF, NAME, read_yaml
from fp8cfg.config.key_names import PLUGIN
from fp8cfg.config.node import Node
from fp8cfg.config.precision import Precision

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
