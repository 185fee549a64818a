"""The YAML door: a recipe as deltas on another one, or whole; and a recipe written out.

    recipe: llama_8b          # what it builds on; Hydra's `defaults: [llama_8b]` says the same
    precision: bf16_fp8       # presets, by the names that the command line knows
    fp8: {margin: 1}          # values, by short or full names
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.files import default_recipe, dump_yaml, parse_yaml, read_yaml
from fp8cfg.config.key_names import PLUGIN, full
from fp8cfg.config.node import Node
from fp8cfg.config.recipe import Recipe

if TYPE_CHECKING:
    from fp8cfg.composition.library import Library

_MAX_BASES = 16
_SCHEMA_LINE = "# A whole recipe of fp8cfg, as composed.\n"


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML text; `from_yaml` reads it back equal."""
    return _SCHEMA_LINE + dump_yaml(listed(recipe))


def from_yaml(text_or_path: str | Path, config_dir: str | Path | None = None) -> Recipe:
    """The checked Recipe of a YAML file (a Path) or of YAML text (a str). Raises ConfigError with every problem."""
    from fp8cfg.composition.library import Library

    library = Library(Path(config_dir) if config_dir else None)
    if isinstance(text_or_path, Path):
        recipe = recipe_from(text_or_path, library)
    else:
        recipe = _build(parse_yaml(text_or_path, "YAML"), Path("YAML"), library)
    recipe.check()
    return recipe


def recipe_from(path: Path, library: Library, above: tuple[Path, ...] = ()) -> Recipe:
    """The recipe in the file `path`, not yet checked as a whole; `above` are the files that build on it."""
    from fp8cfg.composition.library import in_file

    data = read_yaml(path)
    return in_file(path, lambda: _build(data, path, library, above))  # type: ignore[no-any-return]


def listed(node: Node) -> dict[str, Any]:
    """`node` as plain data: mappings, lists (for tuples) and scalars."""
    def lists(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: lists(v) for k, v in value.items()}
        return [lists(v) for v in value] if isinstance(value, (list, tuple)) else value
    plain: dict[str, Any] = lists(node.model_dump())
    return plain


def deep_merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it; mappings merge, everything else replaces."""
    out = dict(base)
    for key, value in changes.items():
        under = out.get(key)
        out[key] = deep_merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return out


def _build(data: dict[str, Any], path: Path, library: Library, above: tuple[Path, ...] = ()) -> Recipe:
    data = dict(data)
    chosen = {group: choice.name for group, choice in choices_in(data).items()}
    problems = [p for group, name in chosen.items() if (p := library.problem(group, name))]
    if problems:  # all at once: what is wrong with the values does not depend on the recipe that they change
        try:
            Recipe(**deep_merge(listed(Recipe()), full_names(data)))
        except ConfigError as e:
            problems += e.problems
    refuse_if(problems)
    if path in above or len(above) >= _MAX_BASES:
        raise ConfigError("recipe: recipes build on one another in a circle")
    node = listed(library.base(chosen.get("recipe") or default_recipe(), path, above))
    for group in ("precision", "data"):
        if group in chosen:
            node = deep_merge(node, _at(full(group), library.node(group, chosen[group])))
    return Recipe(**deep_merge(node, full_names(data)))


@dataclass(frozen=True)
class Choice:
    """The preset that a file chooses for a group, and the key that names it, as `lines.key_lines` has it."""

    name: str
    key: str


def choices_in(data: dict[str, Any]) -> dict[str, Choice]:
    """Take the preset names out of `data`: `recipe`, `precision` and `data` given as names, and Hydra's `defaults`."""
    found = _defaults(data.pop("defaults", None))
    for group in ("recipe", "precision", "data"):
        if group in data and (data[group] is None or isinstance(data[group], str) or group == "recipe"):
            found.append((group, data.pop(group), group))
    if isinstance(data.get("trainer"), dict) and isinstance(data["trainer"].get("plugins"), str):
        data["trainer"] = dict(data["trainer"])
        found.append(("precision", data["trainer"].pop("plugins"), PLUGIN))
    if isinstance(data.get(PLUGIN), str):
        found.append(("precision", data.pop(PLUGIN), PLUGIN))
    chosen: dict[str, Choice] = {}
    for group, name, key in found:
        if name == "" or not isinstance(name, str | None):
            raise ConfigError(f"{group}{'' if name == '' else f'={name}'}: needs the name of a preset")
        if name and chosen.setdefault(group, Choice(name, key)).name != name:
            raise ConfigError(f"{group}: given twice, as {chosen[group].name} and as {name}")
    return chosen


def _defaults(entries: Any) -> list[tuple[str, Any, str]]:
    """Group, name and key of each entry of Hydra's `defaults`."""
    if not isinstance(entries, list | None):
        raise ConfigError(f"defaults={entries}: expected a list, as in defaults: [llama_8b]")
    found: list[tuple[str, Any, str]] = []
    for index, entry in enumerate(entries or ()):
        key = f"defaults.{index}"
        if not isinstance(entry, dict):
            found += [("recipe", entry, key)] if entry != "_self_" else []
        for group, name in entry.items() if isinstance(entry, dict) else ():
            at = f"{key}.{group}"
            group = group.removeprefix("override ").lstrip("/").partition("@")[0]
            if group not in ("recipe", "precision", "data"):
                raise ConfigError(f"defaults: {group}: no such group; choose from recipe, precision, data")
            found.append((group, name, at))
    return found


def full_names(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with short names at its top replaced by full ones. Raises ConfigError where one key is given both ways."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        tree = _at(full(key), value)
        twice = _common_leaf(out, tree)
        if twice:
            raise ConfigError(f"{twice}: given twice, under its short and its full name")
        out = deep_merge(out, tree)
    return out


def _at(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def _common_leaf(a: Any, b: Any, at: str = "") -> str | None:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return at
    return next((found for k in a if k in b and (found := _common_leaf(a[k], b[k], f"{at}.{k}".lstrip(".")))), None)
