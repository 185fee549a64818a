"""Learning-rate schedule with warm-up and decay.

It is a function of the step only, so it has no state to save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fp8cfg.schema.recipe import Recipe

Decay = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, decay, and a constant end.

    `cosine` has the same numbers as NeMo's CosineAnnealing (nemo/core/optim/lr_scheduler.py).
    `linear` and `constant` are lr_decay_style of Megatron
    (megatron/core/optimizer_param_scheduler.py) with the same warm-up. A warm-up longer than the
    run is cut short.

    Attributes:
        max_lr: Learning rate after the warm-up.
        min_lr: Learning rate after the decay. Unused by `constant`.
        warmup_steps: Steps of the warm-up.
        max_steps: Steps of the run. Unused by `constant`.
        constant_steps: Steps at `min_lr` at the end. With `constant` they only change the warm-up.
        decay: Shape of the decay.

    Raises:
        ValueError: The values describe no schedule.
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

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Schedule:
        """Returns the schedule of a recipe."""
        optim = recipe.optim
        return cls(
            max_lr=optim.lr,
            min_lr=optim.end_lr,
            warmup_steps=optim.warmup_steps,
            max_steps=recipe.trainer.max_steps,
            constant_steps=optim.constant_steps,
            decay=optim.lr_decay_style,
        )

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of the step after `step` completed steps."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            # NeMo has two warm-ups. With constant steps it is Megatron's, which starts at 0. Both
            # reach max_lr at warmup_steps.
            if self.constant_steps > 0:
                return self.max_lr * (step / self.warmup_steps)
            return self.max_lr * ((step + 1) / (self.warmup_steps + 1))
        if self.decay == "constant":
            return self.max_lr
        decay_steps = self.max_steps - self.warmup_steps - self.constant_steps
        if step >= self.warmup_steps + decay_steps:
            return self.min_lr
        done = (step - self.warmup_steps) / decay_steps
        remaining = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return (self.max_lr - self.min_lr) * remaining + self.min_lr

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Sets the learning rate for `step` in all parameter groups and returns it."""
        lr = self.lr_at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr
