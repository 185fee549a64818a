"""Command-line helpers of the tools: recipes from override words, and one-line errors with exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

import fp8cfg
from fp8cfg.planning.hardware import find_hardware
from fp8cfg.schema.errors import Fp8cfgError


def recipes(rows: Iterable[list[str]], ranks: int = 1) -> list[fp8cfg.Recipe]:
    """The recipe of each row of overrides. Raises ConfigError for the first that cannot be, that this machine cannot run, or
    whose batches do not divide over so many ranks."""
    found = [fp8cfg.compose(row) for row in rows]
    for recipe in found:
        fp8cfg.lower(recipe, find_hardware(recipe.trainer.accelerator))
        batch, per_pass = recipe.trainer.global_batch_size, recipe.trainer.micro_batch_size * ranks
        if batch % per_pass:
            raise fp8cfg.ConfigError(
                f"trainer.global_batch_size={batch}: {ranks} ranks take a multiple of {per_pass}"
            )
    return found


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a tool and end the process with its exit code; where a recipe is refused, as `python -m fp8cfg` does: with a line for
    each problem on stderr, and exit code 2."""
    try:
        code = main()
    except Fp8cfgError as e:
        for line in getattr(e, "problems", None) or str(e).splitlines():
            print(f"error: {line}", file=sys.stderr)
        code = e.exit_code
    sys.exit(code)


def count(text: str) -> int:
    """A whole number from 1, as argparse takes it. Raises ValueError for any other text."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)
