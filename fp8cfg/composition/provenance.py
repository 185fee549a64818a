"""Provenance of values: every layer (schema default, recipe function, preset, file, word) that set a key, in order."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from fp8cfg.composition import precedence
from fp8cfg.composition.config_groups import LEAVES, PARTS, SELF, Library, Step, steps
from fp8cfg.composition.merge import part_of
from fp8cfg.composition.overrides import one, parsed
from fp8cfg.composition.recipe_yaml import flat, full_names, key_lines, settings
from fp8cfg.schema import presets, recipe_registry
from fp8cfg.schema.hugging_face import CONFIG_FILE as CONFIG
from fp8cfg.schema.keys import PLUGIN, full
from fp8cfg.schema.node import WATCH, Node
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import CONF, default_recipe

T = TypeVar("T")
_NOT_OURS = (
    "fp8cfg.schema",
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


@dataclass(frozen=True)
class Origin:
    """The place of a setting: a line of a file, with the functions that it runs in; or a command-line word."""

    file: Path | None = None
    line: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Layer:
    """One setting of one key: `kind` is "schema default", "recipe function", "preset", "recipe file", "command line", "gave way"
    or, of a Recipe that is given as it is, "recipe"; `at` says where the value stands, or which values it gave way to, and `by`
    what applied it. A preset without a line does not have the key: choosing it put the key back to its default.
    """

    kind: str
    value: Any
    at: Origin = Origin()
    by: Origin = Origin()


@dataclass(frozen=True)
class Trace:
    """A composed recipe, and the layers of every key by its full name, the last of which is its value. `named` has what words and
    files chose, as far as it is shipped: the recipe function at the bottom, and the last preset of each group. `settled` has what
    gave way, and the lines that refuse the recipe."""

    recipe: Recipe
    layers: dict[str, list[Layer]]
    named: dict[str, str]
    settled: precedence.Settled


def trace(
    words: Sequence[str], config_dir: str | Path | None = None, file: Path | None = None
) -> Trace:
    """Compose as `compose` does, recording where each value comes from. Raises ConfigError for what cannot be composed."""
    at_import()  # before anything else imports the recipes
    library = Library(Path(config_dir) if config_dir else None)
    settled = precedence.composed(words, library, file)
    chosen, values = {"recipe": (default_recipe(), Origin())}, list[str]()
    for word in words:
        group, text = one(word, library)
        if group:
            chosen[group] = text, Origin(text=word)
        elif text:
            values.append(word)
    parts = {group: said for group, said in chosen.items() if library.own(group)}
    for group, (name, _) in parts.items():
        path = library.file(group, name)
        for other, its in part_of(group, name, library).chosen.items():
            if other not in chosen or chosen[other][1] == Origin():
                chosen[other] = its, Origin(path)
    tracer = _Tracer(library)
    if file:
        tracer.file(file, Origin())
    else:
        tracer.recipe(*chosen["recipe"])
    for group in LEAVES:
        if group in chosen:
            tracer.preset(group, *chosen[group])
    for group, (name, by) in sorted(parts.items(), key=lambda part: part[0] not in PARTS):
        tracer.part(group, name, by)
    for word in values:
        name, given, _ = parsed(word)
        for key, value in settings({full(name): given}).items():
            tracer.add(key, Layer("command line", value, Origin(text=word)))
    if settled.recipe.model.path:
        read = Origin(Path(settled.recipe.model.path) / CONFIG)
        for key, value in flat(settled.recipe).items():
            if key.startswith("model.") and (
                not tracer.layers[key] or tracer.layers[key][-1].value != value
            ):
                tracer.add(key, Layer("checkpoint", value, read))
    for change in settled.changes:
        tracer.add(change.key, Layer("gave way", change.new, Origin(text=change.cause)))
    assert {key: layers[-1].value for key, layers in tracer.layers.items()} == flat(settled.recipe)
    return Trace(settled.recipe, tracer.layers, tracer.named, settled)


class _Tracer:
    """Repeats the composition step by step and records the layer that sets each key."""

    def __init__(self, library: Library) -> None:
        self.offered = library
        self.layers = {
            key: [Layer("schema default", value)] for key, value in flat(Recipe()).items()
        }
        self.named: dict[str, str] = {}

    def add(self, key: str, layer: Layer) -> None:
        self.layers[key].append(layer)

    def recipe(self, name: str, by: Origin) -> None:
        path = self.offered.file("recipe", name)
        if path:
            return self.file(path, by)
        if by != Origin():
            self.named["recipe"] = name
        self.function(name, by)

    def function(self, name: str, by: Origin) -> None:
        recorder = Recorder(at_import())
        made = recorder.run(recipe_registry.recipes()[name])
        for key in self.layers:
            for event in recorder.events(made, key):
                self.add(key, _of_event(event, key, by))

    def file(self, path: Path, by: Origin) -> None:
        found = list(steps(self.offered.data(path), path, self.offered))
        last = max(i for i, step in enumerate(found) if step.choice.group == "recipe")
        for i, step in enumerate(found):
            group, name = step.choice.group, step.choice.name
            lines = key_lines(step.path)
            says = Origin(step.path, lines.get(step.choice.key))
            if group == SELF:
                chose = (
                    Origin(step.by[0], key_lines(step.by[0])[step.by[1]]) if step.by else Origin()
                )
                self.values(step, chose if step.above else by)
            elif group == "recipe":
                if i == last and not step.choice.standard:
                    self.named["recipe"] = name
                self.function(name, Origin() if step.choice.standard else says)
            elif group in LEAVES:
                self.preset(group, name, says)
            else:
                self.part(group, name, says)

    def values(self, step: Step, by: Origin) -> None:
        """The own values of a file, which `by` chose."""
        lines = {full(key): line for key, line in key_lines(step.path).items()}
        for key, value in settings(full_names(dict(step.values))).items():
            self.add(key, Layer("recipe file", value, Origin(step.path, lines[key]), by))

    def part(self, group: str, name: str, by: Origin) -> None:
        """The keys that a file of a group of one's own has."""
        path, said = self.offered.file(group, name), part_of(group, name, self.offered)
        assert path is not None  # composition has read it
        lines = {
            full(f"{said.package}.{key}".lstrip(".")): line for key, line in key_lines(path).items()
        }
        for key, value in said.over(
            group, {key: layers[-1].value for key, layers in self.layers.items()}
        ).values.items():
            self.add(key, Layer("preset", value, Origin(path, lines.get(key)), by))

    def preset(self, group: str, name: str, by: Origin) -> None:
        path = self.offered.file(group, self.offered.stem(group, name))
        assert path is not None  # composition has read it
        self.named.pop(group, None)
        if path.is_relative_to(CONF):
            self.named[group] = path.stem
        (cls, home), lines = LEAVES[group], key_lines(path)
        for key, value in flat(cls(**self.offered.data(path)), home).items():
            line = lines.get(key.removeprefix(f"{home}."))
            if line or len(self.layers[key]) > 1:
                self.add(key, Layer("preset", value, Origin(path, line), by))


def _of_event(event: Event, key: str, by: Origin) -> Layer:
    """The layer of a statement in a recipe function; of the preset that it reads, where it reads one."""
    place = event.place
    at = Origin(place.file, place.line, " > ".join(place.functions))
    if not place.preset:
        return Layer("recipe function", event.value, at, by)
    path = CONF / "precision" / f"{presets.stem(place.preset)}.yaml"
    return Layer(
        "preset", event.value, Origin(path, key_lines(path)[key.removeprefix(f"{PLUGIN}.")]), at
    )
