"""Schedule with the interface of torch.optim.lr_scheduler, for loops of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from fp8cfg.optim.lr_schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor

    from fp8cfg.optim.low_bit.adam import LowBitTraining
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer


class StepScheduler(LRScheduler):
    """Sets the learning rate for the number of steps that the optimizer has done.

    Calls of `step` are not counted. Skipped steps do not advance it, as in Megatron's training.py,
    nor does Accelerate, which steps a scheduler once for each process. It has no state.

    Args:
        optimizer: The optimizer of a job.
        schedule: The schedule of its recipe.
    """

    optimizer: MixedPrecisionOptimizer | LowBitTraining

    def __init__(
        self, optimizer: MixedPrecisionOptimizer | LowBitTraining, schedule: Schedule
    ) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Returns the learning rate of the next step for each parameter group."""
        # Not last_epoch of the base class: it also counts skipped steps.
        return [self.schedule.lr_at(self.optimizer.steps)] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters of the base class. The schedule comes from the recipe."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}
