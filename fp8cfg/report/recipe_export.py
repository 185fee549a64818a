"""Recipe export: YAML, JSON or Python, as values on top of shipped recipes and presets, or whole."""

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
    """A recipe as a shipped recipe, shipped presets (by group), and the values that differ, by their full keys."""

    recipe: str
    presets: dict[str, str]
    values: dict[str, Any]


def deltas(
    recipe: Recipe, named: Mapping[str, str], groups: tuple[str, ...] = tuple(REPLACING_GROUPS)
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
    """The tables of all shipped precision presets."""
    return _shipped("precision", None)


def _shipped(group: str, only: str | None) -> dict[str, dict[str, Any]]:
    """The tables of the shipped presets of `group`, or of one of them."""
    (cls, home), library = REPLACING_GROUPS[group], Library()
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


DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DEFAULTS = (
    "What this builds on, in Hydra's way: a recipe's name, or group: name. `recipe`, `precision`"
    " and `data` say the same."
)


class _Generator(GenerateJsonSchema):
    """Without a title for each key, which would repeat its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def recipe_schema(library: Library) -> dict[str, Any]:
    """The schema of a recipe's YAML file; names are those that `library` can choose."""
    schema = _any_case(_of(Recipe))
    parts = schema["$defs"]
    given = {
        group: _named(_names(library, group), group) for group in ("recipe", *REPLACING_GROUPS)
    }
    names: dict[str, Any] = {
        group: {"anyOf": [*forms, {"type": "null"}]} for group, forms in given.items()
    }
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
    own |= {alias: _any_case(key_schema(key)) for alias, key in ALIASES.items() if alias not in own}
    rest = {key: value for key, value in full.items() if key not in own}
    chosen = names | {
        group: {"enum": [*library.choices(group), None]}
        for group in library.groups()
        if group not in names
    }
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
    """The schema of a preset's YAML file: "precision" or "data"; of a task, which has keys of the whole recipe, "task"."""
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
    """The schema of one key by its full name: type, bounds or choices, default and meaning; of a node, a reference."""
    cls, leaf = owner(key)
    found: dict[str, Any] = _of(cls)["properties"][leaf]
    return found


def _dotted() -> dict[str, Any]:
    """Keys by their dotted names, short and full, which a file may have at its top. As patterns, which editors do not offer."""
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
    """A copy in which options are in any case, as they are read; the options themselves are what editors offer."""
    if isinstance(schema, list):
        return [_any_case(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {k: _any_case(v) for k, v in schema.items() if k != "enum"}
    if "enum" not in schema:
        return copy
    forms = [{"enum": schema["enum"]}, _spelled(schema["enum"])]
    if {"on", "off"} <= {*schema["enum"]}:  # YAML's true and false are those too
        return {
            **{k: v for k, v in copy.items() if k != "type"},
            "anyOf": [*forms, {"type": "boolean"}],
        }
    return {**copy, "anyOf": forms}


def _named(names: list[str], group: str) -> list[dict[str, Any]]:
    """The forms of a preset's name: in its own spelling, and for precision in any case, with '-' or '_'."""
    lower = [name for name in names if name == name.lower() and "-" not in name]
    return [{"enum": names}, *([_spelled(lower, {"_": "[-_]"})] if group == "precision" else [])]


def _spelled(words: list[str], signs: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Any of `words` in any case, and each of `signs` as the pattern that it is given there; JSON Schema has no flag for it."""
    letters = (
        "".join(signs.get(c, f"[{c.upper()}{c.lower()}]" if c.isalpha() else c) for c in word)
        for word in words
    )
    return {"type": "string", "pattern": f"^({'|'.join(letters)})$"}


def _of(cls: type[Node]) -> dict[str, Any]:
    return _in_lines(_generated(cls))  # type: ignore[no-any-return]


@functools.cache
def _generated(cls: type[Node]) -> dict[str, Any]:
    return cls.model_json_schema(schema_generator=_Generator)


def _in_lines(schema: Any) -> Any:
    """A copy with each description in one line."""
    if isinstance(schema, dict):
        return {
            k: _line(v) if k == "description" and isinstance(v, str) else _in_lines(v)
            for k, v in schema.items()
        }
    return [_in_lines(v) for v in schema] if isinstance(schema, list) else schema


def _line(text: str) -> str:
    return " ".join(text.split())


def _names(library: Library, group: str) -> list[str]:
    """What can be written for `group`: its choices, and for precision NeMo's names in both of their spellings."""
    choices = [name for name in library.choices(group) if NAME.fullmatch(name)]
    functions = (
        {*FUNCTIONS, *(name.replace("_", "-") for name in FUNCTIONS)}
        if group == "precision"
        else set[str]()
    )
    return choices + sorted(functions - {*choices})
