"""Learning-rate schedule: warm-up and decay as a function of the step alone, with no state to save or to restore wrongly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch.optim import Optimizer

Decay = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `max_lr`, decay to `min_lr`, and `constant_steps` at `min_lr` before `max_steps`.

    `cosine` is NeMo's CosineAnnealing (nemo/core/optim/lr_scheduler.py), number for number. `linear` and `constant` are
    Megatron's `lr_decay_style` (megatron/core/optimizer_param_scheduler.py) behind the same warm-up; `constant` stays
    at `max_lr` and reads neither `min_lr` nor the last two counts. Learning rates are absolute, not factors.

    Raises ValueError for values that describe no schedule. A warm-up longer than the run is one: it is cut short.
    """

    max_lr: float
    min_lr: float
    warmup_steps: int
    max_steps: int
    constant_steps: int = 0
    decay: Decay = "cosine"

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_lr <= self.max_lr:
            raise ValueError(f"min_lr={self.min_lr} must lie between 0 and max_lr={self.max_lr}")
        for name in ("warmup_steps", "max_steps", "constant_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.decay not in get_args(Decay):
            raise ValueError(f"decay={self.decay!r} is not one of {', '.join(get_args(Decay))}")

    def lr_at(self, step: int) -> float:
        """Learning rate of the optimizer step that follows `step` completed ones; the first is `lr_at(0)`.

        NeMo has two warm-ups: (step + 1) / (warmup_steps + 1) of `max_lr`, and Megatron's step / warmup_steps, which
        begins at 0, where there are constant steps. Both reach `max_lr` at `warmup_steps`.
        """
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            if self.constant_steps > 0:
                return self.max_lr * (step / self.warmup_steps)
            return self.max_lr * ((step + 1) / (self.warmup_steps + 1))
        if self.decay == "constant":
            return self.max_lr
        decay_steps = self.max_steps - self.warmup_steps - self.constant_steps
        if step >= self.warmup_steps + decay_steps:
            return self.min_lr
        done = (step - self.warmup_steps) / decay_steps
        left = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return (self.max_lr - self.min_lr) * left + self.min_lr

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Set `lr_at(step)` in every parameter group, and return it."""
        lr = self.lr_at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr
