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
    # A dictionary and not a set, to keep the order of keys in the table.
    keys = dict.fromkeys([*a, *b])
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


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
    blocks = [wrapped(name_a, "A  ", "   "), wrapped(name_b, "B  ", "   ")]
    for title, different in parts.items():
        if different:
            blocks.append("\n" + _table(title, different))
    return "\n".join(blocks)


def _table(title: str, different: Pairs) -> str:
    """Formats one table, or one block per key if the terminal is too narrow."""
    rows = []
    for key, values in different.items():
        row = [key]
        for value in values:
            # No leaf of a graph is null, so None is a missing leaf.
            is_missing = title == "leaf" and value is None
            row.append("-" if is_missing else shown(value))
        rows.append(row)
    header = [title, "A", "B"]
    if fits(header, rows):
        return table(header, rows)
    lines = [title]
    for key, a, b in rows:
        lines += [key, wrapped(a, "  A  ", "     "), wrapped(b, "  B  ", "     ")]
    return "\n".join(lines)


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens the entries of an environment record for `versions`."""
    packages = environment.get("packages")
    code = environment.get("code")
    # A damaged or old file may have no mapping here.
    if not isinstance(packages, dict):
        packages = {}
    if not isinstance(code, dict):
        code = {}
    result = {key: environment.get(key) for key in ("python", "cuda", "gpus")}
    return result | packages | {"code": code.get("commit"), "code changed": code.get("dirty")}
