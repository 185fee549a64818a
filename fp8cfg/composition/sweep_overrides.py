"""Sweep overrides: every value, and every combination of values, is checked before any job runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from math import prod
from typing import TYPE_CHECKING

from fp8cfg.composition.config_groups import GROUPS, Library
from fp8cfg.composition.hydra_application import GIVEN, Nodes, node
from fp8cfg.composition.overrides import Override, in_quotes, override, parse_argument
from fp8cfg.composition.recipe_layers import part_of
from fp8cfg.composition.recipe_yaml import is_node, listed
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.keys import PLUGIN, full, short
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.safe_files import default_recipe

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override as HydraOverride

MAX_JOBS = 1000
"""Combinations of one sweep; each is composed, in 0.06 s, before the first runs."""

_SHOWN = 3
"""Lines on one word, whose values may all be wrong."""


@dataclass(frozen=True)
class Sweep:
    """`overrides` are Hydra's words, on full keys; `combinations` the words of each job, as a single run would take them;
    `nodes` what can be chosen."""

    overrides: list[str]
    combinations: list[list[str]]
    nodes: Nodes


def read(words: Iterable[str], library: Library, given: Recipe | None = None) -> Sweep:
    """The sweep that `words` ask for, over `given` in place of `recipe=`. Raises ConfigError with a line for each value of
    each word that a single run would refuse."""
    varied: dict[
        str, tuple[str, list[str]]
    ] = {}  # the last word of a key counts, as for Hydra's sweeper
    problems: list[str] = []
    for word in words:
        try:
            text, single = _vary(word, library)
            key = text.partition("=")[0]
            if key == "recipe" and given is not None:
                raise ConfigError(f"{word}: the recipe is given already; drop one of the two")
            if key == "log.dir" and len(single) > 1:
                raise ConfigError(f"{word}: a sweep has one folder; write hydra.sweep.dir=FOLDER")
            if key in varied and is_node(full(key)) and max(len(single), len(varied[key][1])) > 1:
                # Hydra's sweeper keeps the last word of a key, and one run merges all mappings.
                raise ConfigError(
                    f"{word}: {short(key)} stands twice in this sweep, and only one of them would"
                    f" be swept; sweep its keys instead, as in {short(key)}.KEY=a,b"
                )
            varied[key] = text, single
        except ConfigError as e:
            problems += e.problems
    refuse_if(problems)
    if prod(len(single) for _, single in varied.values()) > MAX_JOBS:
        raise ConfigError(f"more than {MAX_JOBS} jobs in one sweep")
    overrides = [text for text, _ in varied.values()]
    return Sweep(
        [f"recipe={GIVEN}", *overrides] if given is not None else overrides,
        [list(c) for c in product(*(single for _, single in varied.values()))],
        _nodes(overrides, library, given),
    )


def refused(
    combinations: Sequence[Sequence[str]], build: Callable[[Sequence[str]], object]
) -> dict[int, list[str]]:
    """The combinations, by their number, that `build` refuses, with its lines. Raises ConfigError for a word that no
    combination can have: then it is the word that is wrong."""
    problems: dict[int, list[str]] = {}
    for number, words in enumerate(combinations):
        try:
            build(words)
        except ConfigError as e:
            problems[number] = e.problems
    wrong: list[str] = []
    for word in {word: None for words in combinations for word in words} or [""]:
        having = [number for number, words in enumerate(combinations) if word in words or not word]
        if all(number in problems for number in having):
            lines = [problems[number] for number in having]
            wrong += [line for line in lines[0] if all(line in other for other in lines)] or list(
                chain(*lines)
            )
    refuse_if(_brief(list(dict.fromkeys(wrong)), "the sweep"))
    return problems


def _brief(lines: list[str], word: str) -> list[str]:
    """Lines of the values of one word, of many the first two."""
    return (
        lines
        if len(lines) <= _SHOWN
        else [*lines[: _SHOWN - 1], f"{word}: and {len(lines) - _SHOWN + 1} lines more like these"]
    )


def _vary(word: str, library: Library) -> tuple[str, list[str]]:
    """The word for Hydra, on its full key, and the words of single runs that it stands for."""
    word = in_quotes(word)
    parsed = override(word)
    key, text = parsed.key_or_group, word.partition("=")[2]
    single = (
        [f"{key}={value}" for value in _values(parsed, word, library)]
        if parsed.is_sweep_override()
        else [word]
    )
    chosen: list[Override] = []
    problems: list[str] = []
    for each in single:
        try:
            chosen.append(parse_argument(each, library))
        except ConfigError as e:
            problems += e.problems
    refuse_if(_brief(problems, word))
    kinds = {"value" if each.values else "preset" for each in chosen}
    if kinds == {"value"}:
        return f"{full(key)}={text}", single
    if len(kinds) > 1:
        raise ConfigError(f"{word}: expected names of presets alone")
    group = library.own(key) or ("precision" if key == PLUGIN else key)
    nothing = default_recipe() if group == "recipe" else "null"
    plus = "+" if library.own(key) and key not in GROUPS else ""  # it stands in no list of defaults
    return f"{plus}{group}={','.join(each.name or nothing for each in chosen)}", single


def _values(parsed: HydraOverride, word: str, library: Library) -> list[str]:
    """The values of a sweep, as they are written in a word; the two ends of an interval."""
    from hydra.core.override_parser.types import Glob, IntervalSweep
    from hydra.errors import HydraException

    value, key = parsed.value(), parsed.key_or_group
    if isinstance(value, IntervalSweep):
        start, end = value.start, value.end
        if start is not None and end is not None and start > end:
            raise ConfigError(
                f"{word}: begins above its end; write {key}=interval({end:g},{start:g})"
            )
        return [str(start), str(end)]
    if isinstance(value, Glob):
        group = library.own(key) or key
        if group not in library.groups():
            raise ConfigError(
                f"{word}: glob() chooses among presets, and {short(full(key))} is no group of them"
            )
        found = value.filter(library.choices(group))
        refuse_if([] if found else [f"{word}: no {group} matches; fp8cfg list {group} has them"])
    else:
        try:
            found = list(islice(parsed.sweep_string_iterator(), MAX_JOBS + 1))
        except (HydraException, ValueError):  # a range without a step
            raise ConfigError(f"{word}: a range that has no end") from None
    if not found:
        raise ConfigError(f"{word}: no value")
    return found


def _nodes(overrides: Iterable[str], library: Library, given: Recipe | None) -> Nodes:
    """The node of every preset that `overrides` choose."""
    said = (
        (key.lstrip("+"), text.split(",")) for key, _, text in (o.partition("=") for o in overrides)
    )
    names = {key: text for key, text in said if key in library.groups()}
    if given is None:
        names.setdefault("recipe", [default_recipe()])
    for group in [group for group in names if library.own(group)]:
        for name in names[group]:
            for other, its in part_of(group, name, library).chosen.items():
                if other == "recipe" and given is not None:
                    raise ConfigError(
                        f"{group}={name}: chooses recipe={its}, and the recipe is given already"
                    )
                names[other] = list(dict.fromkeys([*names.get(other, []), its]))
    nodes = {
        group: {name: node(group, name, library) for name in of if name != "null"}
        for group, of in names.items()
    }
    return nodes if given is None else {**nodes, "recipe": {GIVEN: listed(given)}}
