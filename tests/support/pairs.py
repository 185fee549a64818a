"""All-pairs coverage: fewer cases than the product of all parameters, with every two values of any two parameters in one case."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases, of one value of each of `parameters`: every pair of values of two parameters is in one at least. Greedy: of the product
    the next case is the first that has most of the pairs not yet seen. Equal for equal input."""
    cases = list(product(*(range(len(values)) for values in parameters)))
    unseen = {pair for case in cases for pair in _pairs(case)}
    chosen: list[tuple[int, ...]] = []
    while unseen:
        best = max(cases, key=lambda case: len(unseen & _pairs(case)))  # the first of equals
        unseen -= _pairs(best)
        chosen.append(best)
    return [
        tuple(values[i] for values, i in zip(parameters, case, strict=True))
        for case in sorted(chosen)
    ]


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(combinations(enumerate(case), 2))
