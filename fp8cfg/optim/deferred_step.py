"""Deferred optimizer steps: the device decides whether to skip a step, and `step` does not wait.

    step      norm -> skip = not finite -> clip -> update with found_inf = skip -> hooks
    settle    the host reads the norm, and takes back the counts of a skipped step

Without a loss scale the host may launch a step before it has settled the one before. If the first
one is skipped then the second one is skipped, too: the run ends, and the weights are intact. Under
a loss scale the host settles each step before it launches the next, because the loss scale and the
learning rate depend on it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fp8cfg.optim.loss_scale import LossScaler


class Deferrable(Protocol):
    """Protocol: an optimizer whose kernels read `deferred.skip` on the device."""

    steps: int
    grad_norm: float
    loss_scaler: LossScaler | None
    can_defer: bool
    deferred: DeferredSteps | None

    def count(self, by: int, stepped: Collection[nn.Parameter] | None = None) -> None: ...


class LaunchedStep(NamedTuple):
    """A step that the host has not settled.

    Attributes:
        norm: Norm of the gradients, float32 [] on the device.
        parameters: Parameters with a gradient.
    """

    norm: Tensor
    parameters: Collection[nn.Parameter]


class DeferredSteps:
    """Context manager in which the device decides about the steps of `optimizer`.

    Inside, `optimizer.step()` returns True for every step, and `settle` returns the decision.

    Attributes:
        skip: Whether the last step is skipped, bool [] on the device.
    """

    def __init__(self, optimizer: Deferrable) -> None:
        if not optimizer.can_defer:
            raise ValueError(
                "the steps of this optimizer cannot be deferred: the host has to know how each"
                " ended, or its kernels take no found_inf"
            )
        self._optimizer = optimizer
        self._launched: deque[LaunchedStep] = deque()
        self._lacks_targets: Tensor | None = None
        self.skip: Tensor | None = None

    def skip_without_targets(self, num_targets: Tensor) -> None:
        """Skips the next step and all later ones if `num_targets`, [] on the device, is 0."""
        lacks_targets = num_targets == 0
        if self._lacks_targets is not None:
            lacks_targets = self._lacks_targets | lacks_targets
        self._lacks_targets = lacks_targets

    def decide(self, norm: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Sets `skip` for the step of `parameters`, whose gradients have the norm `norm`, []."""
        if self._lacks_targets is not None:
            norm = norm.masked_fill(self._lacks_targets, torch.nan)
        skip = ~torch.isfinite(norm)
        if self._launched and self.skip is not None:
            # The host does not know yet whether the step before was skipped. If so, the run ends.
            skip = self.skip | skip
        self.skip = skip
        self._launched.append(LaunchedStep(norm, dict.fromkeys(parameters)))

    @property
    def norm(self) -> Tensor:
        """The norm of the last step, float32 [] on the device."""
        return self._launched[-1].norm

    def settle(self, norm: float) -> bool:
        """Settles the oldest launched step, whose norm the host has read.

        Sets `grad_norm` and the loss scale. Takes back the counts of a skipped step, and of all
        steps launched behind it.

        Returns:
            Whether the step was made, not skipped.
        """
        optimizer = self._optimizer
        step = self._launched.popleft()
        optimizer.grad_norm = norm
        is_finite = math.isfinite(norm)
        if optimizer.loss_scaler is not None:
            optimizer.loss_scaler.update(found_inf=not is_finite)
        if not is_finite:
            # The device has skipped all steps behind a skipped one, see `decide`.
            optimizer.count(-1, step.parameters)
            while self._launched:
                optimizer.count(-1, self._launched.popleft().parameters)
        return is_finite

    def __enter__(self) -> DeferredSteps:
        self._optimizer.deferred = self
        return self

    def __exit__(self, *_: object) -> None:
        """Settles all launched steps. From here on the host decides again."""
        while self._launched:
            self.settle(self._launched[0].norm.item())
        self._optimizer.deferred = None
        inner = getattr(self._optimizer, "inner", None)
        if inner is not None:
            vars(inner).pop("found_inf", None)
