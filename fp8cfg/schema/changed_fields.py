"""Changed fields of a node, set by the user or a preset, and the violations if they do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from fp8cfg.schema.keys import spelled
from fp8cfg.schema.node import Node
from fp8cfg.schema.violation import Violation

WRITTEN: ContextVar[frozenset[str]] = ContextVar("WRITTEN", default=frozenset())
"""Short names of the keys that the user wrote, while the rules run. Empty if they are unknown.

`rules.broken` sets it, and `_changed_fields` reads it far below.
"""


def changed(node: Node, *names: str) -> list[str]:
    """Lists the fields of `node` with a value other than the default, or written by the user.

    Args:
        node: The node. Fields of nodes inside it count too.
        names: The fields to look at. All fields if empty.

    Returns:
        `key=value` for each field.
    """
    return [f"{key}={spelled(value)}" for key, value, _ in _changed_fields(node, names)]


def idle(node: Node, names: Sequence[str], reason: str, *caused_by: str) -> Iterator[Violation]:
    """Yields a violation for each of the fields `names` of `node` that was changed.

    Args:
        node: The node.
        names: The fields without effect.
        reason: The end of the message after "has no effect".
        caused_by: Short names of the keys responsible for that.
    """
    return conflicting(node, names, f"has no effect{reason}", *caused_by)


def conflicting(
    node: Node, names: Sequence[str], message: str, *caused_by: str
) -> Iterator[Violation]:
    """Yields violations as `idle` does, with any message.

    Args:
        node: The node.
        names: The conflicting fields.
        message: The whole message.
        caused_by: Short names of the other keys.
    """
    for key, value, default in _changed_fields(node, names):
        yield Violation(f"{key}={spelled(value)}", message, [(key, default)], caused_by)


def _changed_fields(node: Node, names: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the key, the value and the default of each changed field."""
    fields = type(node).model_fields
    for name in names or fields:
        value = getattr(node, name)
        if isinstance(value, Node):
            yield from _changed_fields(value, ())
            continue
        # A written key counts even at its default: `fp8.margin=0` under current scaling is a mistake.
        key = node.key(name)
        default = fields[name].get_default(call_default_factory=True)
        if value != default or key in WRITTEN.get():
            yield key, value, default
