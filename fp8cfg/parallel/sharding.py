"""ZeRO owners: which rank holds the optimizer state of which parameter (arXiv 1910.02054), whole tensors, as in MS-AMP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace

from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.storage import StateDtypes


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


def ranks() -> int:
    """The ranks of this run, as torchrun says (WORLD_SIZE); 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse_incomplete_launch() -> None:
    """Raises ConfigError if the environment names several ranks, but not how this one meets them."""
    if ranks() == 1:
        return
    missing = [name for name in _MEETING if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={ranks()}: {', '.join(missing)} must be set too; start the ranks with"
            " torchrun, which sets all of them, or unset WORLD_SIZE to train on one rank"
        )
    rank, port = int(os.environ["RANK"]), os.environ["MASTER_PORT"]
    if rank >= ranks():
        raise ConfigError(
            f"RANK={rank}: WORLD_SIZE={ranks()} has the ranks 0 to {ranks() - 1}; start the ranks"
            " with torchrun, or correct one of both"
        )
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"MASTER_PORT={port[:40]}: not a port; set it to a number from 1 to {2**16 - 1}"
        )


_MEETING = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables with which torch.distributed meets the other ranks, besides WORLD_SIZE."""


def by_columns(state: StateDtypes, name: str, shape: Sequence[int], ranks: int) -> bool:
    """Whether FSDP2 splits the parameter `name` by its columns: an adapter's A [rank, in] of fewer rows than `ranks`, of which most
    would have none, and all would send padding. FSDP2 takes columns that `ranks` divide alone (torch 2.13), and low-bit moments are
    those of rows (optim/low_bit/shards.py)."""
    return (
        name.endswith(".lora_A")
        and shape[0] < ranks
        and shape[1] % ranks == 0
        and not state.low_bit
    )
