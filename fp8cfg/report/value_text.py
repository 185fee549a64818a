"""Values, types and file locations as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8cfg.config.value_text import shown as shown

_KINDS = {
    "boolean": "true or false",
    "integer": "integer",
    "number": "number",
    "string": "text",
    "null": "null",
    "object": "mapping",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


def kind(schema: dict[str, Any]) -> str:
    """The type of a key's JSON Schema in words, with its bounds or choices."""
    if "anyOf" in schema:
        return " or ".join(map(kind, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(shown, schema['enum']))}"
    if "prefixItems" in schema:
        return (
            f"list of {len(schema['prefixItems'])}: {', '.join(map(kind, schema['prefixItems']))}"
        )
    if schema["type"] == "array":
        return f"list of {kind(schema['items'])}"
    bounds = " and ".join(
        f"{words} {schema[bound]}" for bound, words in _BOUNDS.items() if bound in schema
    )
    return _KINDS[schema["type"]] + (f", {bounds}" if bounds else "")


def path(file: Path) -> str:
    """`file` below the working directory or, where it is shipped, by its name in the repository; else as it is."""
    from fp8cfg.config.files import CONF  # inside: `list` prints no place, and is quick

    if file.is_relative_to(Path.cwd()):
        return str(file.relative_to(Path.cwd()))
    shipped = any(file.is_relative_to(CONF.parent / folder) for folder in ("conf", "recipes"))
    return str(file.relative_to(CONF.parent) if shipped else file)


def cut(text: str, width: int) -> str:
    """`text` in at most `width` characters, whole words and "..." where it is longer."""
    if len(text) <= width:
        return text
    return text[: width - 3].rpartition(" ")[0].rstrip(" ,;:(") + "..."
