"""Explanation of a key: type, default, meaning, effect under a recipe, and every layer that set it; as text and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8cfg.composition.flatten import flat, is_node
from fp8cfg.composition.giving_way import Settled
from fp8cfg.composition.provenance import Layer, Origin, Trace, trace
from fp8cfg.config import foreign_names
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.key_names import full, short
from fp8cfg.config.recipe import Recipe, fields, short_keys
from fp8cfg.report.key_effect import effect
from fp8cfg.report.schema_json import key_schema
from fp8cfg.report.tables import WIDTH, table, wrapped
from fp8cfg.report.value_text import cut, kind, path, shown

_VALUE = 24
"""Columns of values that stand beside something else."""


@dataclass(frozen=True)
class Explanation:
    """A key of a recipe, or a node, as `fp8`, with the keys below it. `str()` is what `fp8cfg explain` prints."""

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
        """Whether there are keys below it."""
        return not self.schema

    def data(self) -> dict[str, Any]:
        """The same as plain data, as `fp8cfg explain --json` prints it."""
        names = {"key": self.key, "full_name": self.full_name}
        if self.is_node:
            return {**names, "description": self.description, "values": self.value}
        return {
            **names,
            "value": self.value,
            "schema": self.schema,
            "effect": self.effect,
            "layers": [_layer_data(layer) for layer in self.layers],
        }

    def __str__(self) -> str:
        return _node_text(self) if self.is_node else _key_text(self)


def explain(recipe: Recipe | Sequence[str], key: str) -> Explanation:
    """Explanation of `key`, by its short or full name, under `recipe`: a Recipe, which need not obey its rules, or the words that
    compose one. Words tell which file, function or word set the key; of a Recipe it is known whether it sets the key, and no more.

    Raises ConfigError where there is no such key, and for words that compose nothing.
    """
    if not isinstance(key, str):
        raise ConfigError(f"explain: expected a key such as 'fp8.margin', got {type(key).__name__}")
    name = known(key)
    if isinstance(recipe, Recipe):
        return explained(_at_hand(recipe), name)
    if not isinstance(recipe, (list, tuple)) or not all(isinstance(word, str) for word in recipe):
        raise ConfigError(
            "explain: expected a Recipe, or a list of words such as ['recipe=llama_8b',"
            f" 'fp8.margin=1'], got {type(recipe).__name__}"
        )
    return explained(trace(recipe), name)


def known(key: str) -> str:
    """The full name of `key`. Raises ConfigError, with the nearest name, where there is no such key."""
    if key == "recipe":
        raise ConfigError(
            "recipe: is chosen by name, it is not a key; `fp8cfg list recipe` shows the names"
        )
    if full(key) not in fields():
        raise ConfigError(foreign_names.unknown(short(full(key)), short_keys()))
    return full(key)


def explained(trace: Trace, key: str) -> Explanation:
    """Explanation of the full `key` under a traced recipe."""
    if is_node(key):
        values = {short(k): v for k, v in flat(trace.recipe).items() if k.startswith(f"{key}.")}
        return Explanation(short(key), key, values, _line(fields()[key].description), {}, "", ())
    schema, layers = key_schema(key), tuple(trace.layers[key])
    does = effect(trace.recipe, key, trace.settled.written)
    return Explanation(
        short(key), key, layers[-1].value, _line(schema["description"]), schema, does, layers
    )


def _at_hand(recipe: Recipe) -> Trace:
    """The layers of a recipe of which only its values are known."""
    layers = {key: [Layer("schema default", value)] for key, value in flat(Recipe()).items()}
    for key, value in flat(recipe).items():
        *nodes, leaf = key.split(".")
        node: Any = recipe
        for name in nodes:
            node = getattr(node, name)
        if leaf in node.model_fields_set or value != layers[key][0].value:
            layers[key].append(Layer("recipe", value))
    return Trace(recipe, layers, {}, Settled(recipe))


def _key_text(e: Explanation) -> str:
    """The last layer, which is the value, is marked."""
    lines = [
        wrapped(f"{e.key} = {shown(e.value)}", more="    "),
        wrapped(e.description, "  ", "  "),
        "",
    ]
    facts = {
        "type": f"{kind(dict(e.schema))}; default {shown(e.schema['default'])}",
        "effect": e.effect,
    }
    if e.full_name != e.key:
        facts["full name"] = e.full_name
    for name, fact in facts.items():
        lines.append(wrapped(f"{name:11}{fact}", "  ", " " * 13))
    lines += ["", "set by, in order"]
    width = min(_VALUE, max(len(shown(layer.value)) for layer in e.layers))
    for layer in e.layers:
        mark, value = "  ->" if layer is e.layers[-1] else "    ", shown(layer.value)
        if len(value) <= width:
            lines.append(
                wrapped(f"{value:{width}}  {_where(layer)}", f"{mark} ", " " * (width + 7))
            )
        else:
            lines += [wrapped(value, f"{mark} ", " " * 5), wrapped(_where(layer), " " * 7, " " * 7)]
    return "\n".join(lines)


def _node_text(e: Explanation) -> str:
    """A line for each key of a node: its value, and what it means as far as there is room."""
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
        row[2] = cut(_line(row[2]).partition(". ")[0], WIDTH - sum(wide) - 4)
    return "\n".join([wrapped(f"{e.key}: {e.description}"), table(rows[0], rows[1:])])


def _line(text: str) -> str:
    return " ".join(text.split())


def _short(value: str) -> str:
    return value if len(value) <= 16 else f"{value[:13]}..."


def _where(layer: Layer) -> str:
    at, by = _origin(layer.at), _origin(layer.by)
    if layer.kind in ("schema default", "recipe function", "recipe"):
        return at or layer.kind
    if layer.kind in ("command line", "gave way"):
        return f"{layer.kind}{' to' if layer.kind == 'gave way' else ':'} {at}"
    missing = "" if layer.at.line else " does not have it"
    return at + missing + (f", by {by}" if by else "")


def _origin(origin: Origin) -> str:
    if not origin.file:
        return shown(origin.text) if origin.text else ""
    line = f":{origin.line}" if origin.line else ""
    return path(origin.file) + line + (f" in {origin.text}" if origin.text else "")


def _layer_data(layer: Layer) -> dict[str, Any]:
    return {
        "layer": layer.kind,
        "value": layer.value,
        "at": _origin_data(layer.at),
        "by": _origin_data(layer.by),
    }


def _origin_data(origin: Origin) -> dict[str, Any] | None:
    data = {
        "file": str(origin.file) if origin.file else None,
        "line": origin.line,
        "text": origin.text or None,
    }
    return {k: v for k, v in data.items() if v is not None} or None
