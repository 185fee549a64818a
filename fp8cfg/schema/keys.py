"""Key names: full names, and short names for parts of the precision plugin.

`fp8.margin` is short for `trainer.plugins.fp8.margin`. Messages show short names.
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
"""Short names of nodes and keys of the precision plugin, on the command line, in YAML and Python."""
_BY_LENGTH = sorted(ALIASES.items(), key=lambda item: -len(item[1]))


def short(key: str) -> str:
    """Returns the short name of a key: `fp8.margin` for `trainer.plugins.fp8.margin`."""
    if not key.startswith(PLUGIN):
        return key
    # The longest node first: fp8.margin and not precision.fp8.margin.
    for alias, full_name in _BY_LENGTH:
        if key == full_name or key.startswith(f"{full_name}."):
            return alias + key.removeprefix(full_name)
    return key


def full(key: str) -> str:
    """Returns the full name of a key: `trainer.plugins.fp8.margin` for `fp8.margin`."""
    head, dot, path = key.partition(".")
    return ALIASES.get(head, head) + dot + path


_RECORD = "_preset_keys"


def record(node: Any, names: Iterable[str]) -> None:
    """Records `names` as the fields of `node` from a preset. Replaces an older record."""
    # In the node's __dict__, not in a field: comparison and export do not see it.
    vars(node)[_RECORD] = frozenset(names)


def preset_keys(node: Any) -> frozenset[str]:
    """Returns the fields of `node` from a preset."""
    names = vars(node).get(_RECORD, frozenset())
    assert isinstance(names, frozenset)
    return names


def written(node: Any, name: str, previous: frozenset[str]) -> None:
    """Records an assignment by the user.

    Args:
        node: The node.
        name: The assigned field.
        previous: `preset_keys` before the assignment. pydantic drops the record on assignment.
    """
    if previous:
        record(node, previous - {name})


_WORDS = {None: "null", True: "true", False: "false"}


def shown(value: Any) -> str:
    """Returns `value` as YAML and the command line spell it."""
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(shown(inner) for inner in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {shown(inner)}' for name, inner in value.items())}}}"
    text = str(value)
    if text and text.isprintable():
        return text
    return repr(text)


def spelled(value: Any) -> str:
    """Returns `value` for a message: text without quotes, but with quotes inside a list."""
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    if isinstance(value, (list, tuple)):
        items = (repr(inner) if isinstance(inner, str) else spelled(inner) for inner in value)
        return f"[{', '.join(items)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {spelled(inner)}' for name, inner in value.items())}}}"
    return str(value)
