"""Measures how much of the range of delayed scales the tensors of Transformer Engine's layers use.

Transformer Engine rolls amax histories and updates scales at the end of each pass, without a hook
(2.20). So its update function is replaced, once per process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8cfg.backends.te.layers import Engine, TELinear, format_of, fp8_state_manager
from fp8cfg.numerics.formats import E4M3, E5M2
from fp8cfg.numerics.scaling import compute_range_used

_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


class RangeWatch:
    """Range used by the tensors of a model's layers: maximum over the microbatches of a step.

    Args:
        engines: All engines of the model.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self._layers: list[TELinear] = []
        for engine in engines:
            self._layers += engine.linears
            engine.ranges = self
        # By pass, True for forward passes: float32 [columns of all engines].
        self._range_used: dict[bool, Tensor] = {}
        self._layer_columns: Tensor | None = None
        _WATCHES.add(self)

    @torch.no_grad()
    def record_pass(self, forward: bool) -> None:
        """Records a pass before its histories roll. All operations stay on the device."""
        side = "scaling_fwd" if forward else "scaling_bwd"
        states = [engine.module.fp8_meta[side] for engine in self._engines]
        amaxes = torch.cat([state.amax_history[0] for state in states])
        scales = torch.cat([state.scale for state in states])
        # All tensors of a side have the same format.
        format_name = format_of(self._engines[0].module.quantizers[side][0])
        reach = torch.tensor(_FORMATS[format_name].reach, dtype=torch.float32)
        range_used = compute_range_used(amaxes, scales, reach)
        if forward in self._range_used:
            range_used = torch.maximum(range_used, self._range_used[forward])
        self._range_used[forward] = range_used

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies as None: the layers of a copy are not watched, and it needs no others."""

    def end_step(self, skipped: bool) -> None:
        """Sets `range_used` of the layers, or None for a skipped step, and starts the next step."""
        recorded = self._range_used
        self._range_used = {}
        rows: Sequence[Tensor | None] = [None] * len(self._layers)
        if not skipped and len(recorded) == 2:
            forward = recorded[True]
            range_used = torch.cat([forward, recorded[False]])
            rows = range_used[self._columns(range_used.device, len(forward))].unbind()
        for layer, row in zip(self._layers, rows, strict=True):
            layer.range_used = row

    def _columns(self, device: torch.device, num_forward: int) -> Tensor:
        """Returns the columns of input, weight and grad_output of each layer, int64 [layers, 3].

        An engine has three forward columns per layer (input, weight, output), and two backward
        columns (grad_output, grad_input). The tensor is copied to `device` once.

        Args:
            device: Device of the result.
            num_forward: Number of forward columns. Backward columns follow.
        """
        if self._layer_columns is None:
            columns = []
            for n in range(len(self._layers)):
                columns.append([3 * n, 3 * n + 1, num_forward + 2 * n])
            self._layer_columns = torch.tensor(columns, dtype=torch.int64, device=device)
        return self._layer_columns


_WATCHES: weakref.WeakSet[RangeWatch] = weakref.WeakSet()
"""The watches of all models in this process."""


def watch_ranges(engines: Sequence[Engine]) -> None:
    """Watches the engines of a model if their recipe has delayed scaling."""
    if not engines or not engines[0].recipe.delayed():
        return
    RangeWatch(engines)
    manager = fp8_state_manager()
    update = manager.reduce_and_update_fp8_tensors
    if hasattr(update, "records_ranges"):
        return

    def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
        for watch in list(_WATCHES):
            watch.record_pass(forward)
        update(forward)

    reduce_and_update_fp8_tensors.records_ranges = True  # type: ignore[attr-defined]
    manager.reduce_and_update_fp8_tensors = staticmethod(reduce_and_update_fp8_tensors)
