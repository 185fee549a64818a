"""Record of a run's steps: the first is held against the plan, each is a line of metrics, and one that fails ends the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from textwrap import fill

from fp8cfg.job import Job
from fp8cfg.report.coverage import low_share
from fp8cfg.report.tables import wrapped
from fp8cfg.training.callback import Callback
from fp8cfg.training.checkpoint.saver import Diverged
from fp8cfg.training.coverage_record import coverage_record
from fp8cfg.training.distributed.world import World
from fp8cfg.training.logs import RunLogs
from fp8cfg.training.metrics import Progress, Value
from fp8cfg.training.overflow_watch import OverflowWatch
from fp8cfg.training.run_folder import COVERAGE, RunFolder
from fp8cfg.training.step_sequence import Done
from fp8cfg.training.train_step import Step

_HOW = {"emulate": "emulated", "scaled_mm": "scaled matrix products"}
SKIPS = 100
"""Skipped steps in a row after which a run is not training and stops."""


class StepRecord:
    """What is said and written of each step of `job`, in order. `loss` is the last one's; `skipped` counts the steps skipped in a
    row up to it; `proved` is whether a first step was held against the plan; `progress`, once there is one, shows each.
    """

    def __init__(
        self,
        job: Job,
        run: RunFolder | None,
        world: World,
        say: Callable[[str], None],
        callbacks: Sequence[Callback],
        logs: RunLogs,
    ) -> None:
        self._job, self._run, self._world, self._say, self._callbacks = (
            job,
            run,
            world,
            say,
            callbacks,
        )
        self._logs = logs
        self.progress: Progress | None = None
        self._overflows = OverflowWatch(say)
        self._traffic_said = self.proved = False
        self.loss: float | None = None
        self.skipped = 0

    def add(self, of: Done) -> None:
        """Raises NotFP8Error where the first step did not run as planned, and Diverged."""
        if not self.proved:
            self._prove()
        t, scaler, done, result = (
            self._job.recipe.trainer,
            self._job.loss_scaler,
            of.number,
            of.step,
        )
        self.loss = result.loss
        tokens = t.global_batch_size * self._job.recipe.model.seq_length
        values: dict[str, Value] = {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "stepped": result.stepped,
            "tokens": done * tokens,
            "seconds": of.seconds,
        }
        if scaler:
            values["loss_scale"] = scaler.scale
        values |= self._overflows.values(of.overflow, of.values, done)
        if self._world.size > 1:
            values["sent_bytes"], sent = of.sent
            if (
                result.stepped and not self._traffic_said
            ):  # the first that was not skipped, which hands weights round
                self._traffic_said = True
                self._say(
                    fill(f"sent in a step by the first rank: {sent}", 80, subsequent_indent="  ")
                )
        self._logs.write(done, values)
        if self.progress:
            self.progress.update(done, result.loss, result.lr, tokens / of.seconds)
        for callback in self._callbacks:
            callback.step(done, values)
        self._watch(done, result)

    def _prove(self) -> None:
        """After the first step: what ran must be what was planned, or the run stops here."""
        self.proved = True
        seen = self._job.prove()
        if self._job.recipe.fp8.enabled:
            self._say(
                f"coverage, observed in the first step ({_HOW[self._job.choice.product]})\n{seen}\n"
            )
            if not self._job.foreign and (low := low_share(seen)):
                self._say(wrapped(f"warning: {low}") + "\n")
        record = coverage_record(self._job, seen)
        if self._run:
            self._run.files.replace(COVERAGE, (json.dumps(record, indent=1) + "\n").encode())

    def _watch(self, done: int, result: Step) -> None:
        if self._run:
            self._run.check_there()
        if result.stepped and self.skipped:
            scale = self._job.loss_scaler.scale if self._job.loss_scaler else 1.0
            self._say(
                f"step {done}: {self.skipped} steps before it were skipped, gradients overflowed;"
                f" loss scale {scale:g}"
            )
        self.skipped = 0 if result.stepped else self.skipped + 1
        if not result.stepped and (self._job.loss_scaler is None or self.skipped >= SKIPS):
            often = f" for {self.skipped} steps in a row" if self.skipped > 1 else ""
            raise Diverged(
                f"step {done}: the gradient norm is {result.grad_norm}{often} (loss {result.loss});"
                " weights are those of the step before, lower optim.lr or resume from an earlier"
                " checkpoint"
            )
