"""Composition for a verb: what gives way to the words is said on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.config.errors import printable, refuse_if

if TYPE_CHECKING:
    from fp8cfg.composition.giving_way import Settled
    from fp8cfg.config.recipe import Recipe


def composed(
    words: Sequence[str],
    config_dir: str | None = None,
    file: Path | None = None,
    base: Recipe | None = None,
) -> Recipe:
    """As `fp8cfg.compose`."""
    found = settled(words, config_dir, file, base)
    refuse_if(found.problems)
    say(found.notes)
    return found.recipe


def settled(
    words: Sequence[str],
    config_dir: str | None = None,
    file: Path | None = None,
    base: Recipe | None = None,
    sweep: bool = False,
) -> Settled:
    """As `composed`, or as a job of a `sweep`, with what gave way, and nothing said or refused."""
    from fp8cfg.composition import giving_way
    from fp8cfg.composition.config_groups import Library

    return giving_way.composed(
        words, Library(Path(config_dir) if config_dir else None), file, base, sweep
    )


def settled_on_ranks(
    words: Sequence[str],
    config_dir: str | None = None,
    file: Path | None = None,
    base: Recipe | None = None,
) -> Settled:
    """As `settled`; of a layout that the recipe's own machines do not have, with those on which a launcher has started ranks."""
    from fp8cfg.composition import launched_ranks
    from fp8cfg.composition.config_groups import Library

    return launched_ranks.composed(
        words, Library(Path(config_dir) if config_dir else None), file, base
    )


def idle_folder(words: Sequence[str], config_dir: str | None) -> list[str]:
    """A line where nothing of `config_dir` is read beside the recipe of a run: none of `words`, which are right, names it."""
    from fp8cfg.composition.config_groups import Library
    from fp8cfg.composition.override_words import parse

    if config_dir is None:
        return []
    library = Library(Path(config_dir))
    chosen = parse(words, library, has_recipe=True)[0].items()
    files = [library.file(group, library.stem(group, name)) for group, name in chosen]
    if any(file.is_relative_to(Path(config_dir).resolve()) for file in files if file):
        return []
    return [
        f"note: --config-dir {config_dir}: changes nothing, no word chooses what it has; the recipe"
        " is the run's own"
    ]


def say(notes: Iterable[str]) -> None:
    """Print notes once, whatever the ranks."""
    for line in notes if os.environ.get("RANK", "0") == "0" else ():
        print(printable(line), file=sys.stderr)
