"""Provenance in Python: the statement that set each key, found by watching the nodes while recipe functions run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from fp8cfg.config import presets, recipe_registry
from fp8cfg.config.node import WATCH, Node

T = TypeVar("T")
_NOT_OURS = (
    "fp8cfg.config",
    "fp8cfg.composition",
    "pydantic",
    "copy",
    "importlib",
    "_frozen_importlib",
)
"""Modules whose frames stand between a recipe's statement and the node that it sets."""


@dataclass(frozen=True)
class Place:
    """A statement: its file and line, the functions it runs in, outermost first, and the precision preset that it reads,
    as it names it."""

    file: Path
    line: int
    functions: tuple[str, ...] = ()
    preset: str = ""


@dataclass(frozen=True)
class Event:
    """A field was set, at `order` in the sequence of all events, which copies of its node share. `given` is False for the
    node that a field has by default."""

    order: int
    name: str
    value: Any
    place: Place
    given: bool = True


class Recorder:
    """The events of every node that was made or changed inside `run`."""

    def __init__(self, before: Recorder | None = None) -> None:
        self._order: count[int] = before._order if before else count()
        # The nodes are held too, so that none of their ids is given to another node.
        self._seen: dict[int, tuple[Node, list[Event]]] = {}
        for key, (node, events) in before._seen.items() if before else ():
            self._seen[key] = node, list(events)

    def run(self, make: Callable[[], T]) -> T:
        """`make()`, recorded."""
        token = WATCH.set(self._watch)
        try:
            return make()
        finally:
            WATCH.reset(token)

    def events(self, node: Node, key: str, before: float = float("inf")) -> list[Event]:
        """What set `key` below `node`, in order; a value that is back to its default because the node that held it was
        replaced is an event of the replacement."""
        name, _, rest = key.partition(".")
        mine = [e for e in self._of(node) if e.name == name and e.order < before]
        if not rest:
            return [e for e in mine if e.given]
        found, last = list[Event](), list[Event]()
        for event, replaced in pairwise([*mine, None]):
            assert event is not None
            inside = self.events(event.value, rest, replaced.order if replaced else before)
            if [e.order for e in inside[: len(last)]] == [
                e.order for e in last
            ]:  # a copy knows its original's events
                found += inside[len(last) :]
            else:
                made = inside and inside[0].order < event.order
                found += (
                    inside if made else [replace(event, value=_default(event.value, rest)), *inside]
                )
            last = inside
        return found

    def _of(self, node: Node) -> list[Event]:
        return self._seen[id(node)][1]

    def _watch(self, node: Node, given: Iterable[str], original: Node | None) -> None:
        place = _place()
        if original is not None:
            self._adopt(original, place)
            self._seen[id(node)] = node, [_moved(e, original, node) for e in self._of(original)]
        elif id(node) in self._seen:
            self._add(node, given, place)
        else:
            self._adopt(node, place, given)

    def _adopt(self, node: Node, place: Place, given: Iterable[str] | None = None) -> None:
        """Begin with `node`, if it is new: one that was made before recording began enters at the statement that takes it."""
        if id(node) in self._seen:
            return
        given = set(node.model_fields_set if given is None else given) & set(
            type(node).model_fields
        )
        self._seen[id(node)] = node, []
        self._add(
            node,
            [
                n
                for n in type(node).model_fields
                if n in given or isinstance(getattr(node, n), Node)
            ],
            place,
            given,
        )

    def _add(
        self, node: Node, names: Iterable[str], place: Place, given: Iterable[str] | None = None
    ) -> None:
        for name in names:
            value = getattr(node, name)
            if isinstance(value, Node):
                self._adopt(value, place)
            self._of(node).append(
                Event(next(self._order), name, value, place, given is None or name in given)
            )


@functools.cache
def at_import() -> Recorder:
    """What recipe modules did when they were imported: their tables and constants. Nothing, if they were imported before."""
    recorder = Recorder()
    recorder.run(recipe_registry.recipes)
    return recorder


def _moved(event: Event, original: Node, copy: Node) -> Event:
    """`event` of `original` as one of its `copy`: where its value is the node that stands there still, that of the copy."""
    if isinstance(event.value, Node) and event.value is getattr(original, event.name):
        return replace(event, value=getattr(copy, event.name))
    return event


def _default(node: Node, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), type(node)())


def _place() -> Place:
    """The innermost statement under `run` that is not this package's or a library's."""
    frame: FrameType | None = sys._getframe(1)
    file, line, functions, preset = Path(), 0, list[str](), ""
    while frame and frame.f_code is not Recorder.run.__code__:
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code is presets.precision_preset.__code__ and not line:
            preset = frame.f_locals["name"]
        elif not any(module == m or module.startswith(m + ".") for m in _NOT_OURS):
            if not line:
                file, line = Path(frame.f_code.co_filename), frame.f_lineno
                if module.startswith("fp8cfg.recipes."):
                    file = file.resolve()  # in a checkout that package is a link
            if not frame.f_code.co_name.startswith("<"):
                functions.append(frame.f_code.co_name)
        frame = frame.f_back
    return Place(file, line, tuple(reversed(functions)), preset)
