"""Autocast region: whether the FP8 layers of one model multiply in FP8 now. One object per model, no process-wide switch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch


class HasRegion(Protocol):
    """A layer that multiplies in FP8 while its region is active."""

    region: Region


class Region:
    """The state of FP8 autocast that all converted layers of one model share; a deep copy of the model has its own.

    Activation checkpointing runs forward passes again inside the backward pass, after the region is usually left. Such a
    pass repeats what the last one outside of a backward pass did. A *compiled* layer cannot look: where a compiled block is
    wrapped in an eager checkpoint, stay inside the region until the backward pass is done. (A checkpoint inside of what is
    compiled needs nothing.)"""

    def __init__(self, active: bool = False) -> None:
        self.active = active
        self._last = active

    @contextmanager
    def entered(self, active: bool = True) -> Iterator[None]:
        """Context manager that turns FP8 on or off for its duration."""
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before

    def applies(self) -> bool:
        """Whether the forward pass under way multiplies in FP8; each layer asks once per call."""
        if torch.compiler.is_compiling():  # the compiler guards on the attribute
            return self.active
        if (
            torch._C._current_graph_task_id() == -1
        ):  # as torch.utils.checkpoint asks whether a backward pass is under way
            self._last = self.active
        return self._last


@contextmanager
def enter_regions(layers: Iterable[HasRegion], active: bool) -> Iterator[None]:
    """Turns FP8 on or off in `layers` for the duration of the context.

    All layers of a converted model share one region. A copy of a layer that joined the model later, such as PEFT's
    `modules_to_save`, has a region of its own, which is entered too.
    """
    regions = {id(layer.region): layer.region for layer in layers}
    with ExitStack() as stack:
        for region in regions.values():
            stack.enter_context(region.entered(active))
        yield
