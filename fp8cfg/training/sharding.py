"""Which rank holds the optimizer state of which parameter, and steps it (ZeRO, arXiv 1910.02054): whole tensors, as in MS-AMP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8cfg.optim.low_bit_step import Columns


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each tensor: from the largest down, and among equal ones from the first on, each goes to the rank with the
    least so far, the lowest of those. Loads differ by at most the largest tensor. Raises ValueError for no ranks.

    MS-AMP's rule (msamp/deepspeed/runtime/zero/fp8_stage_1_and_2.py) but for the order of equal sizes, which there depends on
    the index modulo the ranks.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; at least 1 is needed")
    loads, chosen = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen[i] = min(range(ranks), key=loads.__getitem__)
        loads[chosen[i]] += sizes[i]
    return chosen


def loads(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> list[int]:
    """What each rank holds."""
    held = [0] * ranks
    for count, owner in zip(sizes, owners, strict=True):
        held[owner] += count
    return held


def imbalance(loads: Sequence[int]) -> float:
    """The largest load over the mean one: 1 where all hold the same, the number of ranks where one holds everything."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def sharded_bytes(count: int, columns: Columns, gradient: bool = False) -> int:
    """Bytes that only the owner of a parameter of `count` elements keeps: master and moments, under ZeRO-2 the gradient."""
    kept = [columns.master, columns.exp_avg, columns.exp_avg_sq, columns.read if gradient else None]
    return round(count * sum(codec.bytes_per_element for codec in kept if codec is not None))


def owned_groups(groups: Sequence[Mapping[str, Any]], owner_of: Mapping[str, int], rank: int) -> list[dict[str, Any]]:
    """Groups of named parameters with those alone that `rank` owns; `owner_of` goes by name. A group that becomes empty stays, so
    that all ranks have the same groups; torch is told that its parameters have names, which it asks the first of them."""
    owned = [{**group, "params": [(n, p) for n, p in group["params"] if owner_of[n] == rank]} for group in groups]
    return [group if group["params"] else {**group, "param_names": []} for group in owned]
