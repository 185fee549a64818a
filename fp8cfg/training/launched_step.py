"""Launched steps: training steps that a GPU may still be at, and what the host reads of each once it is done.

One copy brings loss, norm, overflow and the ranks' wish to stop to the host; it is read when the next step is launched, so that
the device never waits for the host, and the host for one step at most. Whether a step is skipped is decided on the device
(optim/deferred_step.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8cfg.data import Batches
from fp8cfg.job import Job
from fp8cfg.numerics import Overflow
from fp8cfg.numerics.fp8_overflow import RangesUsed, overflow_of, ranges_used
from fp8cfg.numerics.host_copy import HostCopy
from fp8cfg.optim.deferred_step import DeferredSteps, Either, lr_after
from fp8cfg.training.distributed.world import World, stages
from fp8cfg.training.microbatches import refuse_without_targets
from fp8cfg.training.overflow_watch import (
    counts_over_stages,
    of_counts,
    over_ranks,
    values_of,
    with_own_amaxes,
)
from fp8cfg.training.train_step import Step, run_step


@dataclass(frozen=True)
class Seen:
    """What the host knows of a step that is done: `step` itself, what its FP8 tensors did not hold, how many values that were where
    they are counted, and whether a rank wants to stop."""

    step: Step
    overflow: Overflow | None
    values: list[int] | None
    stop: bool


@dataclass(frozen=True)
class LaunchedStep:
    """Optimizer step number `done`, from 1, on its way. `traffic` is what this rank sent in it: bytes, and their text."""

    done: int
    lr: float | Either
    traffic: tuple[int, str]
    _job: Job
    _numbers: HostCopy
    _own: int
    _values: int
    _names: list[str] | None
    _stages: World

    def settle(self, deferred: DeferredSteps) -> Seen:
        """Wait until it is done, and settle it in the optimizer. Steps are settled in the order in which they were launched. Raises
        ConfigError where it had no targets."""
        numbers = self._numbers.read()
        loss, norm, stop, *empty = numbers[: self._own].tolist()
        values = numbers[self._own : self._own + self._values].long().tolist() or None
        lr = lr_after(self.lr, deferred.made)
        stepped = deferred.settle(norm)
        if any(empty):
            refuse_without_targets(self._job, self.done - 1)
        return Seen(
            Step(loss, lr, norm, stepped),
            self._overflow(numbers) if stepped else None,
            values,
            stop > 0,
        )

    def _overflow(self, numbers: Tensor) -> Overflow | None:
        """That of all stages of a pipeline."""
        rest, staged = numbers[self._own + self._values :], self._stages.size > 1
        own = overflow_of(
            None if self._names is None else RangesUsed(rest[3 if staged else 0 :], self._names)
        )
        return of_counts(rest[:3], own, self._stages) if staged else own


def launch_step(
    job: Job,
    batches: Batches,
    step: int,
    world: World,
    deferred: DeferredSteps,
    stop: Callable[[], bool],
) -> LaunchedStep:
    """Launch optimizer step number `step`, the first being 0. `stop` gives this rank's wish."""
    mean, lr, _, targets = run_step(job, batches, step, world)
    used = over_ranks(ranges_used(job.model), with_own_amaxes(job))
    asked, values = _over_ranks(float(stop()), values_of(job), mean, world)
    counts = (
        [counts_over_stages(used, mean, here)] if (here := stages(job.prepared)).size > 1 else []
    )
    own = [
        mean,
        deferred.norm,
        asked,
        *([] if targets is None else [(targets == 0).to(mean.dtype)]),
    ]
    numbers = torch.cat([torch.stack(own), *values, *counts, *([used.ratios] if used else [])])
    sent = sum(world.traffic.bytes.values()), str(world.traffic)
    return LaunchedStep(
        step + 1,
        lr,
        sent,
        job,
        HostCopy.of(numbers),
        len(own),
        2 * len(values),
        used and used.names,
        here,
    )


def _over_ranks(
    stop: float, counter: Tensor | None, like: Tensor, world: World
) -> tuple[Tensor, list[Tensor]]:
    """The largest `stop` of all ranks, [], and their largest numbers of values, [2], if there is a `counter`: in one reduction, for
    which the wish has a place behind the counts."""
    if counter is None:
        return world.largest(torch.full_like(like, stop)), []
    counter[2].fill_(stop)
    most = world.largest(counter[:3]).to(like.dtype)
    return most[2], [most[:2]]
