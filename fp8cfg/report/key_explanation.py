"""What there is to say about one key, or about the keys of a node: as data, and as text of 80 columns."""

from __future__ import annotations

from typing import Any

from fp8cfg.composition.flatten import flat, is_node
from fp8cfg.composition.provenance import Layer, Origin, Trace
from fp8cfg.config.recipe import fields, short
from fp8cfg.report.key_effect import effect
from fp8cfg.report.schema_json import key_schema
from fp8cfg.report.tables import WIDTH, table, wrapped
from fp8cfg.report.value_text import cut, kind, path, shown

_VALUE = 24
"""Columns of values that stand beside something else."""


def key_data(trace: Trace, key: str) -> dict[str, Any]:
    """Everything about the full `key`, no node, under a traced recipe. `schema` is its JSON Schema."""
    layers = trace.layers[key]
    return {
        "key": short(key), "full_name": key, "value": layers[-1].value, "schema": key_schema(key),
        "effect": effect(trace.recipe, key), "layers": [_layer_data(layer) for layer in layers],
    }


def key_text(trace: Trace, key: str) -> str:
    """`key_data` as text. The last layer, which is the value, is marked."""
    schema, layers = key_schema(key), trace.layers[key]
    lines = [wrapped(f"{short(key)} = {shown(layers[-1].value)}", more="    "), wrapped(schema["description"], "  ", "  "), ""]
    facts = {"type": f"{kind(schema)}; default {shown(schema['default'])}", "effect": effect(trace.recipe, key)}
    if key != short(key):
        facts["full name"] = key
    for name, fact in facts.items():
        lines.append(wrapped(f"{name:11}{fact}", "  ", " " * 13))
    lines += ["", "set by, in order"]
    width = min(_VALUE, max(len(shown(layer.value)) for layer in layers))
    for layer in layers:
        mark, value = "  ->" if layer is layers[-1] else "    ", shown(layer.value)
        if len(value) <= width:
            lines.append(wrapped(f"{value:{width}}  {_where(layer)}", f"{mark} ", " " * (width + 7)))
        else:
            lines += [wrapped(value, f"{mark} ", " " * 5), wrapped(_where(layer), " " * 7, " " * 7)]
    return "\n".join(lines)


def node_data(trace: Trace, key: str) -> dict[str, Any]:
    """The keys of the node with the full name `key`, those of its nodes included."""
    about = fields()[key].description
    values = {short(k): v for k, v in flat(trace.recipe).items() if k.startswith(f"{key}.")}
    return {"key": short(key), "full_name": key, "description": " ".join(about.split()), "values": values}


def node_text(trace: Trace, key: str) -> str:
    """A line for each key of a node: its value, and what it means as far as there is room."""
    values, rows = flat(trace.recipe), list[list[str]]()
    for name in fields()[key].annotation.model_fields:
        inner = f"{key}.{name}"
        rows.append([f"  {name}", "..." if is_node(inner) else _short(shown(values[inner])), fields()[inner].description])
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for row in rows:
        row[2] = cut(" ".join(row[2].split()).partition(". ")[0], WIDTH - sum(wide) - 4)
    return "\n".join([wrapped(f"{short(key)}: {node_data(trace, key)['description']}"), table(rows[0], rows[1:])])


def _short(value: str) -> str:
    return value if len(value) <= 16 else f"{value[:13]}..."


def _where(layer: Layer) -> str:
    at, by = _origin(layer.at), _origin(layer.by)
    if layer.kind in ("schema default", "recipe function"):
        return at or layer.kind
    if layer.kind == "command line":
        return f"{layer.kind}: {at}"
    missing = "" if layer.at.line else " does not have it"
    return at + missing + (f", by {by}" if by else "")


def _origin(origin: Origin) -> str:
    if not origin.file:
        return shown(origin.text) if origin.text else ""
    line = f":{origin.line}" if origin.line else ""
    return path(origin.file) + line + (f" in {origin.text}" if origin.text else "")


def _layer_data(layer: Layer) -> dict[str, Any]:
    return {"layer": layer.kind, "value": layer.value, "at": _origin_data(layer.at), "by": _origin_data(layer.by)}


def _origin_data(origin: Origin) -> dict[str, Any] | None:
    data = {"file": str(origin.file) if origin.file else None, "line": origin.line, "text": origin.text or None}
    return {k: v for k, v in data.items() if v is not None} or None
