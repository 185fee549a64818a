"""Waited collective: one that is started and waited for, with its name and its group in one frame.

What waits, in torch, knows neither (`wait_tensor`, `Work.wait`). Where ranks stand still, a diagnosis reads both from the frames of
this module: the locals `collective` and `group`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor

_wait: Callable[[Any], Tensor] = collectives.wait_tensor


def waited(collective: Callable[..., Any], *args: Any, group: Any) -> Tensor:
    """What a functional `collective` of torch makes of `args` over `group`, a process group or the name of one."""
    made = collective(*args, group)
    # A wrapper that is waited for by itself takes as long as all else.
    return _wait(made.elem if isinstance(made, collectives.AsyncCollectiveTensor) else made)


def wait(
    work: dist.Work, collective: Callable[..., Any], group: Any, limit: timedelta | None = None
) -> None:
    """Wait for the `work` of a `collective` over `group`, None being all ranks, that has been started; at most `limit`, where it is
    given, which makes the host wait with NCCL too. Raises RuntimeError after it."""
    if limit is None:
        work.wait()
    else:
        work.wait(limit)
