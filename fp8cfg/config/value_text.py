"""Values as text, as YAML and the command line spell them."""

from __future__ import annotations

from typing import Any


def shown(value: Any) -> str:
    """`value` as YAML and the command line spell it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {shown(inner)}' for name, inner in value.items())}}}"
    text = str(value)
    return text if text and text.isprintable() else repr(text)
