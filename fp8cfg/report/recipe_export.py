"""Recipe export as YAML, JSON or Python, and JSON Schema of recipe files.

An export has all keys, or only the differences from shipped recipes and presets.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from fp8cfg.composition.config_groups import GROUPS, MERGING_GROUPS, REPLACING_GROUPS, Library
from fp8cfg.composition.hydra_application import node
from fp8cfg.composition.recipe_yaml import flat, listed, nested, owner, to_yaml
from fp8cfg.schema import __version__, recipe_registry
from fp8cfg.schema.keys import ALIASES, PLUGIN, short
from fp8cfg.schema.node import Node
from fp8cfg.schema.presets import FUNCTIONS
from fp8cfg.schema.recipe import Recipe, fields
from fp8cfg.schema.safe_files import NAME, dump_yaml

_SCALING, _COMPUTE = {f"{PLUGIN}.fp8.enabled", f"{PLUGIN}.fp8.scaling"}, f"{PLUGIN}.compute"
_HEAD = f"Exported by fp8cfg {__version__}"
_RUN = (
    'if __name__ == "__main__":\n    with fp8cfg.exit_codes():\n       '
    " fp8cfg.fit(fp8cfg.build(recipe))\n"
)


@dataclass(frozen=True)
class Deltas:
    """A recipe as differences from shipped ones.

    Attributes:
        recipe: Name of the shipped recipe.
        presets: Names of shipped presets by group.
        values: Different values by full key.
    """

    recipe: str
    presets: dict[str, str]
    values: dict[str, Any]


def deltas(
    recipe: Recipe, named: Mapping[str, str], groups: tuple[str, ...] = tuple(REPLACING_GROUPS)
) -> Deltas:
    """Expresses a recipe as a shipped recipe, presets and differences.

    Args:
        recipe: The recipe.
        named: The user's choice of shipped recipe and presets, by group. It is kept. For other
            groups the nearest shipped one is used.
        groups: Groups with a preset in the result.
    """
    want, presets, makers = flat(recipe), dict[str, str](), recipe_registry.recipes()
    names = [named["recipe"]] if "recipe" in named else makers
    base, values = _nearest({name: flat(makers[name]()) for name in names}, want)
    for group in groups:
        name, node = _nearest(_shipped(group, named.get(group)), want)
        # Without a choice of the user, a preset must reduce the differences.
        nearer = _apart(node, want) < _apart({key: values[key] for key in node}, want)
        if (group in named or nearer) and (
            group == "precision" or node.items() <= want.items()
        ):  # a file has either a preset's name or keys for `data`, so all keys must match
            presets[group] = name
            values |= node
    return Deltas(base, presets, {key: want[key] for key in _differing(want, values)})


def _nearest(tables: dict[str, dict[str, Any]], want: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the values of the nearest table."""
    # Ties go to the first name, for reproducible exports.
    name = min(tables, key=lambda name: (_apart(tables[name], want), name))
    return name, tables[name]


def _apart(values: Mapping[str, Any], want: Mapping[str, Any]) -> tuple[bool, bool, int, int]:
    """Returns a distance, with the most important differences first.

    Returns:
        Whether FP8 or its scaling differs, whether the compute dtype differs, the number of
        different storage keys, and the number of all different keys.
    """
    keys = _differing(values, want)
    columns = sum(k.startswith(f"{PLUGIN}.storage.") for k in keys)
    return not _SCALING.isdisjoint(keys), _COMPUTE in keys, columns, len(keys)


def nearest_preset(values: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Returns the shipped precision preset that is nearest to a recipe.

    Args:
        values: Values of the recipe by full key. Lists are tuples.

    Returns:
        Name of the preset, and the full keys that differ from it.
    """
    name, preset = _nearest(_precisions(), dict(values))
    return name, _differing(preset, values)


@functools.cache
def _precisions() -> dict[str, dict[str, Any]]:
    """Returns the values of all shipped precision presets."""
    return _shipped("precision", None)


def _shipped(group: str, only: str | None) -> dict[str, dict[str, Any]]:
    """Returns the values of a group's shipped presets by name and full key. `only` selects one."""
    (cls, home), library = REPLACING_GROUPS[group], Library()
    return {
        name: flat(cls(**node(group, name, library)), home)
        for name in ([only] if only else library.choices(group))
    }


def as_data(recipe: Recipe, named: Mapping[str, str]) -> dict[str, Any]:
    """Returns the differences of a recipe as the data of a YAML file.

    Args:
        recipe: The recipe.
        named: See `deltas`.
    """
    found = deltas(recipe, named)
    # If `precision` is a preset's name in the file, keys in it need their full names.
    keys = {
        k: k if short(k).startswith("precision.") and "precision" in found.presets else short(k)
        for k in found.values
    }
    values = {keys[k]: list(v) if isinstance(v, tuple) else v for k, v in found.values.items()}
    return {"recipe": found.recipe, **found.presets, **nested(values)}


def yaml_text(recipe: Recipe, named: Mapping[str, str], full: bool) -> str:
    """Returns YAML that composes the same recipe.

    Args:
        recipe: The recipe.
        named: See `deltas`.
        full: Whether to write all keys, not only the differences.
    """
    return to_yaml(recipe) if full else f"# {_HEAD}.\n" + dump_yaml(as_data(recipe, named))


def json_text(recipe: Recipe, named: Mapping[str, str], full: bool) -> str:
    """Returns the data of `yaml_text` as JSON. Arguments as there."""
    text = (
        json.dumps(listed(recipe) if full else as_data(recipe, named), indent=1, ensure_ascii=False)
        + "\n"
    )
    # A path with invalid UTF-8 has surrogates. They cannot be written to a file.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def python_text(recipe: Recipe, named: Mapping[str, str], full: bool) -> str:
    """Returns a Python script that builds the same recipe and trains it.

    Args:
        recipe: The recipe.
        named: See `deltas`.
        full: Whether to write all keys, not only the differences.
    """
    head = f'"""{_HEAD}. Edit the recipe; run this file to train it."""\n\nimport fp8cfg\n'
    if full:
        return f"{head}\nrecipe = {_call(recipe)}\n\n{_RUN}"
    found = deltas(recipe, named, ("precision",))
    make = recipe_registry.recipes()[found.recipe]
    # Shipped recipes are imported from the public package, others from their own module.
    module = "fp8cfg.recipes" if make.__module__.startswith("fp8cfg.recipes.") else make.__module__
    lines = [f"recipe = {found.recipe}()"]
    if "precision" in found.presets:
        # Several functions can return one preset. In reverse order the first name wins.
        functions = {stem: name for name, stem in reversed(FUNCTIONS.items())}
        lines.append(f"recipe.precision = fp8cfg.{functions[found.presets['precision']]}()")
    lines += [f"recipe.{short(key)} = {value!r}" for key, value in found.values.items()]
    return "\n".join([f"{head}from {module} import {found.recipe}\n", *lines, "", _RUN])


def _call(node: Node, indent: str = "") -> str:
    """Returns the constructor call of a node, with one line per key."""
    inner = indent + "    "
    values = {name: getattr(node, name) for name in type(node).model_fields}
    lines = [
        f"{inner}{k}={_call(v, inner) if isinstance(v, Node) else repr(v)},\n"
        for k, v in values.items()
    ]
    return f"fp8cfg.{type(node).__name__}(\n{''.join(lines)}{indent})"


def _differing(values: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Returns the keys of `values` with another value in `base`."""
    return [key for key, value in values.items() if value != base[key]]


DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DEFAULTS = (
    "What this builds on, in Hydra's way: a recipe's name, or group: name. `recipe`, `precision`"
    " and `data` say the same."
)


class _Generator(GenerateJsonSchema):
    """Schema generator without titles: pydantic derives them from the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Overrides pydantic's default, True for most fields."""
        return False


def recipe_schema(library: Library) -> dict[str, Any]:
    """Returns the JSON Schema of a recipe's YAML file, for editors.

    Args:
        library: Config groups. Their names are the choices in the schema.
    """
    schema = _any_case(_of(Recipe))
    parts = schema["$defs"]
    given = {
        group: _named(_names(library, group), group) for group in ("recipe", *REPLACING_GROUPS)
    }
    names: dict[str, Any] = {
        group: {"anyOf": [*forms, {"type": "null"}]} for group, forms in given.items()
    }
    # NeMo has trainer.plugins as a name or as a node, and so may a file here.
    plugins = parts["Trainer"]["properties"]["plugins"]
    plugins["anyOf"] = [*given["precision"], {"$ref": plugins.pop("$ref")}]
    full = schema.pop("properties")
    own: dict[str, Any] = {
        "recipe": {"description": "The recipe that this one builds on.", **names["recipe"]}
    }
    for group, (cls, _) in REPLACING_GROUPS.items():
        about = f"A preset's name, or keys: {_line(cls.__doc__ or '')}"
        own[group] = {
            "description": about,
            "anyOf": [names[group], {"$ref": f"#/$defs/{cls.__name__}"}],
        }
    own |= {
        group: {
            "description": "A choice of some keys of the whole recipe.",
            "enum": [*library.choices(group), None],
        }
        for group in MERGING_GROUPS
    }
    # Short names such as `fp8` may be at the top of a file instead of their full path.
    own |= {alias: _any_case(key_schema(key)) for alias, key in ALIASES.items() if alias not in own}
    rest = {key: value for key, value in full.items() if key not in own}
    chosen = names | {
        group: {"enum": [*library.choices(group), None]}
        for group in library.groups()
        if group not in names
    }
    # Hydra's defaults list: "group: name", with "override" or "optional" and an "@package".
    entry = {
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {
            f"^((override|optional) )*/*{group}(@.*)?$": {
                "anyOf": [of, {"type": "array", "items": of}]
            }
            for group, of in chosen.items()
        },
    }
    path = {"type": "string", "pattern": f"^/({'|'.join(chosen)})/\\w+(@.*)?$"}
    own["defaults"] = {
        "description": _DEFAULTS,
        "type": ["array", "null"],
        "items": {"anyOf": [{"const": "_self_"}, names["recipe"], path, entry]},
    }
    return {
        "$schema": DIALECT,
        **schema,
        "title": "A recipe of fp8cfg",
        "properties": own | rest,
        "patternProperties": _dotted(),
    }


def preset_schema(group: str) -> dict[str, Any]:
    """Returns the JSON Schema of a preset's YAML file.

    Args:
        group: "precision", "data" or "task". A task can have keys of the whole recipe.
    """
    if group in MERGING_GROUPS:
        schema = recipe_schema(Library())
        keys = {
            key: value
            for key, value in schema["properties"].items()
            if key in REPLACING_GROUPS or key not in GROUPS
        }
        return {**schema, "title": f"A {group} of fp8cfg", "properties": keys}
    return {
        "$schema": DIALECT,
        **_any_case(_of(REPLACING_GROUPS[group][0])),
        "title": f"A {group} preset of fp8cfg",
    }


def key_schema(key: str) -> dict[str, Any]:
    """Returns the JSON Schema of one key: type, bounds or choices, default and description.

    Args:
        key: Full name of the key. For a node, the schema is a reference.
    """
    cls, leaf = owner(key)
    found: dict[str, Any] = _of(cls)["properties"][leaf]
    return found


def _dotted() -> dict[str, Any]:
    """Returns schemas of dotted names at the top of a file, such as fp8.margin.

    They are patterns and not properties: editors accept them, but do not offer them.
    """
    found = {}
    for key in fields():
        cls, leaf = owner(key)
        spelled = [
            key,
            *(
                alias + key.removeprefix(home)
                for alias, home in ALIASES.items()
                if key.startswith(f"{home}.")
            ),
        ]
        dotted = [re.escape(name) for name in spelled if "." in name]
        if dotted:
            found[f"^({'|'.join(dotted)})$"] = {"$ref": f"#/$defs/{cls.__name__}/properties/{leaf}"}
    return found


def _any_case(schema: Any) -> Any:
    """Returns a copy of a schema with choices in any case.

    The plain choices stay first in each `anyOf`, because editors offer them.
    """
    if isinstance(schema, list):
        return [_any_case(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {k: _any_case(v) for k, v in schema.items() if k != "enum"}
    if "enum" not in schema:
        return copy
    forms = [{"enum": schema["enum"]}, _spelled(schema["enum"])]
    if {"on", "off"} <= {*schema["enum"]}:  # unquoted, they are booleans in YAML 1.1
        return {
            **{k: v for k, v in copy.items() if k != "type"},
            "anyOf": [*forms, {"type": "boolean"}],
        }
    return {**copy, "anyOf": forms}


def _named(names: list[str], group: str) -> list[dict[str, Any]]:
    """Returns schemas for the names of a group: as they are, and for precision in any case."""
    # NeMo and Lightning write hyphens in such names, Megatron Bridge underscores.
    lower = [name for name in names if name == name.lower() and "-" not in name]
    return [{"enum": names}, *([_spelled(lower, {"_": "[-_]"})] if group == "precision" else [])]


def _spelled(words: list[str], signs: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Returns a schema for words in any case. `signs` maps a character to its pattern."""
    # JSON Schema patterns have no flag to ignore case, so each letter becomes a class.
    letters = (
        "".join(signs.get(c, f"[{c.upper()}{c.lower()}]" if c.isalpha() else c) for c in word)
        for word in words
    )
    return {"type": "string", "pattern": f"^({'|'.join(letters)})$"}


def _of(cls: type[Node]) -> dict[str, Any]:
    """Returns the JSON Schema of a class. The caller may change it."""
    return _in_lines(_generated(cls))  # type: ignore[no-any-return]


@functools.cache
def _generated(cls: type[Node]) -> dict[str, Any]:
    """Returns the JSON Schema of a class. Cached, so do not change it."""
    return cls.model_json_schema(schema_generator=_Generator)


def _in_lines(schema: Any) -> Any:
    """Returns a copy with each description in one line."""
    if isinstance(schema, dict):
        return {
            k: _line(v) if k == "description" and isinstance(v, str) else _in_lines(v)
            for k, v in schema.items()
        }
    return [_in_lines(v) for v in schema] if isinstance(schema, list) else schema


def _line(text: str) -> str:
    """Joins lines and collapses white space."""
    return " ".join(text.split())


def _names(library: Library, group: str) -> list[str]:
    """Returns the accepted names of a group. For precision they include NeMo's names."""
    choices = [name for name in library.choices(group) if NAME.fullmatch(name)]
    functions = (
        {*FUNCTIONS, *(name.replace("_", "-") for name in FUNCTIONS)}
        if group == "precision"
        else set[str]()
    )
    return choices + sorted(functions - {*choices})
