"""ZeRO owners: which rank holds the optimizer state of which parameter (arXiv 1910.02054), whole tensors, as in MS-AMP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8cfg.numerics.codecs import Codec
    from fp8cfg.optim.low_bit.columns import Columns


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


def sharded_bytes(count: int, columns: Columns, gradient: Codec | None = None) -> int:
    """Bytes that only the owner of a parameter of `count` elements keeps: master and moments, under ZeRO-2 the gradient, which
    is held in that codec."""
    kept = [columns.master, columns.exp_avg, columns.exp_avg_sq, gradient]
    return round(count * sum(codec.bytes_per_element for codec in kept if codec is not None))
