"""Recipe export: YAML, JSON or Python, as values on top of shipped recipes and presets, or whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8cfg import __version__
from fp8cfg.composition.config_groups import LEAVES, Library
from fp8cfg.composition.flatten import flat, listed, nested
from fp8cfg.composition.resolve import node
from fp8cfg.composition.yaml_recipe import to_yaml
from fp8cfg.config import recipe_registry
from fp8cfg.config.files import dump_yaml
from fp8cfg.config.key_names import PLUGIN, short
from fp8cfg.config.node import Node
from fp8cfg.config.presets import FUNCTIONS
from fp8cfg.config.recipe import Recipe

_SCALING, _COMPUTE = {f"{PLUGIN}.fp8.enabled", f"{PLUGIN}.fp8.scaling"}, f"{PLUGIN}.compute"
_HEAD = f"Exported by fp8cfg {__version__}"
_RUN = (
    'if __name__ == "__main__":\n    with fp8cfg.exit_codes():\n       '
    " fp8cfg.fit(fp8cfg.build(recipe))\n"
)


@dataclass(frozen=True)
class Deltas:
    """A recipe as a shipped recipe, shipped presets (by group), and the values that differ, by their full keys."""

    recipe: str
    presets: dict[str, str]
    values: dict[str, Any]


def deltas(
    recipe: Recipe, named: Mapping[str, str], groups: tuple[str, ...] = tuple(LEAVES)
) -> Deltas:
    """`recipe` on top of what `named` says, where it does; else on what is nearest. Presets are taken for `groups` alone."""
    want, presets, makers = flat(recipe), dict[str, str](), recipe_registry.recipes()
    names = [named["recipe"]] if "recipe" in named else makers
    base, values = _nearest({name: flat(makers[name]()) for name in names}, want)
    for group in groups:
        name, node = _nearest(_shipped(group, named.get(group)), want)
        nearer = _apart(node, want) < _apart({key: values[key] for key in node}, want)
        if (group in named or nearer) and (
            group == "precision" or node.items() <= want.items()
        ):  # `data`: a name or keys
            presets[group] = name
            values |= node
    return Deltas(base, presets, {key: want[key] for key in _differing(want, values)})


def _nearest(tables: dict[str, dict[str, Any]], want: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the table that is the least apart from what is wanted; the first by name of several."""
    name = min(tables, key=lambda name: (_apart(tables[name], want), name))
    return name, tables[name]


def _apart(values: Mapping[str, Any], want: Mapping[str, Any]) -> tuple[bool, bool, int, int]:
    """Whether `values` scale otherwise, or without FP8, whether they compute in another dtype, how many columns they store
    otherwise, and how many of them are not wanted."""
    keys = _differing(values, want)
    columns = sum(k.startswith(f"{PLUGIN}.storage.") for k in keys)
    return not _SCALING.isdisjoint(keys), _COMPUTE in keys, columns, len(keys)


def _shipped(group: str, only: str | None) -> dict[str, dict[str, Any]]:
    """The tables of the shipped presets of `group`, or of one of them."""
    (cls, home), library = LEAVES[group], Library()
    return {
        name: flat(cls(**node(group, name, library)), home)
        for name in ([only] if only else library.choices(group))
    }


def as_data(recipe: Recipe, named: Mapping[str, str]) -> dict[str, Any]:
    """The deltas of `recipe` as a recipe's YAML file has them."""
    found = deltas(recipe, named)
    keys = {
        k: k if short(k).startswith("precision.") and "precision" in found.presets else short(k)
        for k in found.values
    }
    values = {keys[k]: list(v) if isinstance(v, tuple) else v for k, v in found.values.items()}
    return {"recipe": found.recipe, **found.presets, **nested(values)}


def yaml_text(recipe: Recipe, named: Mapping[str, str], full: bool) -> str:
    """YAML that `fp8cfg FILE.yaml` reads back equal."""
    return to_yaml(recipe) if full else f"# {_HEAD}.\n" + dump_yaml(as_data(recipe, named))


def json_text(recipe: Recipe, named: Mapping[str, str], full: bool) -> str:
    """The same data as `yaml_text`, as JSON."""
    text = (
        json.dumps(listed(recipe) if full else as_data(recipe, named), indent=1, ensure_ascii=False)
        + "\n"
    )
    return text.encode("utf-8", "backslashreplace").decode(
        "utf-8"
    )  # a path may hold what is no character


def python_text(recipe: Recipe, named: Mapping[str, str], full: bool) -> str:
    """A script whose `recipe` equals `recipe`, and which trains it where it is run."""
    head = f'"""{_HEAD}. Edit the recipe; run this file to train it."""\n\nimport fp8cfg\n'
    if full:
        return f"{head}\nrecipe = {_call(recipe)}\n\n{_RUN}"
    found = deltas(recipe, named, ("precision",))
    make = recipe_registry.recipes()[found.recipe]
    module = "fp8cfg.recipes" if make.__module__.startswith("fp8cfg.recipes.") else make.__module__
    lines = [f"recipe = {found.recipe}()"]
    if "precision" in found.presets:
        functions = {
            stem: name for name, stem in reversed(FUNCTIONS.items())
        }  # the first name of each
        lines.append(f"recipe.precision = fp8cfg.{functions[found.presets['precision']]}()")
    lines += [f"recipe.{short(key)} = {value!r}" for key, value in found.values.items()]
    return "\n".join([f"{head}from {module} import {found.recipe}\n", *lines, "", _RUN])


def _call(node: Node, indent: str = "") -> str:
    """The constructor call that makes `node`, a line for each key."""
    inner = indent + "    "
    values = {name: getattr(node, name) for name in type(node).model_fields}
    lines = [
        f"{inner}{k}={_call(v, inner) if isinstance(v, Node) else repr(v)},\n"
        for k, v in values.items()
    ]
    return f"fp8cfg.{type(node).__name__}(\n{''.join(lines)}{indent})"


def _differing(values: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    return [key for key, value in values.items() if value != base[key]]
