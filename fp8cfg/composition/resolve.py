"""Recipe resolution: a base recipe, presets and values are merged in that order. Rules between keys are not checked here.

Words of the command line are merged by Hydra; a recipe's file is merged key by key onto the recipe that it builds on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fp8cfg.composition.config_groups import GROUPS, LEAVES, PARTS, Library
from fp8cfg.composition.defaults_list import SELF, Step, steps, taken
from fp8cfg.composition.flatten import deep_merge, flat, listed, nested
from fp8cfg.composition.group_files import Part, part, refuse_package
from fp8cfg.composition.hydra_compose import merge
from fp8cfg.composition.override_words import parse
from fp8cfg.composition.yaml_lines import key_lines
from fp8cfg.composition.yaml_recipe import full_names
from fp8cfg.config import foreign_names, recipe_registry
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.files import STDIN, default_recipe
from fp8cfg.config.hugging_face_folder import FROM_HF, shaped
from fp8cfg.config.key_names import full
from fp8cfg.config.node import Node
from fp8cfg.config.recipe import Recipe

T = TypeVar("T")


def unchecked(
    words: Sequence[str], library: Library, file: Path | None = None, base: Recipe | None = None
) -> Recipe:
    """The Recipe of `words`, as `compose` takes them; its rules between keys are not checked. Raises ConfigError with every
    problem of a word or a file."""
    given = recipe_from(file, library) if file else base
    chosen, values = parse(words, library, given is not None)
    for group in [group for group in chosen if library.own(group)]:
        for other, name in part_of(group, chosen[group], library).chosen.items():
            if other == "recipe" and given is not None:
                raise ConfigError(
                    f"{group}={chosen[group]}: chooses recipe={name}, and the recipe is given"
                    " already"
                )
            chosen.setdefault(other, name)
    if given is None and "recipe" not in chosen:
        chosen["recipe"] = default_recipe()
    in_order = sorted(
        chosen.items(),
        key=lambda choice: (library.own(choice[0]) is not None) + (choice[0] not in GROUPS),
    )
    nodes = {group: node(group, stem, library) for group, stem in in_order}
    if given is not None:
        nodes = {"recipe": listed(given), **nodes}
    _fit_parts(nodes, chosen, library)
    recipe = Recipe(**merge(nodes, chosen, values))
    path = recipe.model.path
    if given is None and chosen["recipe"] == FROM_HF:
        if path is None:
            raise ConfigError(
                f"recipe={FROM_HF}: needs model.path, the folder of a Hugging Face checkpoint"
            )
        nodes["recipe"] = listed(_from_hf(path))
        _fit_parts(nodes, chosen, library)
        recipe = Recipe(**merge(nodes, chosen, values))
    elif path is not None and path != (given or Recipe(**nodes["recipe"])).model.path:
        raise ConfigError(
            f"model.path={path}: gives a shape to recipe={FROM_HF} alone; of other recipes write "
            f"model.weights={path}"
        )
    return recipe


def _fit_parts(
    nodes: dict[str, dict[str, Any]], chosen: Mapping[str, str], library: Library
) -> None:
    """Let tasks say no more than goes over the recipe of `nodes`."""
    if any(group in chosen for group in PARTS):
        base = flat(Recipe(**nodes["recipe"]))
        nodes |= {
            group: part_of(group, chosen[group], library).over(group, base).data
            for group in PARTS
            if group in chosen
        }


def _from_hf(folder: str) -> Recipe:
    """The recipe from_hf with the shape that a folder has."""
    base = recipe_registry.named(FROM_HF)
    base.model.path = folder
    return shaped(base)


def node(group: str, stem: str, library: Library) -> dict[str, Any]:
    """The choice `stem` of `group`, which `library.problem` does not refuse, as plain data: a complete node; of a group of one's
    own the keys that it sets, from the recipe down, with the choices that it makes as Hydra's `defaults`. Raises ConfigError,
    naming the file where one is at fault."""
    path = library.file(group, stem)
    if group == "recipe":
        return listed(recipe_from(path, library) if path else recipe_registry.named(stem))
    assert path is not None, f"{group}={stem} is no choice"
    if group in LEAVES:
        return listed(_in_file(path, lambda: _whole(group, path, library)))
    said = part_of(group, stem, library)
    defaults = [{f"override /{other}": name} for other, name in said.chosen.items()]
    return {**({"defaults": ["_self_", *defaults]} if defaults else {}), **said.data}


def part_of(group: str, stem: str, library: Library) -> Part:
    """As `node`, of a group of one's own."""
    path = library.file(group, stem)
    assert path is not None, f"{group}={stem} is no choice"
    return _in_file(path, lambda: part(path, group, library))


def _whole(group: str, path: Path, library: Library) -> Node:
    refuse_package(path, group, library)
    data = library.data(path)
    if "defaults" in data:
        raise ConfigError(
            f"defaults: a {group} preset builds on no other; write all its keys here, or '/{group}:"
            " NAME' in the defaults of a recipe's file, and there what differs"
        )
    return LEAVES[group][0](**data)


def recipe_from(path: Path, library: Library) -> Recipe:
    """The recipe in the file `path`."""
    data = library.data(path)
    return _in_file(path, lambda: recipe_of(data, path, library))


def recipe_of(data: dict[str, Any], path: Path, library: Library) -> Recipe:
    """The recipe that the file `path` with the content `data` says."""
    if project := foreign_names.project(data):
        raise ConfigError(f"has the keys of another project; write: fp8cfg import {project} {path}")
    _refuse_choices(data, library)
    found, made = list(steps(data, path, library)), dict[str, Any]()
    for step in found:
        after = functools.partial(_after, made, step, found, library)
        made = after() if step.path == path else _in_file(step.path, after)
    return Recipe(**made)


def _refuse_choices(data: Mapping[str, Any], library: Library) -> None:
    """Raise ConfigError for choices that there are not, and then at once for wrong values: these do not depend on the recipe that
    they change."""
    values = dict(data)
    chosen = [c for c in taken(values, library) if c.group != SELF and c.name and not c.optional]
    if problems := [p for c in chosen if (p := library.problem(c.group, c.name))]:
        try:
            Recipe(**deep_merge(listed(Recipe()), full_names(values)))
        except ConfigError as e:
            problems += e.problems
    refuse_if(problems)


def _after(
    made: dict[str, Any], step: Step, found: Sequence[Step], library: Library
) -> dict[str, Any]:
    """The recipe `made` by the steps before `step`, of those that are `found`, after it."""
    group, name = step.choice.group, step.choice.name
    if group == SELF:
        return listed(Recipe(**deep_merge(made, full_names(dict(step.values)))))
    if problem := library.problem(group, name):
        raise ConfigError(problem)
    if group == "recipe":
        folders = (
            [path for s in found if (path := _model_path(s.values))] if name == FROM_HF else []
        )
        return listed(_from_hf(folders[-1]) if folders else recipe_registry.named(name))
    if group not in LEAVES:
        said = part_of(group, name, library)
        refuse_if(
            [
                f"{group}={name}: chooses {other} itself, where it is a word;"
                f" write '/{other}: {its}' in this file too"
                for other, its in said.chosen.items()
            ]
        )
        return deep_merge(made, said.over(group, flat(Recipe(**made))).data)
    return deep_merge(
        made, nested({LEAVES[group][1]: node(group, library.stem(group, name), library)})
    )


def _model_path(values: Mapping[str, Any]) -> str | None:
    """What a file's own `values` say for model.path."""
    model = full_names(dict(values)).get("model")
    path = model.get("path") if isinstance(model, dict) else None
    return path if isinstance(path, str) else None


def _in_file(path: Path, build: Callable[[], T]) -> T:
    """`build()`, with the file's name before each line of a ConfigError, and the line of the key that it begins with."""
    try:
        return build()
    except ConfigError as e:
        lines = (
            {full(key): line for key, line in key_lines(path).items()}
            if path == STDIN or path.is_file()
            else {}
        )
        raise ConfigError(
            [p if p.startswith(str(path)) else f"{path}{_line(p, lines)}: {p}" for p in e.problems]
        ) from None


def _line(problem: str, lines: Mapping[str, int]) -> str:
    """`:4` for a problem of a key that stands in line 4; of a key that does not stand there nothing."""
    line = lines.get(full(re.split("[=:]", problem, maxsplit=1)[0]))
    return f":{line}" if line else ""
