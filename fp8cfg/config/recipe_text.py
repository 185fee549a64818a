"""Recipe as text, for a terminal and a notebook: what differs from the schema's defaults first; and what two recipes differ in."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from fp8cfg.config.key_names import short
from fp8cfg.config.node import Node
from fp8cfg.config.validation_errors import walk
from fp8cfg.config.value_text import shown

_WIDTH = 80


class Leaf(NamedTuple):
    """A key, by its short name, its value and its default."""

    key: str
    value: Any
    default: Any


class Differences(dict[str, tuple[Any, Any]]):
    """The keys in which two recipes differ, by their short names, each with both values; printed a line each."""

    def __repr__(self) -> str:
        return (
            "\n".join(f"{key}: {shown(a)} -> {shown(b)}" for key, (a, b) in self.items())
            or "no difference"
        )


def leaves(recipe: Node) -> list[Leaf]:
    """Every key of `recipe` that is no node."""
    return [
        Leaf(short(key), attrgetter(key)(recipe), default)
        for key, info in walk(type(recipe))
        if not isinstance(default := info.get_default(call_default_factory=True), Node)
    ]


def differences(a: Node, b: Node) -> Differences:
    """What differs between `a` and `b`, in the order of the schema."""
    return Differences(
        {
            x.key: (x.value, y.value)
            for x, y in zip(leaves(a), leaves(b), strict=True)
            if x.value != y.value
        }
    )


def text(name: str, recipe: Node) -> str:
    """The recipe in lines of 80 columns, a paragraph a node: what differs from the defaults, and the rest."""
    found = [x for x in leaves(recipe) if x.key != "name"]
    apart, rest = (
        [x for x in found if x.value != x.default],
        [x for x in found if x.value == x.default],
    )
    return "\n".join([f"Recipe {name}", *_nodes(apart), "at their defaults", *_nodes(rest)])


def page(name: str, recipe: Node) -> str:
    """The recipe as HTML: a table of what differs from the defaults, and the rest to be opened."""
    found = leaves(recipe)
    apart = [_row(x.key, x.value, x.default) for x in found if x.value != x.default]
    rest = [_row(x.key, x.value) for x in found if x.value == x.default]
    return (
        f"<b>Recipe {html.escape(name)}</b>"
        f"<table><tr><th>key</th><th>value</th><th>default</th></tr>{''.join(apart)}</table>"
        f"<details><summary>at their defaults</summary><table>{''.join(rest)}</table></details>"
    )


def _nodes(found: list[Leaf]) -> Iterator[str]:
    """A paragraph for each node that has keys in `found`."""
    by_node: dict[str, list[str]] = {}
    for node, name, value in ((*x.key.rpartition(".")[::2], x.value) for x in found):
        by_node.setdefault(node, []).append(f"{name}={shown(value)}")
    for node, values in by_node.items():
        head = f"  {node}: " if node else "  "
        yield textwrap.fill(
            ", ".join(values),
            _WIDTH,
            initial_indent=head,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _row(*cells: Any) -> str:
    return f"<tr>{''.join(f'<td>{html.escape(shown(cell))}</td>' for cell in cells)}</tr>"
