"""Recipe YAML: the presets that a recipe file chooses and the values that it sets; and writing a recipe as YAML.

    recipe: llama_8b          # what it builds on; Hydra's `defaults: [llama_8b]` says the same
    precision: bf16_fp8       # presets, by the names that the command line knows
    fp8: {margin: 1}          # values, by short or full names
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8cfg.composition.flatten import deep_merge, listed, nested
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.files import dump_yaml
from fp8cfg.config.key_names import PLUGIN, full
from fp8cfg.config.recipe import Recipe

_SCHEMA_LINE = "# A whole recipe of fp8cfg, as composed.\n"


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML text; `from_yaml` reads it back equal."""
    return _SCHEMA_LINE + dump_yaml(listed(recipe))


@dataclass(frozen=True)
class Choice:
    """The preset that a file chooses for a group, and the key that names it, as `yaml_lines.key_lines` has it."""

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
        tree = nested({full(key): value})
        twice = _common_leaf(out, tree)
        if twice:
            raise ConfigError(f"{twice}: given twice, under its short and its full name")
        out = deep_merge(out, tree)
    return out


def _common_leaf(a: Any, b: Any, at: str = "") -> str | None:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return at
    return next((found for k in a if k in b and (found := _common_leaf(a[k], b[k], f"{at}.{k}".lstrip(".")))), None)
