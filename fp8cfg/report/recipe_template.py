"""Recipe template: a YAML file with all keys of a recipe and a line of help on each, to edit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.planning.violations import violations
from fp8cfg.report.recipe_export import deltas, one_line
from fp8cfg.schema import __version__
from fp8cfg.schema.keys import PLUGIN, full, short
from fp8cfg.schema.recipe import Recipe, fields, short_keys
from fp8cfg.schema.safe_files import dump_value
from fp8cfg.schema.tables import cut, wrapped

WIDTH = 110
"""Columns of the file. A longer help text is cut."""
HELP_COLUMN = 40
"""Where help texts start, unless the value is longer."""
_SENTENCE_END = re.compile(r"(?<=\.)\s")


def commented_yaml(recipe: Recipe, named: Mapping[str, str], file: str) -> str:
    """Returns YAML that composes `recipe`, with all other keys as comments.

    A commented key has its current value. Keys without effect under the recipe are only listed.

    Args:
        recipe: The recipe.
        named: The chosen recipe and preset by group, as far as shipped ones were chosen.
        file: Name of the file, for the commands in its head.
    """
    # Only precision is written as a preset: the file shows the keys of all other groups.
    differences = deltas(recipe, named, ("precision",))
    choices = {"recipe": differences.recipe, **differences.presets}
    idle = _idle_keys(recipe) - differences.values.keys()

    lines = _head(file)
    for group, name in choices.items():
        lines.append(_with_help(f"{group}: {name}", f"fp8cfg list {group} has the names"))
    if differences.values:
        lines.append("")
        lines += [
            _line(key, value, differences.presets) for key, value in differences.values.items()
        ]

    sections: dict[str, list[str]] = {}
    for key, value in flat(recipe).items():
        if key not in differences.values and key not in idle:
            section = sections.setdefault(_section(key), [])
            section.append("#" + _line(key, value, differences.presets))
    for name, keys in sections.items():
        lines += ["", f"# {_heading(name)}", *keys]
    if idle:
        names = ", ".join(short(key) for key in flat(recipe) if key in idle)
        text = "Keys without effect in this recipe. fp8cfg explain KEY has the reason:"
        lines += ["", f"# {text}", wrapped(names, "#   ", "#   ")]
    return "\n".join(lines) + "\n"


def _head(file: str) -> list[str]:
    """Returns the comment at the top."""
    commands = {
        f"fp8cfg check {file}": "validate it",
        f"fp8cfg {file}": "train it",
        "fp8cfg explain fp8.margin": "all about a key",
    }
    width = max(map(len, commands))
    return [
        f"# {file}: a recipe for fp8cfg {__version__}.",
        "#",
        *(f"#   {command:{width}}  {about}" for command, about in commands.items()),
        "#",
        "# To set a key, remove the # in front of it. Its value here is the one that it has now.",
        "",
    ]


def _idle_keys(recipe: Recipe) -> set[str]:
    """Returns full names of the keys without effect under this recipe, at their current values."""
    # With all keys marked as written, the rules report each key without effect.
    refused = violations(recipe, written=short_keys())
    return {full(violation.setting.partition("=")[0]) for violation in refused} & fields().keys()


def _line(key: str, value: Any, presets: Mapping[str, str]) -> str:
    """Returns the line of a key with its help. `key` is the full name."""
    name = short(key)
    # `precision` is the name of the preset in this file, so keys in it need their full names.
    if name.startswith("precision.") and "precision" in presets:
        name = key
    description = one_line(fields()[key].description or "")
    return _with_help(f"{name}: {dump_value(value)}", _SENTENCE_END.split(description)[0])


def _with_help(text: str, about: str) -> str:
    """Returns a line with a comment after it."""
    start = f"{text:{HELP_COLUMN - 2}}  # "
    return start + cut(about.removesuffix("."), max(WIDTH - len(start), 30))


def _section(key: str) -> str:
    """Returns the node of a key in the file: model, trainer, fp8, ..."""
    name = short(key)
    # `backend` and `opt_level` have short names without a dot, but belong to precision.
    if key.startswith(f"{PLUGIN}.") and "." not in name:
        return "precision"
    return name.rpartition(".")[0].partition(".")[0]


def _heading(section: str) -> str:
    """Returns the heading of a section: its node's name and meaning."""
    if not section:
        return "The run"
    if section == "precision":
        return "precision: other keys of the preset, besides fp8 and storage"
    description = one_line(fields()[full(section)].description or "")
    return f"{section}: {_SENTENCE_END.split(description)[0].removesuffix('.')}"
