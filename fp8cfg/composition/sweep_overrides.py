"""Sweep overrides: checks every value and every combination before any job runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from math import prod
from typing import TYPE_CHECKING

from fp8cfg.composition.config_groups import GROUPS, Library
from fp8cfg.composition.hydra_application import GIVEN, NULL, Nodes, node
from fp8cfg.composition.overrides import Override, in_quotes, override, parse_argument
from fp8cfg.composition.recipe_layers import part_of
from fp8cfg.composition.recipe_yaml import is_node, listed
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.keys import PLUGIN, full, short
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import default_recipe

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Glob
    from hydra.core.override_parser.types import Override as HydraOverride

MAX_JOBS = 1000
"""Most jobs of one sweep. All are composed before the first one runs."""
_MAX_LINES = 3
"""Most error lines about one argument. It may have many invalid values."""


@dataclass(frozen=True)
class Sweep:
    """A sweep, parsed from arguments.

    Attributes:
        overrides: Arguments for Hydra, with full keys.
        combinations: The arguments of each job, as for a single run.
        nodes: The nodes of every choice.
    """

    overrides: list[str]
    combinations: list[list[str]]
    nodes: Nodes


@dataclass(frozen=True)
class _Axis:
    """One argument of a sweep, for Hydra and split into arguments of single runs.

    Attributes:
        override: The argument for Hydra, with its full key.
        arguments: Arguments of single runs, one for each value.
        is_choice: Whether the values are names of presets.
    """

    override: str
    arguments: list[str]
    is_choice: bool = False


def read(arguments: Iterable[str], library: Library, base: Recipe | None = None) -> Sweep:
    """Parses the arguments of a sweep.

    Args:
        arguments: Arguments of the command line. A value may be a list of values.
        library: The choices of each group.
        base: A recipe, instead of `recipe=`.

    Raises:
        ConfigError: One line for each value that a single run would reject.
    """
    axes: dict[str, _Axis] = {}
    problems: list[str] = []
    for argument in arguments:
        try:
            axis = _read_axis(argument, library)
            key = axis.override.partition("=")[0]
            _check_axis(argument, key, axis, axes.get(key), base is not None)
            axes.pop(key, None)
            axes[key] = axis  # moves to the end: the last argument of a key counts
        except ConfigError as error:
            problems += error.problems
    refuse_if(problems)
    # Checked before the combinations are listed.
    if prod(len(axis.arguments) for axis in axes.values()) > MAX_JOBS:
        raise ConfigError(f"more than {MAX_JOBS} jobs in one sweep")
    overrides = [axis.override for axis in axes.values()]
    combinations = [list(job) for job in product(*(axis.arguments for axis in axes.values()))]
    nodes = _nodes([axis.override for axis in axes.values() if axis.is_choice], library, base)
    if base is not None:
        overrides = [f"recipe={GIVEN}", *overrides]
    return Sweep(overrides, combinations, nodes)


def _check_axis(
    argument: str, key: str, axis: _Axis, previous: _Axis | None, has_recipe: bool
) -> None:
    """Raises ConfigError if the argument cannot be part of this sweep.

    Args:
        argument: The argument.
        key: Its key, for Hydra.
        axis: The argument, parsed.
        previous: An earlier argument of the same key.
        has_recipe: Whether the recipe comes from a file or an object.
    """
    if key == "recipe" and has_recipe:
        raise ConfigError(f"{argument}: a recipe is already set; remove one of them")
    if key == "log.dir" and len(axis.arguments) > 1:
        raise ConfigError(f"{argument}: a sweep has one folder; set hydra.sweep.dir=FOLDER")
    replaces_choice = previous is not None and previous.is_choice and axis.is_choice
    if previous is not None and is_node(full(key)) and not replaces_choice:
        # Hydra's sweeper keeps the last argument of a key, and a single run merges all mappings.
        raise ConfigError(
            f"{argument}: {short(key)} is set twice in this sweep, and only the last one counts;"
            f" set its keys instead, as in {short(key)}.KEY=a,b"
        )


def refused(
    combinations: Sequence[Sequence[str]], build: Callable[[Sequence[str]], object]
) -> dict[int, list[str]]:
    """Returns the error lines of the combinations that `build` rejects, by index.

    Args:
        combinations: The arguments of each job.
        build: Builds a job. Raises ConfigError.

    Raises:
        ConfigError: All combinations with an argument are rejected, so the argument is wrong.
    """
    problems: dict[int, list[str]] = {}
    for number, arguments in enumerate(combinations):
        try:
            build(arguments)
        except ConfigError as error:
            problems[number] = error.problems
    distinct = dict.fromkeys(chain.from_iterable(combinations))
    argument_problems: list[str] = []
    for argument in distinct or [""]:
        numbers = list(range(len(combinations)))
        if argument:
            numbers = [number for number in numbers if argument in combinations[number]]
        if not all(number in problems for number in numbers):
            continue
        lines = [problems[number] for number in numbers]
        # Lines in all of the errors come from the argument itself.
        common = [line for line in lines[0] if all(line in job_lines for job_lines in lines)]
        argument_problems += common or list(chain.from_iterable(lines))
    refuse_if(_shorten(list(dict.fromkeys(argument_problems)), "the sweep"))
    return problems


def _shorten(lines: list[str], argument: str) -> list[str]:
    """Returns the first lines about one argument, and the number of further lines."""
    if len(lines) <= _MAX_LINES:
        return lines
    num_shown = _MAX_LINES - 1
    return [*lines[:num_shown], f"{argument}: and {len(lines) - num_shown} more lines like these"]


def _read_axis(argument: str, library: Library) -> _Axis:
    """Parses one argument. Raises ConfigError with the problems of its values."""
    argument = in_quotes(argument)
    parsed = override(argument)
    key, text = parsed.key_or_group, argument.partition("=")[2]
    arguments = [argument]
    if parsed.is_sweep_override():
        arguments = [f"{key}={value}" for value in _values(parsed, argument, library)]
    chosen: list[Override] = []
    problems: list[str] = []
    for single in arguments:
        try:
            chosen.append(parse_argument(single, library))
        except ConfigError as error:
            problems += error.problems
    refuse_if(_shorten(problems, argument))
    if not any(choice.group for choice in chosen):
        return _Axis(f"{full(key)}={text}", arguments)
    if not all(choice.group for choice in chosen):
        raise ConfigError(f"{argument}: expected only names of presets")
    group = chosen[0].group
    default = f"'{NULL}'"
    if group == "recipe":
        default = default_recipe()
    names = ",".join(choice.name or default for choice in chosen)
    if group not in GROUPS:
        # Hydra appends groups that are not in the defaults list of conf/config.yaml.
        group = f"+{group}"
    return _Axis(f"{group}={names}", arguments, is_choice=True)


def _values(parsed: HydraOverride, argument: str, library: Library) -> list[str]:
    """Returns the values of a sweep argument as text."""
    from hydra.core.override_parser import types
    from hydra.errors import HydraException

    value, key = parsed.value(), parsed.key_or_group
    # The sweeper samples inside of an interval. Check both ends.
    if isinstance(value, types.IntervalSweep):
        start, end = value.start, value.end
        if start is not None and end is not None and start > end:
            raise ConfigError(
                f"{argument}: starts above its end; write {key}=interval({end:g},{start:g})"
            )
        return [str(start), str(end)]
    if isinstance(value, types.Glob):
        return _matching_choices(value, key, argument, library)
    try:
        # One more than allowed, so that `read` reports too many jobs.
        values = list(islice(parsed.sweep_string_iterator(), MAX_JOBS + 1))
    except (HydraException, ValueError):  # a range without a step
        raise ConfigError(f"{argument}: the range has no end") from None
    if not values:
        raise ConfigError(f"{argument}: no value")
    return values


def _matching_choices(glob: Glob, key: str, argument: str, library: Library) -> list[str]:
    """Returns the choices that a glob() matches."""
    group = library.merging_group(key)
    if group is None:
        group = "precision" if key == PLUGIN else key
    if group not in library.groups():
        raise ConfigError(
            f"{argument}: glob() matches presets, but {short(full(key))} is not a group of presets"
        )
    names = glob.filter(library.choices(group))
    if not names:
        raise ConfigError(f"{argument}: no {group} matches; see fp8cfg list {group}")
    return names


def _nodes(choices: Iterable[str], library: Library, base: Recipe | None) -> Nodes:
    """Returns the node of every name in `choices`, arguments such as precision=bf16,fp16."""
    names: dict[str, list[str]] = {}
    for argument in choices:
        group, _, value = argument.lstrip("+").partition("=")
        names[group] = [name.strip("'") for name in value.split(",")]
    if base is None:
        names.setdefault("recipe", [default_recipe()])
    # Tasks and users' groups may choose in other groups.
    for group in [group for group in names if library.merging_group(group)]:
        for name in names[group]:
            if name == NULL:
                continue
            for key, preset in part_of(group, name, library).chosen.items():
                if key == "recipe" and base is not None:
                    raise ConfigError(
                        f"{group}={name}: chooses recipe={preset}, but a recipe is already set"
                    )
                presets = names.setdefault(key, [])
                if preset not in presets:
                    presets.append(preset)
    nodes: Nodes = {}
    for group, of_group in names.items():
        nodes[group] = {name: node(group, name, library) for name in of_group}
    if base is not None:
        nodes["recipe"] = {GIVEN: listed(base)}
    return nodes
