"""Overflowed values: how many elements of FP8 tensors were clipped or infinite, counted where they are quantized.

A kernel counts the elements that it has at hand, where their amax, which it has too, says that some do not fit; a tensor that plain
operations quantize is read once more then (quantize.py). A step in which all fits reads nothing. What a pass counts is added
up, over the microbatches too. One that is computed again in a backward pass counts nothing: its tensors were counted in their first
pass.

A device has one counter for all layers. Kernels and operators add to it, and no compiler knows of it, for no graph reads it. Each
step has a place of its own in a ring that was made of zeros: no launch clears one, and steps that are launched ahead are apart.
A CUDA graph would add to the place of the step in which it was captured, for ever: operators that count say that they go into none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fp8cfg.numerics.scaling import GRAD_OUTPUT

PLACES = 512
"""Places of a ring, of which the first is for what is not counted. After the steps that the others serve another ring is made."""

NO_CUDA_GRAPH = (torch.Tag.cudagraph_unsafe,)
"""Tags of operators that count: Inductor leaves them out of CUDA graphs."""


class _Ring:
    """Places [PLACES, 4], float32: numbers of clipped and of infinite values, and two that keep kernels' pointers at 16 bytes."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.places, self.at = torch.zeros(PLACES, 4, dtype=torch.float32, device=device), 1


_rings: dict[torch.device, _Ring] = {}
_counts = True


def _ring(device: torch.device) -> _Ring:
    if device not in _rings:
        _rings[device] = _Ring(device)
    return _rings[device]


@contextmanager
def pause_overflow_counts() -> Iterator[None]:
    """A context of passes beside those of a step."""
    global _counts
    before, _counts = _counts, False
    try:
        yield
    finally:
        _counts = before


def overflow_counter(device: torch.device, role: int) -> Tensor:
    """Where a tensor of `role` that is quantized now is counted, float32 [4]. In a backward pass gradients are quantized first, and
    other tensors again."""
    ring = _ring(device)
    again = role != GRAD_OUTPUT and torch._C._current_graph_task_id() != -1
    return ring.places[ring.at if _counts and not again else 0]


def take_step_counts(device: torch.device) -> Tensor:
    """How many values were clipped and how many were infinite since the last call, the first two of float32 [4], on `device`: to
    the unit up to 2^24, to seven digits beyond. Nothing waits, and nothing is launched but zeros for another ring.
    """
    ring = _ring(device)
    place, ring.at = ring.places[ring.at], ring.at + 1
    if (
        ring.at == PLACES
    ):  # now, for FSDP2 quantizes on a stream of its own, which waits for this one as a step begins
        _rings[device] = _Ring(device)
    return place
