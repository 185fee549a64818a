"""Step sequence: the optimizer steps of a run in their order, each read before the next begins, or on a GPU launched one ahead.

Losses, metrics, messages and checkpoints are the same either way: a step that is launched ahead is settled before anything else
looks at the job, and one that is not finite changes nothing and keeps those behind it from changing anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from fp8cfg.building.job import Job
from fp8cfg.data import Batches
from fp8cfg.numerics import Overflow
from fp8cfg.numerics.amax_update import RangesUsed, collect_ranges_used, read_overflow
from fp8cfg.numerics.async_copies import HostCopy
from fp8cfg.optim.deferred_step import DeferredSteps
from fp8cfg.parallel.process_group import World, stages
from fp8cfg.training.overflow_watch import (
    counts_over_stages,
    of_counts,
    over_ranks,
    over_stages,
    values_of,
    with_own_amaxes,
)
from fp8cfg.training.step import Step, refuse_without_targets, run_step, train_step


class Wish(IntEnum):
    """What a rank wants after a step. The largest wish of all ranks counts."""

    NONE = 0
    SAVE = 1
    STOP = 2


@dataclass(frozen=True)
class Seen:
    """What the host knows of a step that is done: `step` itself, what its FP8 tensors did not hold, how many values that were where
    they are counted, and the largest wish of all ranks."""

    step: Step
    overflow: Overflow | None
    values: list[int] | None
    wish: Wish


@dataclass(frozen=True)
class LaunchedStep:
    """Optimizer step number `done`, from 1, on its way. `traffic` is what this rank sent in it: bytes, and their text."""

    done: int
    lr: float
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
        loss, norm, wish, *empty = numbers[: self._own].tolist()
        values = numbers[self._own : self._own + self._values].long().tolist() or None
        stepped = deferred.settle(norm)
        if any(empty):
            refuse_without_targets(self._job, self.done - 1)
        return Seen(
            Step(loss, self.lr, norm, stepped),
            self._overflow(numbers) if stepped else None,
            values,
            Wish(round(wish)),
        )

    def _overflow(self, numbers: Tensor) -> Overflow | None:
        """That of all stages of a pipeline."""
        rest, staged = numbers[self._own + self._values :], self._stages.size > 1
        own = read_overflow(
            None if self._names is None else RangesUsed(rest[3 if staged else 0 :], self._names)
        )
        return of_counts(rest[:3], own, self._stages) if staged else own


def launch_step(
    job: Job,
    batches: Batches,
    step: int,
    world: World,
    deferred: DeferredSteps,
    wish: Callable[[], Wish],
) -> LaunchedStep:
    """Launch optimizer step number `step`, the first being 0. `wish` gives this rank's wish."""
    mean, lr, _, targets = run_step(job, batches, step, world)
    used = over_ranks(collect_ranges_used(job.model), with_own_amaxes(job))
    asked, values = _over_ranks(float(wish()), values_of(job), mean, world)
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
    wish: float, counter: Tensor | None, like: Tensor, world: World
) -> tuple[Tensor, list[Tensor]]:
    """The largest `wish` of all ranks, [], and their largest numbers of values, [2], if there is a `counter`: in one reduction, for
    which the wish has a place behind the counts."""
    if counter is None:
        return world.largest(torch.full_like(like, wish)), []
    counter[2].fill_(wish)
    most = world.largest(counter[:3]).to(like.dtype)
    return most[2], [most[:2]]


@dataclass(frozen=True)
class Done:
    """Optimizer step `number`, from 1, that is done, what its FP8 tensors did not hold, of all stages of a pipeline, how many
    values were clipped and infinite on the rank that has most, where these are counted, the bytes that this rank sent in it, and as
    text, and how long it took: launched ahead, since the step before was done."""

    number: int
    step: Step
    overflow: Overflow | None
    values: list[int] | None
    sent: tuple[int, str]
    seconds: float


def may_launch_ahead(job: Job) -> bool:
    """Whether a run of `job` launches a step before it has read the one before; on a CPU that gains nothing."""
    return job.device.type == "cuda" and job.optimizer.can_defer


class StepSequence:
    """Takes the steps of a run. `record` is called with each that is done, in order, and may raise to end the run; `wish` gives what
    this rank wants after a step. All ranks make the same calls."""

    def __init__(
        self,
        job: Job,
        batches: Batches,
        world: World,
        wish: Callable[[], Wish],
        record: Callable[[Done], None],
        ahead: bool,
    ) -> None:
        self._job, self._batches, self._world, self._wish, self._record = (
            job,
            batches,
            world,
            wish,
            record,
        )
        optimizer: Any = job.optimizer  # of a kind that can defer, can_defer says so
        self._deferred = DeferredSteps(optimizer) if ahead else None
        self._launched: LaunchedStep | None = None
        self._asked = Wish.NONE
        self._entered = ExitStack()
        values_of(job)  # of whatever was quantized before

    def take(self, step: int, settled: bool) -> None:
        """Make step number `step`, the first being 0; where it may be launched ahead and need not be `settled`, it may go on."""
        self._world.traffic.clear()
        if self._deferred is None:
            began = time.perf_counter()
            result = train_step(self._job, self._batches, step, self._world)
            seconds = time.perf_counter() - began
            sent = sum(self._world.traffic.bytes.values()), str(self._world.traffic)
            used = over_ranks(collect_ranges_used(self._job.model), with_own_amaxes(self._job))
            over = over_stages(read_overflow(used), stages(self._job.prepared))
            counted = values_of(self._job)
            values = None if counted is None else self._world.largest(counted[:2]).long().tolist()
            self._record(Done(step + 1, result, over, values, sent, seconds))
            return
        if self._launched is None:
            self._began = time.perf_counter()
        try:
            launched = launch_step(
                self._job, self._batches, step, self._world, self._deferred, self._wish
            )
        except BaseException:
            self.settle()
            raise
        self.settle()
        self._launched = launched
        # The loss scale and the learning rate of the next step depend on this one.
        if settled or self._job.loss_scaler is not None:
            self.settle()

    def settle(self) -> None:
        """Wait for the step that was launched, if there is one, and record it."""
        launched, self._launched = self._launched, None
        if launched is None or self._deferred is None:
            return
        seen = launched.settle(self._deferred)
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self._asked = max(self._asked, seen.wish)
        self._record(
            Done(launched.done, seen.step, seen.overflow, seen.values, launched.traffic, seconds)
        )

    def wish_of_all(self) -> Wish:
        """The largest wish of all ranks after the step that was taken last. Where there is one, all steps are settled."""
        if self._world.size == 1:
            wish = self._wish()
        elif self._deferred is None:
            own = torch.tensor(float(self._wish()), dtype=torch.float32, device=self._world.device)
            wish = Wish(round(self._world.largest(own).item()))
        else:
            wish = self._asked  # known to all once a step that carried it is settled
        if wish:
            self.settle()
            self._asked = Wish.NONE
        return wish

    def __enter__(self) -> StepSequence:
        if self._deferred is not None:
            self._entered.enter_context(self._deferred)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()
