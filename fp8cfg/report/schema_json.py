"""JSON Schema (draft 2020-12) of the YAML files that users write: recipes, and presets of one node."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from fp8cfg.composition.config_groups import GROUPS, LEAVES, PARTS, Library
from fp8cfg.composition.flatten import owner
from fp8cfg.config.files import NAME
from fp8cfg.config.key_names import ALIASES
from fp8cfg.config.node import Node
from fp8cfg.config.presets import FUNCTIONS
from fp8cfg.config.recipe import Recipe, fields

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
    given = {group: _named(_names(library, group), group) for group in ("recipe", *LEAVES)}
    names: dict[str, Any] = {
        group: {"anyOf": [*forms, {"type": "null"}]} for group, forms in given.items()
    }
    plugins = parts["Trainer"]["properties"]["plugins"]
    plugins["anyOf"] = [*given["precision"], {"$ref": plugins.pop("$ref")}]
    full = schema.pop("properties")
    own: dict[str, Any] = {
        "recipe": {"description": "The recipe that this one builds on.", **names["recipe"]}
    }
    for group, (cls, _) in LEAVES.items():
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
        for group in PARTS
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
    if group in PARTS:
        schema = recipe_schema(Library())
        keys = {
            key: value
            for key, value in schema["properties"].items()
            if key in LEAVES or key not in GROUPS
        }
        return {**schema, "title": f"A {group} of fp8cfg", "properties": keys}
    return {
        "$schema": DIALECT,
        **_any_case(_of(LEAVES[group][0])),
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
