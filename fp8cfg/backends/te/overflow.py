"""Overflow of Transformer Engine's tensors under delayed scaling: amaxes of a pass against the scales that it had.

Transformer Engine rolls its histories and moves its scales once for each forward and each backward pass, all in one call. Just
before it both are there: no tensor is read once more, and nothing waits. Its other scalings keep no amax.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8cfg.backends.te.engine import Engine, kind, manager
from fp8cfg.numerics.formats import E4M3, E5M2
from fp8cfg.numerics.scaling import range_used

if TYPE_CHECKING:
    from fp8cfg.backends.te.layers import TELinear

_WATCHES: weakref.WeakSet[RangeWatch] = weakref.WeakSet()
_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}


class RangeWatch:
    """What the tensors of `engines`, which a model has, used of the range of their scales since the last step, the largest of its
    microbatches: input, weight and grad_output of each linear layer."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines, self._used = tuple(engines), dict[bool, Tensor]()
        self._places: Tensor | None = None
        self._layers: list[TELinear] = [linear for engine in engines for linear in engine.linears]
        for engine in engines:
            engine.ranges = self
        _WATCHES.add(self)

    @torch.no_grad()
    def take(self, forward: bool) -> None:
        """Note what a pass used, before its histories are rolled."""
        side = "scaling_fwd" if forward else "scaling_bwd"
        states = [engine.module.fp8_meta[side] for engine in self._engines]
        amaxes, scales = (
            torch.cat([state.amax_history[0] for state in states]),
            torch.cat([state.scale for state in states]),
        )
        reach = _FORMATS[kind(self._engines[0].module.quantizers[side][0])].reach
        used = range_used(amaxes, scales, torch.tensor(reach, dtype=torch.float32))
        self._used[forward] = (
            torch.maximum(used, self._used[forward]) if forward in self._used else used
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copied layer or model is not watched, and brings none of the other layers along."""

    def settle(self, made: bool) -> None:
        """Give the layers what the passes since the last call used, where the step was `made`."""
        used, self._used = self._used, {}
        rows: Sequence[Tensor | None] = [None] * len(self._layers)
        if made and len(used) == 2:
            both = torch.cat([used[True], used[False]])
            rows = both[self._columns(both.device, len(used[True]))].unbind()
        for layer, row in zip(self._layers, rows, strict=True):
            layer.range_used = row

    def _columns(self, device: torch.device, backward: int) -> Tensor:
        """Where the columns of each layer are, int64 [layers, 3] on `device`, copied there once; those of the backward pass begin
        at `backward`. A module has three for each product forward (input, weight, output), and two backward (grad_output,
        grad_input)."""
        if self._places is None:
            products = range(len(self._layers))  # of all modules, in their order
            places = [[3 * n, 3 * n + 1, backward + 2 * n] for n in products]
            self._places = torch.tensor(places, dtype=torch.int64, device=device)
        return self._places


def watch_ranges(engines: Sequence[Engine]) -> None:
    """Watch `engines`, if their recipe has delayed scaling. Transformer Engine tells nobody that it moves scales (2.20), so that
    its function is replaced, once for the process."""
    if not engines or not engines[0].recipe.delayed():
        return
    RangeWatch(engines)
    update = manager().reduce_and_update_fp8_tensors
    if hasattr(update, "takes_ranges"):
        return

    def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
        for watch in list(_WATCHES):
            watch.take(forward)
        update(forward)

    reduce_and_update_fp8_tensors.takes_ranges = True  # type: ignore[attr-defined]
    manager().reduce_and_update_fp8_tensors = staticmethod(reduce_and_update_fp8_tensors)
