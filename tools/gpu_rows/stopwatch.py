"""Stopwatch of tools/bench_gpu.py: between events on a GPU, in this process's processor time on a CPU."""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = torch.cuda.Event | float


def mark(device: str) -> Mark:
    """The moment, on a GPU that at which it gets there."""
    if device == "cpu":
        return time.process_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Mark, end: Mark) -> float:
    """From one mark to the other; a GPU must have passed both."""
    if isinstance(start, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(end, float)
    return end - start


class OptimizerTime:
    """Time of the steps of `optimizer`, which it takes itself from here on."""

    def __init__(self, optimizer: Any, device: str) -> None:
        self._step, self._device = optimizer.step, device
        self._marks: list[Mark] = []
        optimizer.step = self._timed

    def _timed(self, *args: Any, **options: Any) -> Any:
        start = mark(self._device)
        made = self._step(*args, **options)
        self._marks = [start, mark(self._device)]
        return made

    def seconds(self) -> float:
        """Of the last step."""
        return seconds(*self._marks)
