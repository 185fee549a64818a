"""Deferred optimizer steps: the device decides whether a step is skipped, and the host learns of it later, without waiting.

    step      norm -> skip = not finite -> clip -> fused step with found_inf = skip, or low-bit step with skip -> hooks
    settle    one step later: the norm as a number, and counts taken back where it was skipped

A step whose gradients are not finite changes nothing in its own place. Without a loss scale the run ends there: the steps launched
after it, before the host has read that, change nothing either, and weights are those of the step before. Under a loss scale the run
goes on, at another scale and learning rate. The host knows both that can come of the one step that it has not read, sends both, and
the device takes one (`either`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fp8cfg.numerics.async_copies import sent
from fp8cfg.optim.loss_scale import LossScaler


class Scaled(Protocol):
    """An optimizer that counts its steps, and may have a loss scale."""

    steps: int
    loss_scaler: LossScaler | None
    deferred: DeferredSteps | None


class Deferrable(Scaled, Protocol):
    """An optimizer that asks `deferred` where it is set, and gives its `skip` to its kernels."""

    grad_norm: float
    can_defer: bool

    def count(self, by: int, stepped: Collection[nn.Parameter] | None = None) -> None: ...


class Launched(NamedTuple):
    """A step that is not settled: its norm, [] on the device, and the parameters that it steps."""

    norm: Tensor
    stepped: Collection[nn.Parameter]


class Either(NamedTuple):
    """A number that depends on whether the step before is `made` or `skipped`."""

    made: float
    skipped: float


def either(optimizer: Scaled, number: Callable[[LossScaler | None, int], float]) -> float | Either:
    """`number` of the loss scale of `optimizer` and of its count of steps, as they are before the step that is to begin; both that
    it may be, where the step before is not settled."""
    deferred = optimizer.deferred
    return (
        number(optimizer.loss_scaler, optimizer.steps)
        if deferred is None
        else deferred.either(number)
    )


def taken(
    optimizer: Scaled,
    number: Callable[[LossScaler | None, int], float],
    dtype: torch.dtype = torch.float32,
) -> float | Tensor:
    """`either` to compute with: the number, or the one that the device takes of two, [] of `dtype`."""
    found = either(optimizer, number)
    if not isinstance(found, Either):
        return found
    assert optimizer.deferred is not None, "or there is one number"
    return optimizer.deferred.choose([found.made], [found.skipped], dtype)[0]


def loss_factors(optimizer: Scaled, parts: Sequence[float | Tensor]) -> list[float] | Tensor:
    """What losses, of which each is one of so many `parts`, are multiplied by before their backward passes: the loss scale, or 1,
    over these, floats or float32 [parts] on the device. `parts` are numbers, or all of them float64 [] on the device.
    """
    if counted := [n for n in parts if isinstance(n, Tensor)]:
        return (taken(optimizer, _loss_scale, torch.float64) / torch.stack(counted)).float()
    numbers, scale = [n for n in parts if not isinstance(n, Tensor)], either(optimizer, _loss_scale)
    if not isinstance(scale, Either):
        return [scale / n for n in numbers]
    assert optimizer.deferred is not None, "or there is one number"
    return optimizer.deferred.choose(
        [scale.made / n for n in numbers], [scale.skipped / n for n in numbers]
    )


def _loss_scale(scaler: LossScaler | None, _: int) -> float:
    return scaler.scale if scaler else 1.0


def lr_after(lr: float | Either, made: bool) -> float:
    """The learning rate where the step before was `made`, or skipped."""
    return (lr.made if made else lr.skipped) if isinstance(lr, Either) else lr


def unscale(gradients: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place; of those that are split over ranks the parts that are here."""
    here: list[Tensor] = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    torch._foreach_mul_(here, factor)


class DeferredSteps:
    """The steps of `optimizer` that are launched and not settled, one as the next begins. While it is entered, `step` returns True
    whatever it finds, and `skip`, a bool [] on the device, says to the hooks of a step whether that is skipped.
    """

    def __init__(self, optimizer: Deferrable) -> None:
        if not optimizer.can_defer:
            raise ValueError(
                "the steps of this optimizer cannot be deferred: the host has to know how each"
                " ended, or its kernels take no found_inf"
            )
        self._optimizer = optimizer
        self._waiting: deque[Launched] = deque()
        self.skip: Tensor | None = None
        self.before: Tensor | None = None
        self._empty: Tensor | None = None
        self.made = True
        """Whether the step that was settled last was made."""

    def either(self, number: Callable[[LossScaler | None, int], float]) -> float | Either:
        """As the function `either`."""
        scaler, steps = self._optimizer.loss_scaler, self._optimizer.steps
        if not self._waiting or scaler is None:
            return number(scaler, steps)
        assert len(self._waiting) == 1, "all but one were settled"
        self.before = self.skip
        made, skipped = (
            number(scaler.after(found_inf=False), steps),
            number(scaler.after(found_inf=True), steps - 1),
        )
        if made == skipped:
            return made
        return Either(made, skipped)

    def choose(
        self, made: Sequence[float], skipped: Sequence[float], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The numbers, of `dtype` on the device, by whether the step before is made or skipped."""
        assert self.before is not None, "a step waits"
        both = sent(torch.tensor([made, skipped], dtype=dtype), self.before.device)
        return torch.where(self.before, both[1], both[0])

    def waits_for(self, p: nn.Parameter) -> bool:
        """Whether a loss scale lets the run go on, and a step of `p` is not settled before the one that began."""
        waiting = self._optimizer.loss_scaler is not None and len(self._waiting) == 2
        return waiting and p in self._waiting[0].stepped

    @property
    def late(self) -> Tensor | None:
        """Whether the step before was skipped, so that the count of the one under way is one too high, as a bool [] on the device;
        None where the count is right."""
        return (
            self.before
            if self._optimizer.loss_scaler is not None and len(self._waiting) == 2
            else None
        )

    def begin(self, targets: Tensor) -> None:
        """A step begins that has so many `targets`, [] on the device: without one it is skipped, and so are all behind it."""
        empty = targets == 0
        self._empty = empty if self._empty is None else self._empty | empty

    def decide(self, norm: Tensor, stepped: Iterable[nn.Parameter]) -> None:
        """Let the inner step see on the device whether `norm`, of the step that begins, is finite, and, where no loss scale lets
        the run go on, those before it."""
        if self._empty is not None:
            norm = norm.masked_fill(self._empty, torch.nan)
        skip, self.before = ~torch.isfinite(norm), self.skip
        self.skip = skip if self.skip is None or self._optimizer.loss_scaler else self.skip | skip
        self._waiting.append(Launched(norm, dict.fromkeys(stepped)))

    def found_inf(self, two: bool) -> list[tuple[bool, Tensor]]:
        """`found_inf` of torch's fused kernels, float32 [], to launch the step with. Where the learning rate may be one of `two`,
        it is launched for the one that follows a step that was made, True, and for the other: each in the host's double precision,
        and one of them does nothing."""
        assert self.skip is not None, "a step was decided"
        if not two or self.before is None:
            return [(True, self.skip.float())]
        return [
            (True, (self.skip | self.before).float()),
            (False, (self.skip | ~self.before).float()),
        ]

    @property
    def norm(self) -> Tensor:
        """The norm of the last step, [] on the device."""
        return self._waiting[-1].norm

    def settle(self, norm: float) -> bool:
        """Settle the earliest step that is not, whose norm is a number now: `grad_norm`, the loss scale, and counts taken back
        where it was skipped. Whether it was made; without a loss scale those that wait behind one that was not are taken back, too.
        """
        launched, optimizer = self._waiting.popleft(), self._optimizer
        optimizer.grad_norm, self.made = norm, math.isfinite(norm)
        if optimizer.loss_scaler is not None:
            optimizer.loss_scaler.update(found_inf=not self.made)
        if self.made:
            return True
        optimizer.count(-1, launched.stepped)
        while self._waiting and optimizer.loss_scaler is None:
            optimizer.count(-1, self._waiting.popleft().stepped)
        return False

    def __enter__(self) -> DeferredSteps:
        self._optimizer.deferred = self
        return self

    def __exit__(self, *_: object) -> None:
        """Settle what waits, and let steps decide for themselves again."""
        while self._waiting:
            self.settle(self._waiting[0].norm.item())
        self._optimizer.deferred = None
        if (inner := getattr(self._optimizer, "inner", None)) is not None:
            vars(inner).pop("found_inf", None)
