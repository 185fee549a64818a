"""Host copies of a checkpoint's tensors, which a thread writes while steps go on: in memory of the host that saves share.

Of a GPU's tensors the memory is pinned, once: copies then take the bus at its full speed, and the host only launches them. Steps
that are launched behind them, on the same stream, change the tensors afterwards; who writes the copies waits for them before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from fp8cfg.training.checkpoint.tensor_box import Groups, TensorBox

ALIGNMENT = 64
"""Bytes; of which copies begin at multiples."""


class HostCopies:
    """Memory for copies of the tensors of one save at a time. `say` is told where it cannot be pinned."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copied: torch.cuda.Event | None = None

    def of(self, groups: Mapping[str, Sequence[TensorBox]]) -> Groups:
        """The same boxes with copies of their tensors, which later steps do not change, over those of the call before. They are
        there after `wait`."""
        tensors = {
            id(box.tensor): box.tensor.detach() for boxes in groups.values() for box in boxes
        }
        begin, total = dict[int, int](), 0
        for key, t in tensors.items():
            begin[key], total = total, total + -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        on_gpu = any(t.is_cuda for t in tensors.values())
        if len(self._memory) < total:
            self._memory = torch.empty(
                0, dtype=torch.uint8, device="cpu"
            )  # first, or both were there
            self._memory = torch.empty(total, dtype=torch.uint8, device="cpu")
            if on_gpu:
                self._pin()
        copies = {
            key: (
                self._memory[begin[key] : begin[key] + t.nbytes]
                .view(t.dtype)
                .view(t.shape)
                .copy_(t, non_blocking=True)
            )
            for key, t in tensors.items()
        }
        if on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return {
            group: [replace(box, tensor=copies[id(box.tensor)]) for box in boxes]
            for group, boxes in groups.items()
        }

    def wait(self) -> None:
        """Until the copies are made."""
        if self._copied is not None:
            self._copied.synchronize()

    def _pin(self) -> None:
        """Pin the memory, as DCP's stager does: torch's own allocator of pinned memory would take the next power of two."""
        start = self._memory.data_ptr()
        try:
            pin_memory(start, len(self._memory))
        except RuntimeError as error:
            self._say(
                "the memory that saves are copied to is not pinned, and copies take longer:"
                f" {error}"
            )
        else:
            weakref.finalize(
                self._memory, unpin_memory, start
            ).atexit = False  # CUDA may be gone by then
