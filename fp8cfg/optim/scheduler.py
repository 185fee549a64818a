"""Scheduler in the interface of torch.optim.lr_scheduler, for loops of other projects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from fp8cfg.optim.lr_schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor

    from fp8cfg.optim.low_bit.adam import LowBitTraining
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer


class StepScheduler(LRScheduler):
    """`schedule` at the steps that `optimizer` has done, however often it is stepped itself: a skipped step does not move it
    (Megatron's training.py), nor does Accelerate, which steps a scheduler once for each process. It has no state of its own.
    """

    optimizer: MixedPrecisionOptimizer | LowBitTraining

    def __init__(
        self, optimizer: MixedPrecisionOptimizer | LowBitTraining, schedule: Schedule
    ) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of the next step, for each parameter group."""
        return [self.schedule.lr_at(self.optimizer.steps)] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """What the base class counts, without the schedule, which is the recipe's."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}
