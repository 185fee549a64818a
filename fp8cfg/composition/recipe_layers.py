"""Layers of a command line, a recipe's file, or a Recipe: one function for each.

    arguments -> Overrides -> layers -> resolve conflicts -> fold -> Recipe
               (parsed once)

The order is Hydra's: the recipe, presets and tasks in the order of conf/config.yaml, groups of the
user's folder, then values.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8cfg.composition.config_groups import (
    MERGING_GROUPS,
    REPLACING_GROUPS,
    SELF,
    Library,
    Part,
    Step,
    check_package,
    file_steps,
    read_part,
    take_choices,
)
from fp8cfg.composition.layers import (
    Layer,
    Location,
    Rank,
    Source,
    default_layer,
    defaults,
    fold,
    node_layer,
)
from fp8cfg.composition.overrides import Override, Overrides
from fp8cfg.composition.recipe_yaml import (
    deep_merge,
    flat,
    full_names,
    key_lines,
    listed,
    settings,
)
from fp8cfg.schema import foreign_files, recipe_registry
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.hugging_face import CONFIG_FILE, FROM_HF, with_pretrained_shape
from fp8cfg.schema.keys import full
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import STDIN, default_recipe, primary_config


def collect_layers(
    overrides: Overrides, library: Library, file: Path | None = None, base: Recipe | None = None
) -> list[Layer]:
    """Returns the layers of a recipe, in order. The folded recipe may still break rules.

    Args:
        overrides: The arguments of the command line.
        library: The choices of each group.
        file: The recipe's file, instead of `recipe=`.
        base: The recipe, instead of `recipe=`.

    Raises:
        ConfigError: With every problem of the file, or for an invalid choice.
    """
    choices = _with_implied_choices(overrides, library, file is not None or base is not None)
    layers = [default_layer()]
    if file is not None:
        layers += file_layers(file, library, Rank.USER)
    elif base is not None:
        layers.append(node_layer(base, Source.RECIPE, Location(base.name), Rank.RECIPE))
    else:
        layers += _chosen_recipe_layers(choices["recipe"], library, overrides.value("model.path"))
    # A task is applied to the layers below it: it only reduces values.
    for group in _groups_in_order(choices):
        choice = choices[group]
        layers.append(
            _choice_layer(group, choice.name, library, layers, Rank.PRESET, choice.location)
        )
    for override in overrides.settings:
        assert override.location is not None  # only a default choice has no location
        layers.append(Layer(Source.COMMAND_LINE, override.location, override.values, Rank.USER))
    check_model_path(layers)
    return layers


def check_model_path(layers: Sequence[Layer]) -> None:
    """Raises ConfigError if the user sets model.path for a recipe that ignores it."""
    if any(layer.source is Source.CHECKPOINT for layer in layers):
        return  # from_hf has read the path
    path = fold(layers).values["model.path"]
    of_recipe = [layer for layer in layers if layer.rank is Rank.RECIPE]
    if path in (None, fold(of_recipe).values["model.path"]):
        return
    last = fold(layers).history["model.path"][-1]
    error = ConfigError(
        f"model.path={path}: only recipe={FROM_HF} takes the model's shape from a folder; set"
        f" recipe={FROM_HF}, or model.weights={path} to load weights"
    )
    if last.location.file is None:
        raise error
    with _named_file(last.location.file):
        raise error


def _with_implied_choices(
    overrides: Overrides, library: Library, has_recipe: bool
) -> dict[str, Override]:
    """Returns the choice of each group.

    An argument's choice wins over a choice in the file of a task or of a user's group, even if it
    is null. A missing recipe is the default recipe.
    """
    choices = dict(overrides.choices)
    for group, choice in overrides.choices.items():
        if not choice.name or library.merging_group(group) is None:
            continue
        location = Location(file=library.file(group, choice.name))
        for key, name in part_of(group, choice.name, library).chosen.items():
            if key == "recipe" and has_recipe:
                raise ConfigError(
                    f"{group}={choice.name}: chooses recipe={name}, but a recipe is already set"
                )
            # Not if an argument chooses in that group.
            choices.setdefault(key, Override(location, key, library.canonical_name(key, name)))
    named = {group: choice for group, choice in choices.items() if choice.name}
    if not has_recipe:
        named.setdefault("recipe", Override(None, "recipe", default_recipe()))
    return named


def _groups_in_order(choices: Mapping[str, Override]) -> list[str]:
    """Returns groups in Hydra's order: conf/config.yaml first, then the user's as first named."""
    ranks: dict[str, int] = {}
    for entry in primary_config()["defaults"]:
        if isinstance(entry, dict):
            ranks |= dict.fromkeys(entry, len(ranks))
    ordered = sorted(choices, key=lambda group: ranks.get(group, len(ranks)))
    return [group for group in ordered if group != "recipe"]


def _chosen_recipe_layers(choice: Override, library: Library, folder: str | None) -> list[Layer]:
    """Returns the layers of `recipe=NAME`: a recipe function or a user's file."""
    path = library.file("recipe", choice.name)
    if path is not None:
        return file_layers(path, library, Rank.RECIPE, choice.location)
    if choice.name == FROM_HF and folder is None:
        raise ConfigError(
            f"recipe={FROM_HF}: needs model.path, the folder of a Hugging Face checkpoint"
        )
    return _function_layers(choice.name, choice.location, folder)


def _function_layers(name: str, chosen_by: Location | None, folder: str | None) -> list[Layer]:
    """Returns the layer of a recipe function, for from_hf also the checkpoint's layer."""
    recipe = recipe_registry.named(name)
    location = Location(f"{recipe_registry.recipes()[name].__module__}.{name}")
    layer = node_layer(recipe, Source.RECIPE, location, Rank.RECIPE)
    layers = [replace(layer, group="recipe", name=name, chosen_by=chosen_by)]
    # The checkpoint's values override the recipe's.
    if name == FROM_HF and folder is not None:
        layers.append(_checkpoint_layer(recipe, folder))
    return layers


def _checkpoint_layer(recipe: Recipe, folder: str) -> Layer:
    """Returns the model's shape in a Hugging Face checkpoint, where it differs from the recipe."""
    recipe_values = flat(recipe)
    recipe.model.path = folder
    values: dict[str, Any] = {}
    for key, value in flat(with_pretrained_shape(recipe)).items():
        if value != recipe_values[key] and key != "model.path":  # the user sets the path
            values[key] = value
    return Layer(Source.CHECKPOINT, Location(f"{folder}/{CONFIG_FILE}"), values)


def _choice_layer(
    group: str,
    name: str,
    library: Library,
    lower_layers: Sequence[Layer],
    rank: Rank,
    chosen_by: Location | None,
) -> Layer:
    """Returns the layer of a preset, a task or a user's group.

    Args:
        group: Group of the choice.
        name: Name of the choice.
        library: The choices of each group.
        lower_layers: The layers so far.
        rank: Rank of the values.
        chosen_by: The argument or file that made the choice.
    """
    name = library.canonical_name(group, name)
    path = library.file(group, name)
    assert path is not None, f"{group}={name} is no choice"
    # A preset replaces its full node. Tasks and users' groups set only some keys.
    if group in REPLACING_GROUPS:
        location = Location(file=path, node=REPLACING_GROUPS[group][1])
        layer = node_layer(preset_node(group, path, library), Source.PRESET, location, rank)
    else:
        choice = part_of(group, name, library)
        if group in MERGING_GROUPS:
            choice = choice.over(group, fold(lower_layers).values)  # a task makes no recipe larger
        location = Location(file=path, node=choice.package)
        layer = Layer(Source.PRESET, location, choice.values, rank)
    return replace(layer, group=group, name=name, chosen_by=chosen_by)


def preset_node(group: str, path: Path, library: Library) -> Node:
    """Returns the node of a preset's file. Raises ConfigError with the file's name."""
    with _named_file(path):
        check_package(path, group, library)
        data = library.data(path)
        if "defaults" in data:
            raise ConfigError(
                f"defaults: a {group} preset cannot have a base; write all its keys here, or put"
                f" '/{group}: NAME' and the changed keys into a recipe's file"
            )
        return REPLACING_GROUPS[group][0](**data)


def part_of(group: str, name: str, library: Library) -> Part:
    """Returns the keys that a choice of a task or of a user's group sets."""
    path = library.file(group, name)
    assert path is not None, f"{group}={name} is no choice"
    with _named_file(path):
        return read_part(path, group, library)


# Recipe files.


@dataclass(frozen=True)
class _File:
    """A recipe's file with the common attributes of its layers.

    Attributes:
        path: The file.
        rank: Rank of the file's values.
        folder: Hugging Face folder with the shape of a from_hf recipe.
        chosen_by: The argument or file that chose the file.
    """

    path: Path
    rank: Rank
    folder: str | None
    chosen_by: Location | None


def file_layers(
    path: Path, library: Library, rank: Rank, chosen_by: Location | None = None
) -> list[Layer]:
    """Returns the layers of a recipe's file and of the recipe that it builds on.

    Args:
        path: The file.
        library: The choices of each group.
        rank: Rank of the file's own values.
        chosen_by: The argument that chose it, if it belongs to the user's folder.

    Raises:
        ConfigError: With every problem. Each line begins with the file and the line of the key.
    """
    data = library.data(path)  # before _named_file, because invalid YAML has no lines to look up
    with _named_file(path):
        return data_layers(data, path, library, rank, chosen_by)


def data_layers(
    data: dict[str, Any],
    path: Path,
    library: Library,
    rank: Rank = Rank.USER,
    chosen_by: Location | None = None,
) -> list[Layer]:
    """Returns the layers of a file's content. See `file_layers`."""
    project = foreign_files.importable(data)
    if project:
        raise ConfigError(f"has the keys of another project; run fp8cfg import {project} {path}")
    _check_choices(data, library)
    sequence = list(file_steps(data, path, library))
    folder = None
    for step in sequence:
        folder = _model_path(step.values) or folder
    file = _File(path, rank, folder, chosen_by)
    layers = [default_layer()]
    for step in sequence:
        if step.path == path:
            # `file_layers` adds this file's name to errors.
            added = _step_layers(step, file, library, layers)
        else:
            with _named_file(step.path):
                added = _step_layers(step, file, library, layers)
        layers += added
        is_own = step.choice.group == SELF
        if is_own and added[0].values.keys() >= defaults().keys():
            # An exported file has every key, so it does not show the user's intent.
            layers = [replace(layer, rank=Rank.RECIPE) for layer in layers]
    return layers[1:]


def _step_layers(
    step: Step, file: _File, library: Library, lower_layers: Sequence[Layer]
) -> list[Layer]:
    """Returns the layers of one step of a file."""
    group, name = step.choice.group, step.choice.name
    rank = Rank.RECIPE
    if step.path == file.path:
        # The file's own values have its rank, and its choices rank as presets at most. Files that
        # it builds on rank as recipes.
        rank = file.rank
        if group != SELF:
            rank = min(file.rank, Rank.PRESET)
    if group == SELF:
        return [_own_values_layer(step, rank, file.chosen_by)]
    problem = library.problem(group, name)
    if problem:
        raise ConfigError(problem)
    chosen_by = None
    if not step.choice.standard:
        chosen_by = Location(file=step.path, key=step.choice.key)
    if group == "recipe":
        return _function_layers(name, chosen_by, file.folder)
    # The other steps of the file are fixed already, so a part cannot choose more.
    if group not in REPLACING_GROUPS:
        chosen = part_of(group, name, library).chosen
        line = "{0}={1}: chooses {2} on the command line only; write '/{2}: {3}' in this file too"
        refuse_if([line.format(group, name, *choice) for choice in chosen.items()])
    return [_choice_layer(group, name, library, lower_layers, rank, chosen_by)]


def _own_values_layer(step: Step, rank: Rank, chosen_by: Location | None) -> Layer:
    """Returns the layer of a file's own values."""
    data = full_names(dict(step.values))
    Recipe(**data)  # reports every wrong value at once; settings() stops at the first one
    if step.chosen_by is not None:
        file, key = step.chosen_by
        chosen_by = Location(file=file, key=key)
    layer = Layer(Source.FILE, Location(file=step.path), settings(data), rank)
    return replace(layer, chosen_by=chosen_by)


def _check_choices(data: Mapping[str, Any], library: Library) -> None:
    """Raises ConfigError for unknown choices, together with every invalid value of the file."""
    values = dict(data)
    problems: list[str] = []
    for choice in take_choices(values, library):
        if choice.group == SELF or not choice.name or choice.optional:
            continue
        problem = library.problem(choice.group, choice.name)
        if problem:
            problems.append(problem)
    # Without unknown choices the layers report invalid values.
    if problems:
        try:
            Recipe(**deep_merge(listed(Recipe()), full_names(values)))
        except ConfigError as error:
            problems += error.problems
    refuse_if(problems)


def _model_path(values: Mapping[str, Any]) -> str | None:
    """Returns model.path among a file's own values, or None."""
    model = full_names(dict(values)).get("model")
    if not isinstance(model, dict):
        return None
    path = model.get("path")
    return path if isinstance(path, str) else None


@contextlib.contextmanager
def _named_file(path: Path) -> Iterator[None]:
    """Adds the file's name and the line of the key to each line of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        lines: dict[str, int] = {}
        if path == STDIN or path.is_file():
            lines = {full(key): line for key, line in key_lines(path).items()}
        raise ConfigError(
            [_with_file(problem, path, lines) for problem in error.problems]
        ) from None


def _with_file(problem: str, path: Path, lines: Mapping[str, int]) -> str:
    """Returns a problem with the file's name and the line of the key that it begins with."""
    if problem.startswith(str(path)):
        return problem
    line = lines.get(full(re.split("[=:]", problem, maxsplit=1)[0]))
    if line is None:
        return f"{path}: {problem}"
    return f"{path}:{line}: {problem}"
