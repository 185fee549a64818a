"""Optimizer steps as `fit` takes them, for measurements."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from fp8cfg.building.job import Job
from fp8cfg.data import Batches
from fp8cfg.optim.deferred_step import DeferredSteps
from fp8cfg.parallel.process_group import World
from fp8cfg.training.microbatches import can_run_ahead
from fp8cfg.training.overflow_watch import OverflowCollector
from fp8cfg.training.step import PendingStep, train_step


class FitSteps:
    """Optimizer steps of `job`: on a GPU, each is launched before the one before is read."""

    def __init__(self, job: Job, batches: Batches, world: World) -> None:
        self._job = job
        self._batches = batches
        self._world = world
        self._overflow = OverflowCollector(job, world)
        self._pending: deque[PendingStep] = deque()
        if job.optimizer.can_defer:
            DeferredSteps(job.optimizer).__enter__()  # type: ignore[arg-type]

    def take(self, step: int) -> None:
        """Launches step `step`, counted from 0, and reads the one before."""
        self._world.traffic.clear()
        self._pending.append(
            train_step(self._job, self._batches, step, self._world, self._collect_metrics)
        )
        while len(self._pending) > int(can_run_ahead(self._job)):
            self._overflow.read(self._pending.popleft().wait().metrics)

    def _collect_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        return self._overflow.collect(loss, request=0.0)
