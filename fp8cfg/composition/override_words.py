"""Command-line overrides, checked against the schema before anything is composed; all problems are reported at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fp8cfg.composition.config_groups import GROUPS, Library
from fp8cfg.composition.flatten import is_node
from fp8cfg.composition.parsed_words import key_exists, parsed
from fp8cfg.composition.quoted_words import takes_text
from fp8cfg.config import foreign_names
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.files import plain
from fp8cfg.config.key_names import PLUGIN, full, short
from fp8cfg.config.node import Node
from fp8cfg.config.recipe import Recipe, fields, short_keys
from fp8cfg.config.validation_errors import example
from fp8cfg.config.value_text import spelled


def parse(
    words: Iterable[str], library: Library, has_recipe: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Split `words` into choices (group -> name) and values (Hydra overrides on full keys).

    Raises ConfigError with a line for each word that is no override, names nothing that exists, or has a value of the wrong
    type or out of bounds.
    """
    chosen: dict[str, str] = {}
    values: list[str] = []
    problems: list[str] = []
    for word in words:
        try:
            group, text = one(word, library)
            if group == "recipe" and has_recipe:
                raise ConfigError(f"{word}: the recipe is given already; drop one of the two")
            if group:
                chosen[group] = text
            elif text:
                values.append(text)
        except ConfigError as e:
            problems += e.problems
    refuse_if(problems)
    return chosen, values


def one(word: str, library: Library) -> tuple[str, str]:
    """A choice as (group, name), or a value as ("", override); ("", "") where there is nothing to do."""
    try:
        return _one(word, library)
    except ConfigError as e:
        if e.problems == [key_exists(word)]:
            _one(word.lstrip("+"), library)  # what that line offers is to be taken
        raise


def _one(word: str, library: Library) -> tuple[str, str]:
    key, value, text = parsed(word)
    if value is None and (key in GROUPS or library.own(key)):
        return "", ""
    if isinstance(value, str) and (own := library.own(key)):
        if problem := library.problem(own, value):
            raise ConfigError(problem)
        return own, value
    node = is_node(full(key))
    if word[:1] == "+" and node:
        raise ConfigError(key_exists(word))
    if key in ("precision", PLUGIN) and isinstance(value, str):
        key = "precision"
    elif key not in GROUPS or isinstance(value, dict):
        if (
            isinstance(value, str)
            and node
            and (group := next((g for g in GROUPS if value in library.choices(g)), None))
        ):
            raise ConfigError(
                f"{word}: expected keys of {short(full(key))}; did you mean '{group}={value}'?"
            )
        _check_text(key, value, text)
        _check_value(key, value)
        return "", f"{full(key)}={text}"
    if not isinstance(value, str):
        ours = foreign_names.meant(key, value)
        raise ConfigError(
            f"{word}: expected the name of a preset" + (f"; did you mean {ours!r}?" if ours else "")
        )
    if problem := library.problem(key, value):
        raise ConfigError(problem)
    return key, library.stem(key, value)


def _check_text(key: str, value: Any, text: str) -> None:
    """Raise ConfigError where `text` is another one than `value` is written, and a line about `value` would not have it."""
    if takes_text(key) and isinstance(value, (bool, int, float)):
        raise ConfigError(
            f"{key}={text}: expected a string, got {type(value).__name__}; write '{key}=\"{text}\"'"
        )
    if (
        full(key) in fields()
        and isinstance(value, float)
        and math.isinf(value)
        and "inf" not in text.lower()
    ):
        raise ConfigError(
            f"{key}={text}: more than any number here can be; expected a finite number"
        )


def _check_value(key: str, value: Any) -> None:
    """Raise ConfigError unless `key` exists and takes `value`; a mapping is checked key by key."""
    plain({key: value}, "command line")
    if full(key) not in fields():
        raise ConfigError(
            foreign_names.unknown(short(full(key)), short_keys() | set(GROUPS), value)
        )
    node = fields()[full(key)].annotation
    if isinstance(node, type) and issubclass(node, Node):
        if not isinstance(value, dict):
            raise ConfigError(
                f"{key}={spelled(value)}: expected keys of"
                f" {short(full(key))}{example(full(key), node, value)}"
            )
        problems: list[str] = []
        for k, v in value.items():
            try:
                if "." in k and full(f"{key}.{k}") in fields():
                    raise ConfigError(
                        f"{key}.{k}: no key in braces has a dot; write"
                        f" {short(full(f'{key}.{k}'))}={spelled(v)}"
                    )
                _check_value(f"{key}.{k}", v)
            except ConfigError as e:
                problems += e.problems
        return refuse_if(problems)
    parent, _, leaf = full(key).rpartition(".")
    owner = fields()[parent].annotation if parent else Recipe
    owner(
        **{leaf: value}
    )  # every field has a default, so that a node with this one value checks this one value
