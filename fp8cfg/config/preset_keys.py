"""Preset keys: which values of a node a preset or a recipe wrote, and not the user, so that they may give way to him.

The record stands in the node's `__dict__`, where copies take it along, and pydantic leaves it out of comparison and output.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
