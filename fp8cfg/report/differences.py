"""Differences between two recipes, two graphs or two environments, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.schema.keys import shown
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import fits, table, wrapped

Pairs = dict[str, tuple[Any, Any]]


def keys(a: Recipe, b: Recipe) -> Pairs:
    """Compares two recipes. Returns both values of each different key, by short name."""
    return a.diff(b)


def versions(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    """Compares two environment records (environment.json).

    Args:
        a: The first record. It comes from a file, so entries may be missing.
        b: The second record.

    Returns:
        Both values of each difference in packages, Python, CUDA, GPUs and commit.
    """
    return pairs(_versions(a), _versions(b))


def pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    """Returns both values of each different key. A missing key has the value None."""
    # A list and not a set, to keep the order of keys in the table.
    return {
        k: (a.get(k), b.get(k)) for k in [*a, *(k for k in b if k not in a)] if a.get(k) != b.get(k)
    }


def text(name_a: str, name_b: str, parts: Mapping[str, Pairs]) -> str:
    """Formats differences as tables, for `fp8cfg diff`.

    Args:
        name_a: Name of the first side.
        name_b: Name of the second side.
        parts: The differences by title, such as "key" or "package".

    Returns:
        Both names and a table per title, or "no difference".
    """
    if not any(parts.values()):
        return "no difference"
    names = [wrapped(name, f"{side}  ", "   ") for side, name in (("A", name_a), ("B", name_b))]
    return "\n".join(
        names + ["\n" + _table(title, found) for title, found in parts.items() if found]
    )


def _table(title: str, found: Pairs) -> str:
    """Formats one table, or one block per key if the terminal is too narrow."""
    # No leaf of a graph is null, so None is a missing leaf.
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
    """Flattens the entries of an environment record for `versions`."""
    # A damaged or old file may have no mapping here.
    packages, code = (
        {**found} if isinstance(found := environment.get(k), dict) else {}
        for k in ("packages", "code")
    )
    rest = {k: environment.get(k) for k in ("python", "cuda", "gpus")}
    return {**rest, **packages, "code": code.get("commit"), "code changed": code.get("dirty")}
