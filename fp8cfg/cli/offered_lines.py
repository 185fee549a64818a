"""Offered lines: what a refusal says to write, settled once as it would be typed, so that it is accepted.

The words of a search tell one settled recipe from another. What gave way in both, such as a batch to trainer.devices, need not
give way once those words are typed as well: then its value is written too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fp8cfg.cli.argv import Arguments, changed_words, command_line, is_hydra

if TYPE_CHECKING:
    from fp8cfg.composition.giving_way import Settled
    from fp8cfg.report.memory.fit_search import Fit
    from fp8cfg.report.memory.nearest_fit import Line

Settle = Callable[[Sequence[str]], "Settled"]
"""What a verb makes of words."""
_TIMES = 4
"""A line is settled at most: as it was found, with the machine, with the batch that comes out otherwise on it, and once more."""


def whole_lines(arguments: Arguments, settle: Settle, *verb: str) -> Line:
    """Makes the line of `arguments` and a fit, by `verb` and its options or training; an empty one where it would be refused, or
    settle to another recipe than that of the fit."""

    def line(fit: Fit) -> str:
        words = [*fit.words]
        for _ in range(_TIMES):
            typed = settle([word for word in changed_words(arguments, words) if not is_hydra(word)])
            if not (apart := _apart(typed, fit)):
                return "" if typed.problems else command_line(arguments, words, *verb)
            words += apart
        return ""

    return line


def _apart(typed: Settled, fit: Fit) -> tuple[str, ...]:
    """The words that make what was `typed` into the recipe of `fit`; none of a smoke run, whose size is cut once it is started."""
    from fp8cfg.report.memory.fit_search import differences

    return () if fit.recipe.trainer.smoke else differences(typed.recipe, fit.recipe)
