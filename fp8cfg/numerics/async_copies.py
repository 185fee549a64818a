"""Small copies and collectives that do not make the host wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device`."""
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from pageable memory would wait for all work that the device has queued.
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of device values in host memory, which is in progress until it is read."""

    def __init__(self, values: Tensor, copied: torch.cuda.Event | None = None) -> None:
        self._values = values
        self._copied = copied

    @classmethod
    def of(cls, values: Tensor) -> HostCopy:
        """Starts the copy."""
        if values.device.type != "cuda":
            return cls(values.cpu())
        # Only a copy to pinned memory is asynchronous.
        host_values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host_values.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(values.device))
        return cls(host_values, copied)

    @property
    def is_ready(self) -> bool:
        """Whether the values were on the host already, so that reading never waits."""
        return self._copied is None

    def read(self) -> Tensor:
        """Returns the values. Waits if the device has not reached the copy."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return self._values

    def unbind(self) -> list[HostCopy]:
        """Returns one copy per row."""
        return [HostCopy(row, self._copied) for row in self._values.unbind()]


_wait: Callable[[Any], Tensor] = collectives.wait_tensor


# The report on hung ranks reads the locals `collective` and `group` of the next two functions
# (parallel/blocked_collective.py).
def run_collective(collective: Callable[..., Any], *args: Any, group: Any) -> Tensor:
    """Runs a functional collective of torch and returns its result.

    Args:
        collective: A function of torch.distributed._functional_collectives.
        args: Its arguments before the group.
        group: A process group or its name.
    """
    result = collective(*args, group)
    # The wrapper would wait on first use, in a dispatch that takes as long as all the rest.
    if isinstance(result, collectives.AsyncCollectiveTensor):
        result = result.elem
    return _wait(result)


def wait(
    work: dist.Work, collective: Callable[..., Any], group: Any, limit: timedelta | None = None
) -> None:
    """Waits for a collective that was started.

    Args:
        work: The started collective.
        collective: Its function.
        group: Its process group, None for all ranks.
        limit: Longest time to wait. With NCCL it makes the host wait too.

    Raises:
        RuntimeError: The limit has passed.
    """
    if limit is None:
        work.wait()
    else:
        work.wait(limit)
