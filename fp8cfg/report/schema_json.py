"""JSON Schema (draft 2020-12) of the YAML files that users write: recipes, and presets of one node."""

from __future__ import annotations

import functools
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from fp8cfg.composition.choices import LEAVES, Library
from fp8cfg.composition.leaves import owner
from fp8cfg.config.files import NAME
from fp8cfg.config.node import Node
from fp8cfg.config.presets import FUNCTIONS
from fp8cfg.config.recipe import ALIASES, Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DEFAULTS = "What this builds on, in Hydra's way: a recipe's name, or group: name. `recipe`, `precision` and `data` say the same."


class _Generator(GenerateJsonSchema):
    """Without a title for each key, which would repeat its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def recipe_schema(library: Library) -> dict[str, Any]:
    """The schema of a recipe's YAML file; names are those that `library` can choose."""
    schema = _of(Recipe)
    parts = schema["$defs"]
    names: dict[str, Any] = {group: {"enum": [*_names(library, group), None]} for group in ("recipe", *LEAVES)}
    plugins = parts["Trainer"]["properties"]["plugins"]
    plugins["anyOf"] = [names["precision"], {"$ref": plugins.pop("$ref")}]
    full = schema.pop("properties")
    own: dict[str, Any] = {"recipe": {"description": "The recipe that this one builds on.", **names["recipe"]}}
    for group, (cls, _) in LEAVES.items():
        about = f"A preset's name, or keys: {_line(cls.__doc__ or '')}"
        own[group] = {"description": about, "anyOf": [names[group], {"$ref": f"#/$defs/{cls.__name__}"}]}
    own |= {alias: key_schema(key) for alias, key in ALIASES.items() if alias not in own}
    rest = {key: value for key, value in full.items() if key not in own}
    entry = {"type": "object", "additionalProperties": False,
             "patternProperties": {f"^(override )?/?{group}(@.*)?$": names[group] for group in names}}
    own["defaults"] = {"description": _DEFAULTS, "type": ["array", "null"],
                       "items": {"anyOf": [{"const": "_self_"}, names["recipe"], entry]}}
    return {"$schema": DIALECT, **schema, "title": "A recipe of fp8cfg", "properties": own | rest}


def preset_schema(group: str) -> dict[str, Any]:
    """The schema of a preset's YAML file: "precision" or "data"."""
    return {"$schema": DIALECT, **_of(LEAVES[group][0]), "title": f"A {group} preset of fp8cfg"}


def key_schema(key: str) -> dict[str, Any]:
    """The schema of one key by its full name: type, bounds or choices, default and meaning; of a node, a reference."""
    cls, leaf = owner(key)
    found: dict[str, Any] = _of(cls)["properties"][leaf]
    return found


def _of(cls: type[Node]) -> dict[str, Any]:
    return _in_lines(_generated(cls))  # type: ignore[no-any-return]


@functools.cache
def _generated(cls: type[Node]) -> dict[str, Any]:
    return cls.model_json_schema(schema_generator=_Generator)


def _in_lines(schema: Any) -> Any:
    """A copy with each description in one line."""
    if isinstance(schema, dict):
        return {k: _line(v) if k == "description" and isinstance(v, str) else _in_lines(v) for k, v in schema.items()}
    return [_in_lines(v) for v in schema] if isinstance(schema, list) else schema


def _line(text: str) -> str:
    return " ".join(text.split())


def _names(library: Library, group: str) -> list[str]:
    """What can be written for `group`: its choices, and for precision NeMo's names in both of their spellings."""
    choices = [name for name in library.choices(group) if NAME.fullmatch(name)]
    functions = {*FUNCTIONS, *(name.replace("_", "-") for name in FUNCTIONS)} if group == "precision" else set[str]()
    return choices + sorted(functions - {*choices})
