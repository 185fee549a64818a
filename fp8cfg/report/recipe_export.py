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

_SCALING_KEYS = {f"{PLUGIN}.fp8.enabled", f"{PLUGIN}.fp8.scaling"}
_COMPUTE_KEY = f"{PLUGIN}.compute"
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
    target = flat(recipe)
    makers = recipe_registry.recipes()
    names = [named["recipe"]] if "recipe" in named else makers
    base, values = _nearest({name: flat(makers[name]()) for name in names}, target)
    presets: dict[str, str] = {}
    for group in groups:
        name, preset = _nearest(_shipped(group, named.get(group)), target)
        current = {key: values[key] for key in preset}
        # Without a choice of the user, a preset must reduce the differences.
        is_nearer = _distance(preset, target) < _distance(current, target)
        if group not in named and not is_nearer:
            continue
        # A file has either a preset's name or keys for `data`, so all keys must match.
        if group == "precision" or preset.items() <= target.items():
            presets[group] = name
            values |= preset
    return Deltas(base, presets, {key: target[key] for key in _differing(target, values)})


def _nearest(
    tables: dict[str, dict[str, Any]], target: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Returns the name and the values of the nearest table."""
    # Ties go to the first name, for reproducible exports.
    name = min(tables, key=lambda name: (_distance(tables[name], target), name))
    return name, tables[name]


def _distance(values: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[bool, bool, int, int]:
    """Returns a distance, with the most important differences first.

    Returns:
        Whether FP8 or its scaling differs, whether the compute dtype differs, the number of
        different storage keys, and the number of all different keys.
    """
    keys = _differing(values, target)
    scaling_differs = not _SCALING_KEYS.isdisjoint(keys)
    storage_keys = [key for key in keys if key.startswith(f"{PLUGIN}.storage.")]
    return scaling_differs, _COMPUTE_KEY in keys, len(storage_keys), len(keys)


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
    node_class, prefix = REPLACING_GROUPS[group]
    library = Library()
    names = [only] if only else library.choices(group)
    return {name: flat(node_class(**node(group, name, library)), prefix) for name in names}


def as_data(recipe: Recipe, named: Mapping[str, str]) -> dict[str, Any]:
    """Returns the differences of a recipe as the data of a YAML file.

    Args:
        recipe: The recipe.
        named: See `deltas`.
    """
    result = deltas(recipe, named)
    values = {}
    for key, value in result.values.items():
        name = short(key)
        # If `precision` is a preset's name in the file, keys in it need their full names.
        if name.startswith("precision.") and "precision" in result.presets:
            name = key
        values[name] = list(value) if isinstance(value, tuple) else value
    return {"recipe": result.recipe, **result.presets, **nested(values)}


def yaml_text(recipe: Recipe, named: Mapping[str, str], full: bool) -> str:
    """Returns YAML that composes the same recipe.

    Args:
        recipe: The recipe.
        named: See `deltas`.
        full: Whether to write all keys, not only the differences.
    """
    if full:
        return to_yaml(recipe)
    return f"# {_HEAD}.\n" + dump_yaml(as_data(recipe, named))


def json_text(recipe: Recipe, named: Mapping[str, str], full: bool) -> str:
    """Returns the data of `yaml_text` as JSON. Arguments as there."""
    data = listed(recipe) if full else as_data(recipe, named)
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
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
    result = deltas(recipe, named, ("precision",))
    # Shipped recipes are imported from the public package, others from their own module.
    module = recipe_registry.recipes()[result.recipe].__module__
    if module.startswith("fp8cfg.recipes."):
        module = "fp8cfg.recipes"
    lines = [f"recipe = {result.recipe}()"]
    if "precision" in result.presets:
        # Several functions can return one preset. In reverse order the first name wins.
        functions = {stem: name for name, stem in reversed(FUNCTIONS.items())}
        lines.append(f"recipe.precision = fp8cfg.{functions[result.presets['precision']]}()")
    lines += [f"recipe.{short(key)} = {value!r}" for key, value in result.values.items()]
    return "\n".join([f"{head}from {module} import {result.recipe}\n", *lines, "", _RUN])


def _call(node: Node, indent: str = "") -> str:
    """Returns the constructor call of a node, with one line per key."""
    inner = indent + "    "
    lines = ""
    for name in type(node).model_fields:
        value = getattr(node, name)
        text = _call(value, inner) if isinstance(value, Node) else repr(value)
        lines += f"{inner}{name}={text},\n"
    return f"fp8cfg.{type(node).__name__}(\n{lines}{indent})"


def _differing(values: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Returns the keys of `values` with another value in `base`."""
    return [key for key, value in values.items() if value != base[key]]


DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DEFAULTS = (
    "Recipe and presets to build on, as in Hydra: a recipe's name, or group: name. Same as"
    " `recipe`, `precision` and `data`."
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
    schema = _any_case(_class_schema(Recipe))
    classes = schema["$defs"]
    name_forms = {}
    for group in ("recipe", *REPLACING_GROUPS):
        name_forms[group] = _name_forms(_accepted_names(library, group), group)
    names: dict[str, Any] = {
        group: {"anyOf": [*forms, {"type": "null"}]} for group, forms in name_forms.items()
    }
    # NeMo has trainer.plugins as a name or as a node, and so may a file here.
    plugins = classes["Trainer"]["properties"]["plugins"]
    plugins["anyOf"] = [*name_forms["precision"], {"$ref": plugins.pop("$ref")}]

    keys = schema.pop("properties")
    properties: dict[str, Any] = {
        "recipe": {"description": "The recipe that this one builds on.", **names["recipe"]}
    }
    for group, (node_class, _) in REPLACING_GROUPS.items():
        about = f"A preset's name, or keys: {one_line(node_class.__doc__ or '')}"
        properties[group] = {
            "description": about,
            "anyOf": [names[group], {"$ref": f"#/$defs/{node_class.__name__}"}],
        }
    for group in MERGING_GROUPS:
        properties[group] = {
            "description": "A choice of some keys of the whole recipe.",
            "enum": [*library.choices(group), None],
        }
    # Short names such as `fp8` may be at the top of a file instead of their full path.
    for alias, key in ALIASES.items():
        if alias not in properties:
            properties[alias] = _any_case(key_schema(key))

    choices = dict(names)
    for group in library.groups():
        if group not in names:
            choices[group] = {"enum": [*library.choices(group), None]}
    properties["defaults"] = _defaults_schema(names["recipe"], choices)
    for key, value in keys.items():
        properties.setdefault(key, value)
    return {
        "$schema": DIALECT,
        **schema,
        "title": "A recipe of fp8cfg",
        "properties": properties,
        "patternProperties": _dotted_names(),
    }


def _defaults_schema(recipe_names: Any, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of Hydra's defaults list.

    Args:
        recipe_names: Schema of the names of recipes, which need no group.
        choices: Schema of the names of each group.
    """
    # "group: name", with "override" or "optional" and an "@package".
    patterns = {}
    for group, names in choices.items():
        pattern = f"^((override|optional) )*/*{group}(@.*)?$"
        patterns[pattern] = {"anyOf": [names, {"type": "array", "items": names}]}
    entry = {"type": "object", "additionalProperties": False, "patternProperties": patterns}
    path = {"type": "string", "pattern": f"^/({'|'.join(choices)})/\\w+(@.*)?$"}
    return {
        "description": _DEFAULTS,
        "type": ["array", "null"],
        "items": {"anyOf": [{"const": "_self_"}, recipe_names, path, entry]},
    }


def preset_schema(group: str) -> dict[str, Any]:
    """Returns the JSON Schema of a preset's YAML file.

    Args:
        group: "precision", "data" or "task". A task can have keys of the whole recipe.
    """
    if group in MERGING_GROUPS:
        schema = recipe_schema(Library())
        properties = {}
        for key, value in schema["properties"].items():
            if key in REPLACING_GROUPS or key not in GROUPS:
                properties[key] = value
        return {**schema, "title": f"A {group} of fp8cfg", "properties": properties}
    return {
        "$schema": DIALECT,
        **_any_case(_class_schema(REPLACING_GROUPS[group][0])),
        "title": f"A {group} preset of fp8cfg",
    }


def key_schema(key: str) -> dict[str, Any]:
    """Returns the JSON Schema of one key: type, bounds or choices, default and description.

    Args:
        key: Full name of the key. For a node, the schema is a reference.
    """
    node_class, leaf = owner(key)
    schema: dict[str, Any] = _class_schema(node_class)["properties"][leaf]
    return schema


def _dotted_names() -> dict[str, Any]:
    """Returns schemas of dotted names at the top of a file, such as fp8.margin.

    They are patterns and not properties: editors accept them, but do not offer them.
    """
    schemas = {}
    for key in fields():
        node_class, leaf = owner(key)
        names = [key]
        for alias, prefix in ALIASES.items():
            if key.startswith(f"{prefix}."):
                names.append(alias + key.removeprefix(prefix))
        dotted = [re.escape(name) for name in names if "." in name]
        if dotted:
            reference = f"#/$defs/{node_class.__name__}/properties/{leaf}"
            schemas[f"^({'|'.join(dotted)})$"] = {"$ref": reference}
    return schemas


def _any_case(schema: Any) -> Any:
    """Returns a copy of a schema with choices in any case.

    The plain choices stay first in each `anyOf`, because editors offer them.
    """
    if isinstance(schema, list):
        return [_any_case(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: _any_case(value) for key, value in schema.items() if key != "enum"}
    if "enum" not in schema:
        return copy
    forms = [{"enum": schema["enum"]}, _any_case_pattern(schema["enum"])]
    if {"on", "off"} <= {*schema["enum"]}:  # unquoted, they are booleans in YAML 1.1
        copy.pop("type", None)
        forms.append({"type": "boolean"})
    copy["anyOf"] = forms
    return copy


def _name_forms(names: list[str], group: str) -> list[dict[str, Any]]:
    """Returns schemas for the names of a group: as they are, and for precision in any case."""
    if group != "precision":
        return [{"enum": names}]
    # NeMo and Lightning write hyphens in such names, Megatron Bridge underscores.
    lower = [name for name in names if name == name.lower() and "-" not in name]
    return [{"enum": names}, _any_case_pattern(lower, {"_": "[-_]"})]


def _any_case_pattern(
    words: list[str], signs: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns a schema for words in any case. `signs` maps a character to its pattern."""
    patterns = []
    for word in words:
        pattern = ""
        for character in word:
            # JSON Schema patterns have no flag to ignore case, so each letter becomes a class.
            if character.isalpha() and character not in signs:
                pattern += f"[{character.upper()}{character.lower()}]"
            else:
                pattern += signs.get(character, character)
        patterns.append(pattern)
    return {"type": "string", "pattern": f"^({'|'.join(patterns)})$"}


def _class_schema(node_class: type[Node]) -> dict[str, Any]:
    """Returns the JSON Schema of a class. The caller may change it."""
    return _with_one_line_descriptions(_generated(node_class))  # type: ignore[no-any-return]


@functools.cache
def _generated(node_class: type[Node]) -> dict[str, Any]:
    """Returns the JSON Schema of a class. Cached, so do not change it."""
    return node_class.model_json_schema(schema_generator=_Generator)


def _with_one_line_descriptions(schema: Any) -> Any:
    """Returns a copy with each description in one line."""
    if isinstance(schema, list):
        return [_with_one_line_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {}
    for key, value in schema.items():
        if key == "description" and isinstance(value, str):
            copy[key] = one_line(value)
        else:
            copy[key] = _with_one_line_descriptions(value)
    return copy


def one_line(text: str) -> str:
    """Joins lines and collapses white space."""
    return " ".join(text.split())


def _accepted_names(library: Library, group: str) -> list[str]:
    """Returns the accepted names of a group. For precision they include NeMo's names."""
    choices = [name for name in library.choices(group) if NAME.fullmatch(name)]
    if group != "precision":
        return choices
    functions = {*FUNCTIONS, *(name.replace("_", "-") for name in FUNCTIONS)}
    return choices + sorted(functions - {*choices})
