"""Ranks that are threads of one process, over torch's threaded process group, which copies and adds up in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from fp8cfg.parallel.process_group import Traffic, World

Found = TypeVar("Found")


def on_threads(ranks: int, work: Callable[[World], Found]) -> list[Found]:
    """What each of so many ranks makes of `work`; each counts what it sends by itself."""
    store = dist.HashStore()

    def one(rank: int) -> Found:
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        try:
            return work(World(rank, ranks, Traffic()))
        except BaseException as e:
            ProcessLocalGroup.exception_handle(e)  # which ends the others
            raise
        finally:
            dist.destroy_process_group()

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    _install_threaded_pg()
    try:
        with ThreadPoolExecutor(ranks) as pool:
            every = [pool.submit(one, rank) for rank in range(ranks)]
        errors = [error for each in every if (error := each.exception())]
        for error in sorted(
            errors, key=lambda e: isinstance(e, SystemExit)
        ):  # those of ranks that were ended last
            raise error
        return [each.result() for each in every]
    finally:
        _uninstall_threaded_pg()
        isolate(False)
