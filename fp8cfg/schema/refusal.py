"""Refusals of the rules between keys: a line each, and the values of keys with which it would be none.

Who wrote a value decides what a conflict means. The rules say which keys can give way, to which keys and with what value;
composition, which knows who wrote what, lets them (composition/precedence.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Self

from fp8cfg.schema.keys import spelled
from fp8cfg.schema.node import Node

WRITTEN: ContextVar[frozenset[str]] = ContextVar("WRITTEN", default=frozenset())
"""The keys, by their short names, that the user wrote himself, while the rules are asked; none where nobody knows."""


class Refusal(str):
    """A line that refuses a recipe.

    `gives` has the keys that can give way, by their short names, each with the nearest legal value; of several the first that
    may. `to` are the keys that they give way to. `tacit` is a refusal of what does no harm, and no mistake of whoever took a
    preset: it holds where a key of `gives` is written alone.
    """

    gives: Sequence[tuple[str, Any]]
    to: Sequence[str]
    tacit: bool

    def __new__(
        cls, line: str, gives: Sequence[tuple[str, Any]], to: Sequence[str], tacit: bool = False
    ) -> Self:
        new = super().__new__(cls, line)
        new.gives, new.to, new.tacit = gives, to, tacit
        return new


class LayoutRefusal(str):
    """A line that refuses a parallel layout, which is never changed for the user."""


def holds(line: str, written: Collection[str]) -> bool:
    """Whether the line refuses a recipe of which the user wrote these keys."""
    return (
        not isinstance(line, Refusal)
        or not line.tacit
        or any(key in written for key, _ in line.gives)
    )


def changed(node: Node, *names: str) -> list[str]:
    """`key=value` of each field of `node` (of `names`, if given) that differs from its default, or that the user wrote; nested
    fields included."""
    return [f"{key}={spelled(value)}" for key, value, _ in _fields(node, names)]


def idle(node: Node, names: Sequence[str], why: str, *to: str) -> Iterator[Refusal]:
    """A refusal, `why` it has no effect, of each of those fields. It gives way with its default to the keys `to`."""
    return conflicting(node, names, f"has no effect{why}", *to)


def conflicting(node: Node, names: Sequence[str], why: str, *to: str) -> Iterator[Refusal]:
    """As `idle`, of fields that do something which the keys `to` do not allow."""
    for key, value, default in _fields(node, names):
        yield Refusal(f"{key}={spelled(value)}: {why}", [(key, default)], to)


def _fields(node: Node, names: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """Key, value and default."""
    for name in names or type(node).model_fields:
        value, key = getattr(node, name), node.key(name)
        if isinstance(value, Node):
            yield from _fields(value, ())
            continue
        default = type(node).model_fields[name].get_default(call_default_factory=True)
        if value != default or key in WRITTEN.get():
            yield key, value, default
