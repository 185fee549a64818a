"""What can be chosen by name: recipes, precision presets and data presets, shipped and from a folder of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8cfg.composition.yaml_recipe import listed, recipe_from
from fp8cfg.config import recipe_registry
from fp8cfg.config.errors import ConfigError, suggest
from fp8cfg.config.files import CONF, NAME, read_yaml
from fp8cfg.config.key_names import PLUGIN
from fp8cfg.config.node import Node
from fp8cfg.config.precision import Precision
from fp8cfg.config.presets import FUNCTIONS
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.training_nodes import Data

LEAVES: dict[str, tuple[type[Node], str]] = {"precision": (Precision, PLUGIN), "data": (Data, "data")}
"""Groups whose choices are one node: the node's class, and its home in the recipe."""
GROUPS = ("recipe", *LEAVES)


class Library:
    """The choices of each group. Raises ConfigError where `folder` is not a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: no such folder")
        self.folder = folder.resolve() if folder else None

    def choices(self, group: str) -> list[str]:
        """The names that `group` offers, sorted; file stems and recipe functions."""
        names = {p.stem for root in self._roots() for p in (root / group).glob("*.yaml") if NAME.fullmatch(p.stem)}
        return sorted(names | set(recipe_registry.recipes() if group == "recipe" else ()))

    def problem(self, group: str, name: str) -> str | None:
        """The line that refuses `group=name`, or None where it can be chosen."""
        if self.stem(group, name) in self.choices(group):
            return None
        if not NAME.fullmatch(self.stem(group, name)):
            refusal = f"{group}={name}: a choice is a name of letters, digits and '_', not a path"
            return refusal + suggest(name, self.choices(group))
        spellings = [*self.choices(group), *(FUNCTIONS if group == "precision" else ())]
        return f"{group}={name}: no such {'recipe' if group == 'recipe' else group + ' preset'}" + suggest(name, spellings)

    def stem(self, group: str, name: str) -> str:
        """The choice that `name` spells: functions of NeMo and hyphens are understood for precision."""
        if group != "precision" or name in self.choices(group):
            return name
        spelled = name.replace("-", "_").lower()
        return FUNCTIONS.get(spelled, spelled)

    def node(self, group: str, name: str) -> dict[str, Any]:
        """The complete node of `group=name` as plain data. Raises ConfigError, naming the file where one is at fault."""
        problem = self.problem(group, name)
        if problem:
            raise ConfigError(problem)
        path = self.file(group, self.stem(group, name))
        if group == "recipe":
            return listed(recipe_from(path, self) if path else recipe_registry.named(name))
        assert path is not None  # problem() has seen it
        return listed(in_file(path, lambda: LEAVES[group][0](**read_yaml(path))))

    def base(self, name: str, inside: Path, above: tuple[Path, ...]) -> Recipe:
        """The recipe `name` that the file `inside` builds on; a file of the same name builds on the shipped recipe."""
        path = self.file("recipe", name)
        if path is None or path == inside.resolve():
            return recipe_registry.named(name)
        return recipe_from(path, self, (*above, inside.resolve()))

    def _roots(self) -> list[Path]:
        return [*([self.folder] if self.folder else []), CONF]

    def file(self, group: str, stem: str) -> Path | None:
        """The file of a choice, one's own before a shipped one; None where there is none."""
        for root in self._roots():
            path = root / group / f"{stem}.yaml"
            if NAME.fullmatch(stem) and path.is_file():
                if not path.resolve().is_relative_to(root.resolve()):
                    raise ConfigError(f"{group}={stem}: {path} is a link that leaves {root}")
                return path.resolve()
        return None


def in_file(path: Path, build: Any) -> Any:
    """`build()`, with the file's name before each line of a ConfigError."""
    try:
        return build()
    except ConfigError as e:
        raise ConfigError([p if p.startswith(str(path)) else f"{path}: {p}" for p in e.problems]) from None
