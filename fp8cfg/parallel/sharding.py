"""Assignment of tensors to ranks, and the ranks of a torchrun launch. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace

from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.storage import StateDtypes

_RENDEZVOUS_VARIABLES = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torch.distributed needs for the rendezvous, in addition to WORLD_SIZE."""


def balance_over_ranks(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assigns whole tensors to ranks, as ZeRO in MS-AMP does (arXiv 1910.02054).

    Goes from the largest tensor to the smallest. Each goes to the rank with the smallest load, and
    to the lowest rank on a tie. Loads differ by at most the largest tensor.

    Source: MS-AMP, msamp/deepspeed/runtime/zero/fp8_stage_1_and_2.py. There the order of equal
    sizes depends on the index modulo the ranks. Here the first tensor comes first.

    Args:
        sizes: The size of each tensor.
        ranks: The number of ranks.

    Returns:
        The rank of each tensor.

    Raises:
        ValueError: There are no ranks.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; at least 1 is needed")
    return list(_balance(tuple(sizes), ranks))


@lru_cache(maxsize=64)
def _balance(sizes: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Implements `balance_over_ranks`."""
    # A heap of (load, rank): ties go to the lowest rank.
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    rank_of = [0] * len(sizes)
    # The sort is stable, so equal sizes keep their order on all ranks.
    largest_first = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    for index in largest_first:
        load, rank = loads[0]
        rank_of[index] = rank
        heapreplace(loads, (load + sizes[index], rank))
    return tuple(rank_of)


def ranks() -> int:
    """Returns the number of ranks that torchrun has started (WORLD_SIZE), 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse_incomplete_launch() -> None:
    """Checks the variables of a launch on several ranks.

    Raises:
        ConfigError: A variable is missing or impossible.
    """
    world_size = ranks()
    if world_size == 1:
        return
    missing = [name for name in _RENDEZVOUS_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={world_size}: {', '.join(missing)} must be set too; start the ranks with"
            " torchrun, which sets all of them, or unset WORLD_SIZE to train on one rank"
        )
    rank = int(os.environ["RANK"])
    if rank >= world_size:
        raise ConfigError(
            f"RANK={rank}: WORLD_SIZE={world_size} has the ranks 0 to {world_size - 1}; start the"
            " ranks with torchrun, or correct one of both"
        )
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"MASTER_PORT={port[:40]}: not a port; set it to a number from 1 to {2**16 - 1}"
        )


def shards_columns(state: StateDtypes, name: str, shape: Sequence[int], ranks: int) -> bool:
    """Returns whether FSDP2 shards a parameter by columns instead of rows.

    It shards an adapter's A, [rank, in], by columns if A has fewer rows than `ranks`. By rows most
    ranks would have none, and all would send padding.
    """
    if not name.endswith(".lora_A") or shape[0] >= ranks:
        return False
    # FSDP2 takes no uneven column shards (torch 2.13).
    if shape[1] % ranks:
        return False
    # Low-bit moments are sharded by rows (optim/low_bit/columns.py).
    return not state.low_bit
