"""Key names: the full name of every key of a recipe, and the short ones that stand for parts of the precision plugin.

`fp8.margin` is `trainer.plugins.fp8.margin`. The names stand below the schema, whose error lines show short ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PLUGIN = "trainer.plugins"
ALIASES = {
    "precision": PLUGIN,
    "fp8": f"{PLUGIN}.fp8",
    "storage": f"{PLUGIN}.storage",
    "backend": f"{PLUGIN}.backend",
    "opt_level": f"{PLUGIN}.opt_level",
}
"""Short names, at every door, of nodes and keys of the precision plugin."""
_BY_LENGTH = sorted(ALIASES.items(), key=lambda item: -len(item[1]))


def short(key: str) -> str:
    """The short name of a full key: `trainer.plugins.fp8.margin` is `fp8.margin`."""
    for alias, full in _BY_LENGTH if key.startswith(PLUGIN) else ():
        if key == full or key.startswith(full + "."):
            return alias + key[len(full) :]
    return key


def full(key: str) -> str:
    """The full name of a key that may be short: `fp8.margin` is `trainer.plugins.fp8.margin`."""
    head, dot, rest = key.partition(".")
    return ALIASES.get(head, head) + dot + rest


_RECORD = "_preset_keys"


def record(node: Any, names: Iterable[str]) -> None:
    """The fields `names` of `node`, and no others, are a preset's."""
    vars(node)[_RECORD] = frozenset(names)


def preset_keys(node: Any) -> frozenset[str]:
    """The fields of `node` that a preset wrote; none of a node that was made without one."""
    found = vars(node).get(_RECORD, frozenset())
    assert isinstance(found, frozenset)
    return found


def written(node: Any, name: str, before: frozenset[str]) -> None:
    """The user has assigned the field `name` of `node`, of which the fields `before` were a preset's."""
    if before:
        record(node, before - {name})


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
