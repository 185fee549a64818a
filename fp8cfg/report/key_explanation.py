"""Explanation of a key: type, default, meaning, effect under a recipe, and its layers."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.layers import (
    Layer,
    Location,
    Rank,
    Source,
    default_layer,
    fold,
    key_history,
    stated_values,
)
from fp8cfg.composition.precedence import ResolvedRecipe, composed
from fp8cfg.composition.recipe_yaml import assigned, flat, is_node
from fp8cfg.planning.violations import violations
from fp8cfg.report.key_examples import example
from fp8cfg.report.recipe_export import key_schema
from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import PLUGIN, full, short, shown
from fp8cfg.schema.recipe import Recipe, fields, short_keys
from fp8cfg.schema.sections import in_notebook, table_html
from fp8cfg.schema.storage import resolved, sharding
from fp8cfg.schema.tables import cut, output_width, table, wrapped
from fp8cfg.schema.violation import Violation

_INERT, _LATER = ": has no effect", "not in this version"


def effect(recipe: Recipe, key: str, written: Collection[str] = ()) -> str:
    """Describes the effect of a key under a recipe, in one line.

    The check rules know which keys are unused. So the effect is found by trial: the key gets other
    values, and the rules report on each.

    Args:
        recipe: The recipe.
        key: Full name of the key.
        written: Short names of the user's keys.

    Returns:
        "takes effect", "no effect ..." with the reason, the resolved value of "auto" or null, or
        the broken rule.
    """
    found = [each for each in violations(recipe, written=written) if _about(each, key)]
    if found:
        return f"refused: {found[0]}"
    value = flat(recipe)[key]
    # Not the default: find the message of the rules if the user had written this value.
    if value != flat(Recipe())[key]:
        tacit = _answer(recipe, key, value) or ""
        return _none(tacit) if _INERT in tacit else "takes effect"
    # At the default: the key is unused if each other value would be unused too.
    others, complete = _others(key_schema(key), value)
    answers = [line for other in others if (line := _answer(recipe, key, other)) is not None]
    if answers and all(_INERT in line for line in answers):
        return _none(answers[0])
    # For an empty answer the rules accept the value.
    if _resolved(recipe, key) or not all(answers) or not complete:
        return _resolved(recipe, key) or "takes effect"
    reasons = [line.partition(": ")[2] for line in answers if _LATER not in line]
    return f"other values are refused: {reasons[0]}" if reasons else f"other values are {_LATER}"


def _ranks(recipe: Recipe) -> int:
    """Returns the number of data-parallel ranks from num_nodes and devices."""
    t = recipe.trainer
    # Context-parallel ranks are included: they have the same parameters.
    return max(
        1,
        t.num_nodes
        * t.devices
        // (t.strategy.tensor_model_parallel_size * t.strategy.pipeline_model_parallel_size),
    )


def _none(line: str) -> str:
    """Converts the message of a rule on an unused key to "no effect" with the reason."""
    # Nobody set the key, so the advice to remove it would be wrong.
    return "no effect" + line.partition(_INERT)[2].replace("; remove it or ", "; ")


def _answer(recipe: Recipe, key: str, value: Any) -> str | None:
    """Returns the message of the rules if a user set `key` to `value`.

    A message "has no effect" comes first. The result is "" if all rules accept the value, and None
    if the schema rejects it.
    """
    try:
        other = assigned(recipe, {key: value})
    except ConfigError:
        return None
    found = violations(other, written={short(key)})
    lines = [str(violation) for violation in found if _about(violation, key)]
    return next((line for line in lines if _INERT in line), lines[0] if lines else "")


def _about(violation: Violation, key: str) -> bool:
    """Returns whether a violation is about the full `key`."""
    return violation.setting.partition("=")[0] == short(key)


def _others(schema: dict[str, Any], value: Any) -> tuple[list[Any], bool]:
    """Returns sample values of a key other than `value`, and whether these are all.

    Some may be out of bounds: `_answer` returns None for them.
    """
    # null is left out: it usually means "choose for me" and is no setting to test.
    if "anyOf" in schema:
        found = [_others(one, value) for one in schema["anyOf"] if one != {"type": "null"}]
        return [v for values, _ in found for v in values], all(complete for _, complete in found)
    if "enum" in schema:
        return [v for v in schema["enum"] if v != value], True
    if schema["type"] == "boolean":
        return [not value], True
    # Keys have different constraints (divisors, powers of two). One of three values should fit.
    if schema["type"] in ("integer", "number"):
        base = value or 1
        return [base * 2, base + 1, base / 2], False
    return [v for v in ("x", ("*",), (0.5, 0.5)) if v != value], False


def _resolved(recipe: Recipe, key: str) -> str:
    """Describes the resolved value of "auto" or null. Returns "" for other values."""
    columns = {
        f"{PLUGIN}.storage.{column}": codec for column, codec in resolved(recipe.precision).items()
    }
    if key in columns and flat(recipe)[key] == "auto":
        return f"auto is {columns[key]} under this recipe"
    m, o = recipe.model, recipe.optim
    if key == f"{PLUGIN}.storage.shard" and recipe.storage.shard == "auto":
        ranks = _ranks(recipe)
        return (
            f"auto is {sharding(recipe.precision, ranks)} on {ranks} data-parallel"
            f" rank{'s' * (ranks > 1)} under this recipe"
        )
    if key == "model.kv_channels" and m.kv_channels is None:
        return (
            f"null is {m.head_dim}, model.hidden_size={m.hidden_size} /"
            f" model.num_attention_heads={m.num_attention_heads}"
        )
    if key == "optim.min_lr" and o.min_lr is None:
        return f"null is {o.end_lr:g}, 0.1 x optim.lr={o.lr:g}"
    return ""


_KINDS = {
    "boolean": "true or false",
    "integer": "integer",
    "number": "number",
    "string": "text",
    "null": "null",
    "object": "mapping",
}
_BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
}


def type_text(schema: dict[str, Any]) -> str:
    """Describes a key's type in words, with bounds or choices.

    Args:
        schema: JSON Schema of the key.
    """
    if "anyOf" in schema:
        return " or ".join(map(type_text, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(shown, schema['enum']))}"
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: {', '.join(map(type_text, schema['prefixItems']))}"
    if schema["type"] == "array":
        return f"list of {type_text(schema['items'])}"
    bounds = " and ".join(
        f"{sign} {schema[bound]}" for bound, sign in _BOUNDS.items() if bound in schema
    )
    return f"{_KINDS[schema['type']]} {bounds}".rstrip()


def path(file: Path) -> str:
    """Shortens a path for output.

    Args:
        file: Absolute path.

    Returns:
        The path relative to the working directory, or to the package for shipped files. Other paths
        are unchanged.
    """
    from fp8cfg.schema.safe_files import CONF

    if file.is_relative_to(Path.cwd()):
        return str(file.relative_to(Path.cwd()))
    shipped = any(file.is_relative_to(CONF.parent / folder) for folder in ("conf", "recipes"))
    return str(file.relative_to(CONF.parent) if shipped else file)


_VALUE = 24
"""Maximum width of the column of values, in characters."""


@dataclass(frozen=True)
class Explanation:
    """A key of a recipe, or a node such as `fp8` with its keys.

    `str()` returns what `fp8cfg explain` prints.
    """

    key: str
    """Short name, as in `fp8.margin`."""
    full_name: str
    """Full name, as in `trainer.plugins.fp8.margin`."""
    value: Any
    """Value under the recipe; of a node the values of all keys below it, by their short names."""
    description: str
    """Meaning, default and source."""
    schema: Mapping[str, Any]
    """JSON Schema of the key: type, bounds or choices, default. Empty for a node."""
    effect: str
    """What the key does under the recipe, or why it does nothing, in one line. Empty for a node."""
    layers: Sequence[Layer]
    """What set the key, in order; the last is its value. Empty for a node."""

    @property
    def is_node(self) -> bool:
        """Whether it is a node with keys."""
        return not self.schema

    def data(self) -> dict[str, Any]:
        """Returns plain data, as `fp8cfg explain --json` prints it."""
        names = {"key": self.key, "full_name": self.full_name}
        if self.is_node:
            return {**names, "description": self.description, "values": self.value}
        return {
            **names,
            "value": self.value,
            "schema": self.schema,
            "effect": self.effect,
            "layers": [_layer_data(layer, self.full_name) for layer in self.layers],
        }

    def __str__(self) -> str:
        return _node_text(self) if self.is_node else _key_text(self)

    def _repr_html_(self) -> str:
        """Returns the explanation for notebooks."""
        title = self.key if self.is_node else f"{self.key} = {shown(self.value)}"
        head = f"<div><b>{html.escape(title)}</b></div><div>{html.escape(self.description)}</div>"
        if self.is_node:
            rows = [[key, shown(value)] for key, value in self.value.items()]
            return in_notebook(head + table_html(["key", "value"], rows))
        facts = [[name, fact] for name, fact in _facts(self).items()]
        layers = [
            [shown(layer.values[self.full_name]), source_text(layer, self.full_name)]
            for layer in self.layers
        ]
        sources = table_html(["value", "set by, in order; the last one wins"], layers)
        return in_notebook(head + table_html([], facts) + sources)


def explain(recipe: Recipe | Sequence[str], key: str) -> Explanation:
    """Explains a key under a recipe: type, value, effect, and which layers set it.

    Args:
        recipe: A Recipe or overrides that compose one. The Recipe may break rules. Only overrides
            tell which file, function or argument set the key.
        key: Short or full name of a key or node, such as "fp8.margin".

    Raises:
        ConfigError: The key does not exist, or the overrides compose no recipe.
    """
    if not isinstance(key, str):
        raise ConfigError(f"explain: expected a key such as 'fp8.margin', got {type(key).__name__}")
    name = known(key)
    if isinstance(recipe, Recipe):
        return explained(_from_object(recipe), name)
    if not isinstance(recipe, (list, tuple)) or not all(isinstance(word, str) for word in recipe):
        raise ConfigError(
            "explain: expected a Recipe, or a list of words such as ['recipe=llama_8b',"
            f" 'fp8.margin=1'], got {type(recipe).__name__}"
        )
    return explained(composed(recipe, Library()), name)


def known(key: str) -> str:
    """Returns the full name of a key.

    Args:
        key: Short or full name of a key or node.

    Raises:
        ConfigError: No such key. The message suggests the nearest name.
    """
    if key == "recipe":
        raise ConfigError(
            "recipe: is chosen by name, it is not a key; `fp8cfg list recipe` shows the names"
        )
    if full(key) not in fields():
        raise ConfigError(foreign_names.unknown(short(full(key)), short_keys()))
    return full(key)


def explained(settled: ResolvedRecipe, key: str) -> Explanation:
    """Explains a key under a composed recipe.

    Args:
        settled: The recipe with its layers.
        key: Full name of a key or node.
    """
    if is_node(key):
        values = {short(k): v for k, v in flat(settled.recipe).items() if k.startswith(f"{key}.")}
        return Explanation(short(key), key, values, _line(fields()[key].description), {}, "", ())
    schema, layers = key_schema(key), tuple(key_history(fold(settled.layers), key))
    does = effect(settled.recipe, key, settled.written)
    return Explanation(
        short(key), key, layers[-1].values[key], _line(schema["description"]), schema, does, layers
    )


def _from_object(recipe: Recipe) -> ResolvedRecipe:
    """Wraps a Recipe object in layers. Set values and values other than defaults are the user's."""
    layer = Layer(Source.ASSIGNED, Location(), stated_values(recipe), Rank.USER)
    return ResolvedRecipe(recipe, (default_layer(), layer))


def _key_text(e: Explanation) -> str:
    """Formats the explanation of a key. An arrow marks the winning layer."""
    lines = [
        wrapped(f"{e.key} = {shown(e.value)}", more="    "),
        wrapped(e.description, "  ", "  "),
        "",
    ]
    for name, fact in _facts(e).items():
        lines.append(wrapped(f"{name:11}{fact}", "  ", " " * 13))
    lines += ["", "set by, in order"]
    values = [shown(layer.values[e.full_name]) for layer in e.layers]
    width = min(_VALUE, max(map(len, values)))
    for layer, value in zip(e.layers, values, strict=True):
        mark, where = "  ->" if layer is e.layers[-1] else "    ", source_text(layer, e.full_name)
        # A long value gets its own line, to keep the column of sources aligned.
        if len(value) <= width:
            lines.append(wrapped(f"{value:{width}}  {where}", f"{mark} ", " " * (width + 7)))
        else:
            lines += [wrapped(value, f"{mark} ", " " * 5), wrapped(where, " " * 7, " " * 7)]
    return "\n".join(lines)


def _facts(e: Explanation) -> dict[str, str]:
    """Returns type, effect, example and full name of a key, by label."""
    facts = {
        "type": f"{type_text(dict(e.schema))}; default {shown(e.schema['default'])}",
        "effect": e.effect,
    }
    word = example(e.full_name)
    if word is not None:
        facts["example"] = word
    if e.full_name != e.key:
        facts["full name"] = e.full_name
    return facts


def _node_text(e: Explanation) -> str:
    """Formats a table of a node's keys with values and meanings. Meanings are cut to the width."""
    rows = list[list[str]]()
    for name in fields()[e.full_name].annotation.model_fields:
        inner = f"{e.full_name}.{name}"
        rows.append(
            [
                f"  {name}",
                "..." if is_node(inner) else _short(shown(e.value[short(inner)])),
                fields()[inner].description,
            ]
        )
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for row in rows:
        row[2] = cut(_line(row[2]).partition(". ")[0], output_width() - sum(wide) - 4)
    return "\n".join([wrapped(f"{e.key}: {e.description}"), table(rows[0], rows[1:])])


def _line(text: str) -> str:
    """Joins lines and collapses white space."""
    return " ".join(text.split())


def _short(value: str) -> str:
    """Cuts a value to 16 characters."""
    return value if len(value) <= 16 else f"{value[:13]}..."


def source_text(layer: Layer, key: str) -> str:
    """Describes the source of a value.

    Args:
        layer: The layer of the value.
        key: Full name of the key.

    Returns:
        Text such as "command line: fp8.margin=1" or a file with a line number.
    """
    location = layer.location
    if layer.source is Source.CONFLICT:
        return f"changed to fit {shown(location.text)}"
    if layer.source is Source.COMMAND_LINE:
        return f"command line: {shown(location.text)}"
    if layer.source is Source.RECIPE:
        text = f"recipe function {layer.name}" if layer.name else f"recipe {location.text}"
    elif layer.source is Source.CHECKPOINT:
        text = f"checkpoint {shown(location.text)}"
    elif location.file is None:
        return str(layer.source.value)
    else:
        text = _shown_location(location, key)
        # The file sets the group, and the value is a default of its class.
        if location.line(key) is None:
            text += " does not have it"
    if layer.chosen_by is None:
        return text
    return f"{text}, by {_shown_location(layer.chosen_by, key)}"


def _shown_location(location: Location, key: str) -> str:
    """Returns a file with the line of the full `key`, or the text of an argument."""
    if location.file is None:
        return shown(location.text)
    line = location.line(key)
    return path(location.file) + (f":{line}" if line else "")


def _layer_data(layer: Layer, key: str) -> dict[str, Any]:
    """Returns one layer as plain data, for --json."""
    return {
        "layer": layer.source.value,
        "value": layer.values[key],
        "at": _location_data(layer.location, key),
        "by": _location_data(layer.chosen_by, key),
    }


def _location_data(location: Location | None, key: str) -> dict[str, Any] | None:
    """Returns the known entries of a location: file, line and text. None if all are unknown."""
    if location is None:
        return None
    data = {
        "file": str(location.file) if location.file else None,
        "line": location.line(key),
        "text": location.text or None,
    }
    return {name: value for name, value in data.items() if value is not None} or None
