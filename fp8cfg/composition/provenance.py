"""Provenance of values: every layer (schema default, recipe function, preset, file, word) that set a key, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8cfg.composition import giving_way
from fp8cfg.composition.config_groups import LEAVES, PARTS, Library
from fp8cfg.composition.defaults_list import SELF, Step, steps
from fp8cfg.composition.flatten import flat, settings
from fp8cfg.composition.override_words import one
from fp8cfg.composition.parsed_words import parsed
from fp8cfg.composition.python_provenance import Event, Recorder, at_import
from fp8cfg.composition.resolve import part_of
from fp8cfg.composition.yaml_lines import key_lines
from fp8cfg.composition.yaml_recipe import full_names
from fp8cfg.config import presets, recipe_registry
from fp8cfg.config.files import CONF, default_recipe
from fp8cfg.config.hugging_face_folder import CONFIG
from fp8cfg.config.key_names import PLUGIN, full
from fp8cfg.config.recipe import Recipe


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
    settled: giving_way.Settled


def trace(
    words: Sequence[str], config_dir: str | Path | None = None, file: Path | None = None
) -> Trace:
    """Compose as `compose` does, recording where each value comes from. Raises ConfigError for what cannot be composed."""
    at_import()  # before anything else imports the recipes
    library = Library(Path(config_dir) if config_dir else None)
    settled = giving_way.composed(words, library, file)
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
