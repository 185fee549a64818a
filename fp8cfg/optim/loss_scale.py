"""Loss scaling for float16, dynamic or constant: it lifts small gradients above the smallest float16 number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import Tensor


class LossScaleState(TypedDict):
    """The state of a `LossScaler` as plain JSON values."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int


@dataclass
class LossScaler:
    """Megatron's DynamicGradScaler (megatron/core/optimizer/grad_scaler.py), or a constant `loss_scale` where given.

    Each overflow uses up one of `hysteresis`; once none is left, each overflow halves the scale, down to
    `min_loss_scale`. `loss_scale_window` good steps in a row double it and restore the hysteresis. A single good step
    does not restore it: overflows need not follow one another to count.

    Multiply the loss by `scale` before the backward pass; the optimizer divides the gradients again. Raises ValueError
    for values that can never work.
    """

    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    hysteresis: int = 2
    scale: float = field(init=False)
    """The factor of the next backward pass."""

    def __post_init__(self) -> None:
        if self.loss_scale is not None and self.loss_scale <= 0.0:
            raise ValueError(f"loss_scale={self.loss_scale} must be positive")
        if not 0.0 < self.min_loss_scale <= self.initial_loss_scale:
            raise ValueError(
                f"min_loss_scale={self.min_loss_scale} must be positive and at most "
                f"initial_loss_scale={self.initial_loss_scale}"
            )
        if self.loss_scale_window < 1 or self.hysteresis < 1:
            raise ValueError(
                f"loss_scale_window={self.loss_scale_window} and hysteresis={self.hysteresis} must"
                " be at least 1"
            )
        self.scale = float(self.initial_loss_scale if self.loss_scale is None else self.loss_scale)
        self._good_steps = 0
        self._hysteresis_left = self.hysteresis

    def update(self, found_inf: bool) -> None:
        """Update the scale after one step, given whether its gradients overflowed (inf or NaN)."""
        if self.loss_scale is not None:
            return
        if found_inf:
            self._good_steps = 0
            self._hysteresis_left -= 1
            if self._hysteresis_left <= 0:
                self.scale = max(self.scale * 0.5, self.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps == self.loss_scale_window:
            self._good_steps = 0
            self._hysteresis_left = self.hysteresis
            self.scale *= 2.0

    def state(self) -> LossScaleState:
        """The state to save, under Megatron's names."""
        return {
            "scale": self.scale,
            "growth_tracker": self._good_steps,
            "hysteresis_tracker": self._hysteresis_left,
        }

    def load_state(self, state: LossScaleState) -> None:
        """Restore `state`; a constant scale is not changed. Raises ValueError for names other than those of `state()`."""
        if state.keys() != self.state().keys():
            raise ValueError(
                f"not the state of a loss scaler: {sorted(state)}, expected {sorted(self.state())}"
            )
        if self.loss_scale is None:
            self.scale = float(state["scale"])
            self._good_steps = int(state["growth_tracker"])
            self._hysteresis_left = int(state["hysteresis_tracker"])


def loss_factors(
    loss_scaler: LossScaler | None, shares: Sequence[float | Tensor]
) -> list[float] | Tensor:
    """Returns the factors of losses before their backward passes: the loss scale over `shares`.

    Args:
        shares: For each loss, the number of equal shares of the step's loss that it is one of.
            Numbers, or float64 [] on the device for all losses.

    Returns:
        Numbers, or float32 [losses] on the device.
    """
    scale = 1.0 if loss_scaler is None else loss_scaler.scale
    on_device = [share for share in shares if not isinstance(share, (int, float))]
    if on_device:
        import torch  # here: commands that only check a recipe do without it

        return (scale / torch.stack(on_device)).float()
    return [scale / share for share in shares]  # type: ignore[misc]
