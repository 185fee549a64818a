"""ZeRO owners: which rank holds the optimizer state of which parameter (arXiv 1910.02054), whole tensors, as in MS-AMP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each tensor: from the largest down, and among equal ones from the first on, each goes to the rank with the
    least so far, the lowest of those. Loads differ by at most the largest tensor. Raises ValueError for no ranks.

    MS-AMP's rule (msamp/deepspeed/runtime/zero/fp8_stage_1_and_2.py) but for the order of equal sizes, which there depends on
    the index modulo the ranks.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; at least 1 is needed")
    return list(_owners(tuple(sizes), ranks))


@lru_cache(maxsize=64)
def _owners(sizes: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    loads, chosen = [(0, rank) for rank in range(ranks)], [0] * len(sizes)
    heapify(loads)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, chosen[i] = loads[0]
        heapreplace(loads, (load + sizes[i], chosen[i]))
    return tuple(chosen)
