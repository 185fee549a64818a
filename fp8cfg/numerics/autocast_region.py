"""Where FP8 is on: one small object for each model, instead of a process-wide switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Region:
    """Says whether the layers that share it multiply in FP8 now. One for each converted model; a deep copy of the model has
    its own.

    Activation checkpointing runs forward passes again inside the backward pass, after the region is usually left. Such a
    pass repeats what the last one outside of a backward pass did. A *compiled* layer cannot look: where a compiled block is
    wrapped in an eager checkpoint, stay inside the region until the backward pass is done. (A checkpoint inside of what is
    compiled needs nothing.)"""

    def __init__(self, active: bool = False) -> None:
        self.active = active
        self._last = active

    @contextmanager
    def entered(self, active: bool = True) -> Iterator[None]:
        """Switches FP8 on, or off, for the length of a `with` block."""
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before

    def applies(self) -> bool:
        """What a layer asks in its forward pass."""
        if torch.compiler.is_compiling():  # the compiler guards on the attribute
            return self.active
        if torch._C._current_graph_task_id() == -1:  # as torch.utils.checkpoint asks whether a backward pass is under way
            self._last = self.active
        return self._last
