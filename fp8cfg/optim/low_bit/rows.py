"""Small tensors of one shape stepped as rows of one: compiled code takes longer to be called than to step them.

Their moments, and masters, are rows of common tensors, and the state of each parameter is views of them; so are gradients that
are stored in a codec. Weights and other gradients are others' to keep; they are put together for a step, a few at a time, and
weights are taken apart again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.numerics.codecs import Codec, Stored
from fp8cfg.optim.low_bit.adam_step import Slot
from fp8cfg.optim.low_bit.state import STORED, State
from fp8cfg.optim.low_bit.tensor_groups import WORTH_A_CALL, Back, Work

SMALL, TOGETHER = 1 << 16, 1 << 18
"""Elements up to which a tensor becomes a row, and elements up to which rows are put together: what is made for them then stays
in a processor's cache, and is no more than what is made for large tensors."""


class Rows:
    """Parameters of one shape. Their state, of the columns in `kept`, is views of rows from here on; `states` has that of each."""

    def __init__(self, params: list[nn.Parameter], state: State) -> None:
        self.params = params
        self.states = [state[p] for p in params]
        self.kept: dict[str, Stored] = {}
        self._grads: Stored | None = None
        self._of_each: dict[nn.Parameter, Stored] = {}
        for column in STORED:
            if column in self.states[0]:
                rows = self.kept[column] = together([one[column] for one in self.states])
                for one, *stored in zip(self.states, *apart(rows, params[0].shape), strict=True):
                    one[column] = tuple(stored)

    def gradient(self, p: nn.Parameter, codec: Codec) -> Stored:
        """Where the gradient of `p` is to be stored."""
        if self._grads is None:
            zeros = codec.zeros(p.shape, p.device)
            self._grads = together([zeros] * len(self.params))  # one kernel takes these and others that are put together
            self._of_each = dict(zip(self.params, zip(*apart(self._grads, p.shape), strict=True), strict=True))
        return self._of_each[p]

    def forget_gradients(self) -> None:
        """Let go of what `gradient` gave."""
        self._grads, self._of_each = None, {}

    def _gradients(self, grads: list[Stored]) -> Stored:
        if self._grads is not None and all(map(operator.is_, self._of_each.values(), grads)):
            return self._grads
        return together(grads)

    def work(self, hyper: Tensor, key: Tensor | None, grads: list[Stored], held: list[Stored] | None) -> Work:
        """The step of all of them; `grads`, and `held`, what weights are kept in outside of the optimizer, in their order."""
        back: list[Back] = []
        weight, copy = self.kept.get("weight"), None
        if weight is not None:
            copy = self.params[0].new_empty(len(self.params), self.params[0].numel())
            back.append(([*self.params], apart((copy,), self.params[0].shape)[0]))
        elif held is not None:
            weight = together(held)
            back += zip(map(list, zip(*held, strict=True)), apart(weight, held[0][0].shape), strict=True)
        source, of_master = (self.kept["master"], weight) if "master" in self.kept else (weight, None)
        assert source is not None, "a parameter without a master has a weight"
        slot = Slot(source, of_master, self.kept["exp_avg"], self.kept["exp_avg_sq"], copy, self._gradients(grads))
        return Work(slot, hyper, key, back)


def rows_of(params: list[nn.Parameter], state: State, alike: Callable[[nn.Parameter], Any], most: float) -> Iterator[Rows]:
    """Rows of those `params` that have small ones of their shape beside them, of at most `most` elements. `alike` is the same for
    parameters that may be together."""
    found: dict[Any, list[nn.Parameter]] = {}
    for p in params:
        if 0 < p.numel() <= SMALL:
            found.setdefault((p.shape, p.dtype, p.device, tuple(state[p]), alike(p)), []).append(p)
    for same in found.values():
        count = max(int(min(most, TOGETHER)) // same[0].numel(), 1)
        for part in (same[i : i + count] for i in range(0, len(same), count)):
            if len(part) > 1 and len(part) * part[0].numel() >= WORTH_A_CALL:
                yield Rows(part, state)


def together(stored: list[Stored]) -> Stored:
    """Data as [n, elements], scales as [n, 1]; copies."""
    return tuple(torch.stack(parts).view(len(stored), -1) for parts in zip(*stored, strict=True))


def apart(rows: Stored, shape: torch.Size) -> list[list[Tensor]]:
    """The inverse of `together`, as views: the data of all, the scales of all."""
    return [list(rows[0].view(-1, *shape).unbind()), *(list(scales.squeeze(1).unbind()) for scales in rows[1:])]
