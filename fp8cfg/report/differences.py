"""Differences between two recipes, two graphs or two environments, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.schema.keys import shown
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import fits, table, wrapped

Pairs = dict[str, tuple[Any, Any]]


def keys(a: Recipe, b: Recipe) -> Pairs:
    """The keys that differ, by their short names, with both values."""
    return a.diff(b)


def versions(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    """What differs between two environment.json: Python, packages, CUDA, GPUs, and the code's commit."""
    return pairs(_versions(a), _versions(b))


def pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    """The keys under which `a` and `b` differ, with both values; None where one of them has no such key."""
    return {
        k: (a.get(k), b.get(k)) for k in [*a, *(k for k in b if k not in a)] if a.get(k) != b.get(k)
    }


def text(name_a: str, name_b: str, parts: Mapping[str, Pairs]) -> str:
    """Both names and a table for each of `parts` (title -> what differs), or that there is no difference. No leaf of a graph is
    null: there None says that a graph does not have it."""
    if not any(parts.values()):
        return "no difference"
    names = [wrapped(name, f"{side}  ", "   ") for side, name in (("A", name_a), ("B", name_b))]
    return "\n".join(
        names + ["\n" + _table(title, found) for title, found in parts.items() if found]
    )


def _table(title: str, found: Pairs) -> str:
    rows = [
        [key, *("-" if title == "leaf" and v is None else shown(v) for v in both)]
        for key, both in found.items()
    ]
    header = [title, "A", "B"]
    if fits(header, rows):
        return table(header, rows)
    return "\n".join(
        [
            title,
            *(
                f"{key}\n{wrapped(a, '  A  ', '     ')}\n{wrapped(b, '  B  ', '     ')}"
                for key, a, b in rows
            ),
        ]
    )


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    packages, code = (
        {**found} if isinstance(found := environment.get(k), dict) else {}
        for k in ("packages", "code")
    )
    rest = {k: environment.get(k) for k in ("python", "cuda", "gpus")}
    return {**rest, **packages, "code": code.get("commit"), "code changed": code.get("dirty")}
