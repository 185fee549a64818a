"""Copies of a few numbers between the host and a GPU that nobody waits for: through pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor


def sent(t: Tensor, device: torch.device) -> Tensor:
    """The host's `t` on `device`. A copy from pageable memory would wait until the device has done all that was launched before."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


class HostCopy:
    """A copy of `values` in the host's memory, which is on its way until it is read."""

    def __init__(self, values: Tensor, there: torch.cuda.Event | None = None) -> None:
        self._values, self._there = values, there

    @classmethod
    def of(cls, values: Tensor) -> HostCopy:
        if values.device.type != "cuda":
            return cls(values.cpu())
        copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(
            values, non_blocking=True
        )
        there = torch.cuda.Event()
        there.record(torch.cuda.current_stream(values.device))
        return cls(copied, there)

    @property
    def at_hand(self) -> bool:
        """Whether nothing was copied from a device, so that nobody has to wait."""
        return self._there is None

    def read(self) -> Tensor:
        """The numbers. It waits where the device has not come so far."""
        if self._there is not None and not self._there.query():
            self._there.synchronize()
        return self._values

    def unbind(self) -> list[HostCopy]:
        """Those of its rows, by themselves."""
        return [HostCopy(row, self._there) for row in self._values.unbind()]


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
