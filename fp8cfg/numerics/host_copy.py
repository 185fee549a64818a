"""Copies of a few numbers between the host and a GPU that nobody waits for: through pinned memory."""

from __future__ import annotations

import torch
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
