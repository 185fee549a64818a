"""Counts of overflowed values: elements of FP8 tensors that were clipped or infinite.

A kernel counts the elements of its tile if their amax exceeds the range. If plain torch operations
quantize a tensor, it is read once more in that case (`quantize.count_out_of_range`). If all values of
a step fit, nothing extra is read. Counts add up over microbatches. Activation checkpointing runs
passes again. They count nothing, because the first pass has counted the tensors.

A device has one counter for all layers. Kernels and custom operators add to it. No graph reads it,
so compilers do not know it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fp8cfg.numerics.scaling import GRAD_OUTPUT

NUM_SLOTS = 512
"""Slots of a ring, one for each step. Slot 0 takes what is not counted."""

NO_CUDA_GRAPH = (torch.Tag.cudagraph_unsafe,)
"""Tags of operators that count. Inductor leaves them out of CUDA graphs: in all later steps a graph
would add to the slot of the step that captured it.
"""


class _Ring:
    """Slots [NUM_SLOTS, 4], float32: clipped values, infinite values, and two unused numbers.

    Each step has another slot. So no kernel must clear a slot, and steps that the host launches ahead
    do not mix. The unused numbers keep the kernels' pointers aligned to 16 bytes.
    """

    def __init__(self, device: torch.device) -> None:
        # Inference tensors could not be written outside of inference mode.
        with torch.inference_mode(False):
            self.slots = torch.zeros(NUM_SLOTS, 4, dtype=torch.float32, device=device)
        self.current = 1


_rings: dict[torch.device, _Ring] = {}
_is_counting = True


def _ring(device: torch.device) -> _Ring:
    if device not in _rings:
        _rings[device] = _Ring(device)
    return _rings[device]


@contextmanager
def pause_overflow_counts() -> Iterator[None]:
    """Context manager for passes that are not part of a training step."""
    global _is_counting
    was_counting = _is_counting
    _is_counting = False
    try:
        yield
    finally:
        _is_counting = was_counting


def overflow_counter(device: torch.device, role: int) -> Tensor:
    """Returns the slot, float32 [4], for a tensor of `role` that is quantized now."""
    ring = _ring(device)
    # Backward passes quantize gradients for the first time, and other tensors again.
    is_in_backward = torch._C._current_graph_task_id() != -1
    is_counted_already = is_in_backward and role != GRAD_OUTPUT
    if is_counted_already or not _is_counting:
        return ring.slots[0]
    return ring.slots[ring.current]


def take_step_counts(device: torch.device) -> Tensor:
    """Returns the counts since the last call and begins the next step.

    The host waits for nothing.

    Returns:
        float32 [4] on `device`: clipped values, infinite values, and two unused numbers. Exact up
        to 2^24, then to seven digits.
    """
    ring = _ring(device)
    counts = ring.slots[ring.current]
    ring.current += 1
    if ring.current == NUM_SLOTS:
        # Here and not at first use: FSDP2 quantizes on another stream, which waits for this one
        # when a step begins.
        _rings[device] = _Ring(device)
    return counts
