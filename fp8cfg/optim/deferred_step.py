"""Deferred optimizer steps: the device decides whether a step is skipped, and the host learns of it later, without waiting.

    step      norm -> skip = not finite, or a step before was skipped -> clip -> fused inner step with found_inf = skip -> hooks
    settle    one step later: the norm as a number, and counts taken back where it was skipped

A step whose gradients are not finite changes nothing in its own place. The steps launched after it, before the host has read that,
change nothing either: without a loss scale such a run ends, with the weights of the step before. Under a loss scale it goes on, at
another learning rate and scale, which the host has to know; those steps are not deferred.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Deferrable(Protocol):
    """An optimizer over `inner`, one of torch's fused ones, that asks `deferred` where it is set."""

    inner: Any
    grad_norm: float
    can_defer: bool
    deferred: DeferredSteps | None

    def count(self, by: int, stepped: Sequence[nn.Parameter] | None = None) -> None: ...


class Launched(NamedTuple):
    """A step that is not settled: its norm, [] on the device, and the parameters that it steps."""

    norm: Tensor
    stepped: Sequence[nn.Parameter]


class DeferredSteps:
    """The steps of `optimizer` that are launched and not settled. While it is entered, `step` returns True whatever it finds, and
    `skip`, a bool [] on the device, says to the hooks of a step whether that is skipped."""

    def __init__(self, optimizer: Deferrable) -> None:
        if not optimizer.can_defer:
            raise ValueError("the steps of this optimizer cannot be deferred: it scales the loss, or its kernels take no found_inf")
        self._optimizer = optimizer
        self._waiting: deque[Launched] = deque()
        self.skip: Tensor | None = None

    def decide(self, norm: Tensor, stepped: Sequence[nn.Parameter]) -> None:
        """Let the inner step see on the device whether `norm`, of the step that begins, and those before it are finite."""
        skip = ~torch.isfinite(norm)
        self.skip = skip if self.skip is None else self.skip | skip
        self._optimizer.inner.found_inf = self.skip.float()  # as torch's GradScaler hands it over
        self._waiting.append(Launched(norm, stepped))

    @property
    def norm(self) -> Tensor:
        """The norm of the last step, [] on the device."""
        return self._waiting[-1].norm

    def settle(self, norm: float) -> bool:
        """Settle the earliest step that is not, whose norm is a number now: `grad_norm`, and counts taken back where it was
        skipped. Whether it was made; those that wait behind one that was not are taken back with it."""
        launched, optimizer = self._waiting.popleft(), self._optimizer
        optimizer.grad_norm = norm
        if math.isfinite(norm):
            return True
        for each in (launched, *self._waiting):
            optimizer.count(-1, each.stepped)
        self._waiting.clear()
        return False

    def __enter__(self) -> DeferredSteps:
        self._optimizer.deferred = self
        return self

    def __exit__(self, *_: object) -> None:
        """Settle what waits, and let steps decide for themselves again."""
        while self._waiting:
            self.settle(self._waiting[0].norm.item())
        self._optimizer.deferred = None
        if hasattr(self._optimizer.inner, "found_inf"):
            del self._optimizer.inner.found_inf


