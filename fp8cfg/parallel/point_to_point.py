"""Point-to-point waits: sends and receives of pipeline stages, under the limit of their process group.

gloo's have the limit that their group was made with, 30 minutes where it was not said, whatever it has been set to since (torch
2.13), unless a wait has one of its own. NCCL's are not waited for by the host, and torch's watchdog knows their limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fp8cfg.numerics.waited_collective import wait


def wait_for(works: Iterable[dist.Work], group: dist.ProcessGroup) -> None:
    """Wait for sends and receives in `group`. Raises RuntimeError where one takes longer than the group's limit."""
    for work in works:
        wait(work, dist.batch_isend_irecv, group, _limit(group))


@contextmanager
def limited(group: dist.ProcessGroup) -> Iterator[None]:
    """Around passes of torch's schedules, which wait for sends and receives in `group` without a limit of their own."""
    from torch.distributed.pipelining import schedules

    plain = schedules._wait_batch_p2p
    schedules._wait_batch_p2p = lambda work: wait_for(work, group)
    try:
        yield
    finally:
        schedules._wait_batch_p2p = plain


def _limit(group: dist.ProcessGroup) -> timedelta | None:
    if dist.get_backend(group) != dist.Backend.GLOO:
        return None
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit
