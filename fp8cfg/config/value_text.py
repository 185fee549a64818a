"""Values as text, as YAML and the command line spell them."""

from __future__ import annotations

from typing import Any

_WORDS = {None: "null", True: "true", False: "false"}


def shown(value: Any) -> str:
    """`value` as YAML and the command line spell it."""
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {shown(inner)}' for name, inner in value.items())}}}"
    text = str(value)
    return text if text and text.isprintable() else repr(text)


def spelled(value: Any) -> str:
    """`value` in a line about it: as a word of the command line has it, a text without quotes, those of a list with them."""
    if isinstance(value, (list, tuple)):
        items = (repr(inner) if isinstance(inner, str) else spelled(inner) for inner in value)
        return f"[{', '.join(items)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {spelled(inner)}' for name, inner in value.items())}}}"
    return _WORDS[value] if value is None or isinstance(value, bool) else str(value)
