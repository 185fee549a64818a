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
from fp8cfg.report.recipe_export import key_schema, one_line
from fp8cfg.schema import foreign_names
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.keys import PLUGIN, full, short, shown
from fp8cfg.schema.recipe import Recipe, fields, short_keys
from fp8cfg.schema.sections import in_notebook, table_html
from fp8cfg.schema.storage import resolved, sharding
from fp8cfg.schema.tables import cut, output_width, table, wrapped
from fp8cfg.schema.violation import Violation

# Parts of the messages of rules.
_NO_EFFECT = ": has no effect"
_NOT_YET = "not in this version"


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
    for violation in violations(recipe, written=written):
        if _is_about(violation, key):
            return f"refused: {violation}"
    value = flat(recipe)[key]
    # Not the default: find the message of the rules if the user had written this value.
    if value != flat(Recipe())[key]:
        message = _rule_message(recipe, key, value) or ""
        if _NO_EFFECT in message:
            return _no_effect(message)
        return "takes effect"
    # At the default: the key is unused if each other value would be unused too.
    samples, is_complete = _sample_values(key_schema(key), value)
    messages = []
    for sample in samples:
        answer = _rule_message(recipe, key, sample)
        if answer is not None:  # otherwise the schema rejects the sample
            messages.append(answer)
    if messages and all(_NO_EFFECT in message for message in messages):
        return _no_effect(messages[0])
    resolved_value = _describe_resolved(recipe, key)
    if resolved_value:
        return resolved_value
    # Without a message the rules accept the value.
    if not all(messages) or not is_complete:
        return "takes effect"
    for message in messages:
        if _NOT_YET not in message:
            return f"other values are refused: {message.partition(': ')[2]}"
    return f"other values are {_NOT_YET}"


def _data_parallel_ranks(recipe: Recipe) -> int:
    """Returns the number of data-parallel ranks from num_nodes and devices."""
    trainer = recipe.trainer
    strategy = trainer.strategy
    # Context-parallel ranks are included: they have the same parameters.
    model_parallel = strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size
    return max(1, trainer.num_nodes * trainer.devices // model_parallel)


def _no_effect(message: str) -> str:
    """Converts the message of a rule on an unused key to "no effect" with the reason."""
    # Nobody set the key, so the advice to remove it would be wrong.
    return "no effect" + message.partition(_NO_EFFECT)[2].replace("; remove it or ", "; ")


def _rule_message(recipe: Recipe, key: str, value: Any) -> str | None:
    """Returns the message of the rules if a user set `key` to `value`.

    A message "has no effect" comes first. The result is "" if all rules accept the value, and None
    if the schema rejects it.
    """
    try:
        changed = assigned(recipe, {key: value})
    except ConfigError:
        return None
    messages = []
    for violation in violations(changed, written={short(key)}):
        if _is_about(violation, key):
            messages.append(str(violation))
    for message in messages:
        if _NO_EFFECT in message:
            return message
    return messages[0] if messages else ""


def _is_about(violation: Violation, key: str) -> bool:
    """Returns whether a violation is about the full `key`."""
    return violation.setting.partition("=")[0] == short(key)


def _sample_values(schema: dict[str, Any], value: Any) -> tuple[list[Any], bool]:
    """Returns sample values of a key other than `value`, and whether these are all.

    Some may be out of bounds: `_rule_message` returns None for them.
    """
    if "anyOf" in schema:
        samples: list[Any] = []
        is_complete = True
        for alternative in schema["anyOf"]:
            # null usually means "choose for me" and is no setting to test.
            if alternative != {"type": "null"}:
                more_samples, has_all = _sample_values(alternative, value)
                samples += more_samples
                is_complete = is_complete and has_all
        return samples, is_complete
    if "enum" in schema:
        return [choice for choice in schema["enum"] if choice != value], True
    if schema["type"] == "boolean":
        return [not value], True
    # Keys have different constraints (divisors, powers of two). One of three values should fit.
    if schema["type"] in ("integer", "number"):
        base = value or 1
        return [base * 2, base + 1, base / 2], False
    return [sample for sample in ("x", ("*",), (0.5, 0.5)) if sample != value], False


def _describe_resolved(recipe: Recipe, key: str) -> str:
    """Describes the resolved value of "auto" or null. Returns "" for other values."""
    model, optim = recipe.model, recipe.optim
    column = key.removeprefix(f"{PLUGIN}.storage.")
    dtypes = resolved(recipe.precision)
    if column != key and column in dtypes and flat(recipe)[key] == "auto":
        return f"auto is {dtypes[column]} under this recipe"
    if key == f"{PLUGIN}.storage.shard" and recipe.storage.shard == "auto":
        num_ranks = _data_parallel_ranks(recipe)
        plural = "s" if num_ranks > 1 else ""
        return (
            f"auto is {sharding(recipe.precision, num_ranks)} on {num_ranks} data-parallel"
            f" rank{plural} under this recipe"
        )
    if key == "model.kv_channels" and model.kv_channels is None:
        return (
            f"null is {model.head_dim}, model.hidden_size={model.hidden_size} /"
            f" model.num_attention_heads={model.num_attention_heads}"
        )
    if key == "optim.min_lr" and optim.min_lr is None:
        return f"null is {optim.end_lr:g}, 0.1 x optim.lr={optim.lr:g}"
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
        items = schema["prefixItems"]
        return f"list of {len(items)}: {', '.join(map(type_text, items))}"
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
    for folder in ("conf", "recipes"):
        if file.is_relative_to(CONF.parent / folder):
            return str(file.relative_to(CONF.parent))
    return str(file)


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
    """Effect of the key under the recipe, in one line. Empty for a node."""
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
        if self.is_node:
            return _node_text(self)
        return _key_text(self)

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
            "explain: expected a Recipe, or a list of overrides such as ['recipe=llama_8b',"
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
            "recipe: not a key, but a choice by name; `fp8cfg list recipe` shows the names"
        )
    if full(key) not in fields():
        raise ConfigError(foreign_names.unknown(short(full(key)), short_keys()))
    return full(key)


def explained(recipe: ResolvedRecipe, key: str) -> Explanation:
    """Explains a key under a composed recipe.

    Args:
        recipe: The recipe with its layers.
        key: Full name of a key or node.
    """
    if is_node(key):
        values = {}
        for name, value in flat(recipe.recipe).items():
            if name.startswith(f"{key}."):
                values[short(name)] = value
        description = one_line(fields()[key].description)
        return Explanation(short(key), key, values, description, {}, "", ())
    schema = key_schema(key)
    layers = tuple(key_history(fold(recipe.layers), key))
    return Explanation(
        short(key),
        key,
        layers[-1].values[key],
        schema["description"],
        schema,
        effect(recipe.recipe, key, recipe.written),
        layers,
    )


def _from_object(recipe: Recipe) -> ResolvedRecipe:
    """Wraps a Recipe object in layers. Set values and values other than defaults are the user's."""
    layer = Layer(Source.ASSIGNED, Location(), stated_values(recipe), Rank.USER)
    return ResolvedRecipe(recipe, (default_layer(), layer))


def _key_text(explanation: Explanation) -> str:
    """Formats the explanation of a key. An arrow marks the winning layer."""
    lines = [
        wrapped(f"{explanation.key} = {shown(explanation.value)}", more="    "),
        wrapped(explanation.description, "  ", "  "),
        "",
    ]
    for name, fact in _facts(explanation).items():
        lines.append(wrapped(f"{name:11}{fact}", "  ", " " * 13))
    lines += ["", "set by, in order"]
    key = explanation.full_name
    values = [shown(layer.values[key]) for layer in explanation.layers]
    width = min(_VALUE, max(map(len, values)))
    for layer, value in zip(explanation.layers, values, strict=True):
        mark = "  ->" if layer is explanation.layers[-1] else "    "
        source = source_text(layer, key)
        # A long value gets its own line, to keep the column of sources aligned.
        if len(value) <= width:
            lines.append(wrapped(f"{value:{width}}  {source}", f"{mark} ", " " * (width + 7)))
        else:
            lines += [wrapped(value, f"{mark} ", " " * 5), wrapped(source, " " * 7, " " * 7)]
    return "\n".join(lines)


def _facts(explanation: Explanation) -> dict[str, str]:
    """Returns type, effect, example and full name of a key, by label."""
    schema = dict(explanation.schema)
    facts = {
        "type": f"{type_text(schema)}; default {shown(schema['default'])}",
        "effect": explanation.effect,
    }
    word = example(explanation.full_name)
    if word is not None:
        facts["example"] = word
    if explanation.full_name != explanation.key:
        facts["full name"] = explanation.full_name
    return facts


def _node_text(explanation: Explanation) -> str:
    """Formats a table of a node's keys with values and meanings. Meanings are cut to the width."""
    rows = []
    for name in fields()[explanation.full_name].annotation.model_fields:
        key = f"{explanation.full_name}.{name}"
        value = "..."
        if not is_node(key):
            value = _cut_value(shown(explanation.value[short(key)]))
        rows.append([f"  {name}", value, fields()[key].description])
    room = output_width() - 4
    for column in (0, 1):
        room -= max(len(row[column]) for row in rows)
    for row in rows:
        first_sentence = one_line(row[2]).partition(". ")[0]
        row[2] = cut(first_sentence, room)
    head = wrapped(f"{explanation.key}: {explanation.description}")
    return "\n".join([head, table(rows[0], rows[1:])])


def _cut_value(value: str) -> str:
    """Cuts a value to 16 characters."""
    if len(value) <= 16:
        return value
    return f"{value[:13]}..."


def source_text(layer: Layer, key: str) -> str:
    """Describes the source of a value.

    Args:
        layer: The layer of the value.
        key: Full name of the key.

    Returns:
        Text such as "command line: fp8.margin=1" or "recipe.yaml:3".
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
    if not line:
        return path(location.file)
    return f"{path(location.file)}:{line}"


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
