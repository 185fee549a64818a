"""Look-ahead: each of several ranks reads its data before the step that needs them.

A rank that found bad data in the midst of a step would leave the others waiting for it, and nobody
could save. Found a step early, it is a reason to stop: all ranks save and end together.
"""

from __future__ import annotations

from fp8cfg.building.job import Job
from fp8cfg.data import Batches, DataError
from fp8cfg.parallel.mesh import batch_share
from fp8cfg.parallel.process_group import World


class LookAhead:
    """Reads the data of this rank up to `steps` steps ahead. On one rank it does nothing.

    Attributes:
        problem: What is wrong with the data of a later step, or "".
    """

    def __init__(self, job: Job, batches: Batches, world: World, first: int, steps: int) -> None:
        self._batches = batches
        self._share = batch_share(job.recipe.trainer.strategy, world.rank, world.size)
        self._last = job.recipe.trainer.max_steps if world.size > 1 else 0
        self._next = first + 1
        self._steps = steps
        self.problem = ""

    def read(self, step: int) -> None:
        """Reads the data of the steps after number `step`, the first being 0, which is to begin."""
        while not self.problem and self._next <= min(step + self._steps, self._last - 1):
            try:
                self._batches.batch(self._next, *self._share)
            except (DataError, OSError) as error:
                self.problem = str(error)
            self._next += 1
