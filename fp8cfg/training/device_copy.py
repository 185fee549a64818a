"""Copies of batches to a GPU: from pinned memory, on a stream of their own, so that neither host nor device waits for them.

The host launches a step while the device is still at the one before; its batch is copied meanwhile. A copy from pageable memory
would wait for all of that.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def on_device(batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The tensors of the host on `device`; work that is launched on it after this call finds them there."""
    if device.type != "cuda":
        return tuple(t.to(device) for t in batch)
    main, stream = torch.cuda.current_stream(device), _stream(device)
    with torch.cuda.stream(stream):
        copied = tuple(t.pin_memory().to(device, non_blocking=True) for t in batch)
    main.wait_stream(stream)
    for t in copied:
        t.record_stream(
            main
        )  # or its memory would be given out again while that stream still reads it
    return copied
