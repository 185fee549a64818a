"""Look-ahead: finds bad data of a later step while all ranks can still stop together.

If one rank fails in the middle of a step, the other ranks wait for it in a collective. Then no rank
can save. A problem found one step earlier is a request to stop: all ranks save, then exit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8cfg.data import Batches, DataError
from fp8cfg.parallel.mesh import batch_share
from fp8cfg.parallel.process_group import World

if TYPE_CHECKING:
    from fp8cfg.building.job import Job


class LookAhead:
    """Reads the data of this rank ahead of the training steps. Does nothing in a single-rank run.

    Args:
        job: The job.
        batches: Training data.
        world: Ranks of the run.
        first: First step of the run, counted from 0.
        steps: How many steps to read ahead.

    Attributes:
        problem: The error in the data of a later step, or "".
    """

    def __init__(self, job: Job, batches: Batches, world: World, first: int, steps: int) -> None:
        self._batches = batches
        self._share = batch_share(job.recipe.trainer.strategy, world.rank, world.size)
        self._last = job.recipe.trainer.max_steps
        if world.size == 1:
            self._last = 0  # one rank can save after an error in its step
        self._steps = steps
        self.restart(first)

    def restart(self, first: int) -> None:
        """Continues before step `first`, counted from 0, after a return to a checkpoint."""
        # A failure in the first step loses nothing, since nothing is trained yet.
        self._next = first + 1
        self.problem = ""

    def read(self, step: int) -> None:
        """Reads the data of the steps after `step`. Call it before this step, counted from 0."""
        # The batches are dropped here. The training step reads them again.
        while not self.problem and self._next <= min(step + self._steps, self._last - 1):
            try:
                self._batches.batch(self._next, *self._share)
            except (DataError, OSError) as error:
                self.problem = str(error)
            self._next += 1
