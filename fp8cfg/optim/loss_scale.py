"""Loss scaling for fp16. It lifts small gradients above the smallest fp16 number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import Tensor


class LossScaleState(TypedDict):
    """State of a `LossScaler` as JSON values."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int


@dataclass
class LossScaler:
    """Dynamic loss scale like Megatron's DynamicGradScaler, or a constant one.

    Multiply the loss by `scale` before the backward pass. The optimizer divides the gradients
    again. The source is megatron/core/optimizer/grad_scaler.py.

    Attributes:
        loss_scale: Constant scale, or None for a dynamic scale.
        initial_loss_scale: First dynamic scale.
        min_loss_scale: Lower bound of the dynamic scale.
        loss_scale_window: Consecutive good steps that double the scale and restore the hysteresis.
        hysteresis: Overflows until the scale is halved. Later overflows halve it each time.
        scale: Factor of the next backward pass.

    Raises:
        ValueError: The values can never work.
    """

    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    hysteresis: int = 2
    scale: float = field(init=False)

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
        """Updates the scale after a step. `found_inf` is whether its gradients had inf or NaN."""
        if self.loss_scale is not None:
            return
        if found_inf:
            self._good_steps = 0
            # One good step does not restore the hysteresis, so overflows need not be consecutive.
            self._hysteresis_left -= 1
            if self._hysteresis_left <= 0:
                self.scale = max(self.scale * 0.5, self.min_loss_scale)
            return
        self._good_steps += 1
        # A resumed run may have a shorter window, and more good steps than that already.
        if self._good_steps >= self.loss_scale_window:
            self._good_steps = 0
            self._hysteresis_left = self.hysteresis
            self.scale *= 2.0

    def state(self) -> LossScaleState:
        """Returns the state to save, with Megatron's names."""
        return {
            "scale": self.scale,
            "growth_tracker": self._good_steps,
            "hysteresis_tracker": self._hysteresis_left,
        }

    def load_state(self, state: LossScaleState) -> None:
        """Restores a state. A constant scale does not change.

        Raises:
            ValueError: The names are not the names in `state()`.
        """
        check_loss_scale(self, state)
        if self.loss_scale is None:
            self.scale = float(state["scale"])
            self._good_steps = int(state["growth_tracker"])
            self._hysteresis_left = int(state["hysteresis_tracker"])


def check_loss_scale(loss_scaler: LossScaler | None, saved: Mapping[str, object] | None) -> None:
    """Checks the saved state of a loss scaler before it is loaded.

    Args:
        loss_scaler: The loss scaler of this run, or None.
        saved: `state()` of the saved run, or None.

    Raises:
        ValueError: Only one of the two runs scales the loss, or `saved` has other names.
    """
    if (saved is None) != (loss_scaler is None):
        raise ValueError(
            "optimizer state: the loss must be scaled by both the saved run and this one, or by"
            " neither"
        )
    if loss_scaler is None or saved is None:
        return
    expected = loss_scaler.state()
    if saved.keys() != expected.keys():
        raise ValueError(
            f"not the state of a loss scaler: {sorted(saved)}, expected {sorted(expected)}"
        )


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
        import torch  # local, because commands that only check a recipe do not load torch

        return (scale / torch.stack(on_device)).float()
    return [scale / share for share in shares]  # type: ignore[misc]
