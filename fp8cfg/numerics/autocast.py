"""Autocast region: whether the FP8 layers of one model run in FP8. One object per model, no global switch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch


class HasRegion(Protocol):
    """A layer that runs in FP8 while its region is active."""

    region: Region


class Region:
    """FP8 autocast state, shared by all converted layers of a model. A deep copy has its own.

    Activation checkpointing runs forward passes again inside the backward pass, usually after the
    region was left. Such a pass repeats the mode of the last pass outside of a backward pass. A
    compiled layer cannot do this: if an eager checkpoint wraps a compiled block, stay inside the
    region until the backward pass is done. A checkpoint inside the compiled block needs nothing.
    """

    def __init__(self, active: bool = False) -> None:
        self.active = active
        self._last = active

    @contextmanager
    def entered(self, active: bool = True) -> Iterator[None]:
        """Turns FP8 on or off inside the context."""
        was_active = self.active
        self.active = active
        try:
            yield
        finally:
            self.active = was_active

    def applies(self) -> bool:
        """Tells whether this forward pass runs in FP8. Each layer calls it once per pass."""
        if torch.compiler.is_compiling():
            return self.active  # the compiler guards on the attribute
        # -1 means that no backward pass runs; torch.utils.checkpoint asks the same way.
        if torch._C._current_graph_task_id() == -1:
            self._last = self.active
        return self._last


@contextmanager
def enter_regions(layers: Iterable[HasRegion], active: bool) -> Iterator[None]:
    """Turns FP8 on or off in `layers` inside the context.

    The layers of a converted model share one region. A copy of a layer that joined the model later,
    such as PEFT's `modules_to_save`, has its own, which is entered too.
    """
    regions = {id(layer.region): layer.region for layer in layers}
    with ExitStack() as stack:
        for region in regions.values():
            stack.enter_context(region.entered(active))
        yield
