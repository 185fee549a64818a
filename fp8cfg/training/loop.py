"""Training loop: steps, evaluation, checkpoints and a stop on request, with a run folder left behind."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from fp8cfg.backends import registry
from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.building.assembly import schedule_of
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state, manifest
from fp8cfg.checkpoint.load import LoadedTensors, Tensors, refuse_unlike
from fp8cfg.checkpoint.saver import Diverged, Saver, after_divergence
from fp8cfg.data import DataError
from fp8cfg.data.stream import Stream
from fp8cfg.models.sdpa_backend import sdpa_backends
from fp8cfg.parallel.process_group import World, current, stages
from fp8cfg.planning.coverage import Coverage, low_share
from fp8cfg.planning.preflight import refuse_layout
from fp8cfg.run_folder.run_folder import CHECKPOINTS, COVERAGE, RunFolder, RunFolderNotWritable
from fp8cfg.schema.errors import ConfigError, Fp8cfgError
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import wrapped
from fp8cfg.training.compile import compile_as_chosen
from fp8cfg.training.data import RunData, run_data, validation_batches
from fp8cfg.training.evaluation import Stopped, evaluate
from fp8cfg.training.last_step import LastStep
from fp8cfg.training.look_ahead import LookAhead
from fp8cfg.training.metrics import Progress, RunLogs, Value
from fp8cfg.training.overflow_watch import OverflowWatch
from fp8cfg.training.signals import REQUEUE, StopSignals
from fp8cfg.training.step import Step, microbatches
from fp8cfg.training.step_sequence import Done, StepSequence, Wish, may_launch_ahead


class Callback:
    """What a run calls, on the first rank alone: each method does nothing, for a class of your own to say otherwise. An error that
    one raises ends the run."""

    def step(self, done: int, values: Mapping[str, Value]) -> None:
        """Optimizer step `done`, the first being 1, is done; `values` are what metrics.jsonl has of it: loss, lr, grad_norm."""

    def evaluation(self, done: int, loss: float) -> None:
        """The validation loss after `done` steps."""

    def save(self, done: int, folder: Path) -> None:
        """The checkpoint of step `done` stands in `folder`, whole."""


def coverage_record(job: Job, seen: Coverage) -> dict[str, Any]:
    """The choice of backend of `job`, its coverage that was `seen`, `sdpa_backend` by attention, and the backend's own entries:
    JSON values. All ranks call it."""
    backend = registry.backend(job.choice.backend)
    return {
        "backend": asdict(job.choice),
        **seen.data(),
        "sdpa_backend": attention_kernels(job),
        **backend.record(job.model),
    }


def attention_kernels(job: Job) -> dict[str, str]:
    """The SDPA backend of each attention in high precision, by name, over all stages of a pipeline, whose ranks all call it; none
    of a model that is not the recipe's."""
    recipe = job.recipe
    if job.foreign:
        return {}
    model, dtype = recipe.model, DTYPES[recipe.precision.compute]
    batch, apart = recipe.trainer.micro_batch_size, recipe.data.reset_attention_mask
    own = sdpa_backends(job.model, batch, model.seq_length, dtype, apart)
    return {
        name: kernel
        for text in stages(job.prepared).texts(json.dumps(own))
        for name, kernel in json.loads(text).items()
    }


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
                f"step {done}: the gradient norm is {result.grad_norm}{often} (loss {result.loss}),"
                f" and the step was skipped; {after_divergence(self._run)}"
            )


class Interrupted(Fp8cfgError):
    """The run got SIGTERM, SIGINT, SIGUSR1 or SIGHUP, and what it had done is saved. Exit code 75: run it again to go on."""

    exit_code = REQUEUE


@dataclass(frozen=True)
class Result:
    """How a run ended: optimizer steps done, the last training loss and the last validation loss (None if not measured), and on the
    first rank its run folder."""

    steps: int
    loss: float | None
    val_loss: float | None
    folder: Path | None = field(default=None, compare=False)


Loaded = tuple[Tensors, dict[str, Any]]
"""What `checkpoint.load.open_checkpoint` returns."""


def train(
    job: Job,
    run: RunFolder | None = None,
    start_from: Loaded | None = None,
    world: World | None = None,
    say: Callable[[str], None] = print,
    callbacks: Sequence[Callback] = (),
    data: RunData | None = None,
) -> Result:
    """Train `job` to trainer.max_steps, on `data` if they were read before. With `run`, which the first rank alone has, metrics,
    coverage and checkpoints are written; with `start_from`, a loaded checkpoint, the run goes on where that one was. `say` gets
    each message, on the first rank alone.

    Raises NotFP8Error where the first step did not run as planned, Interrupted after a signal, Diverged, ConfigError for
    data or batches that do not fit the recipe, CheckpointError.
    """
    try:
        return _Training(job, run, world or current(), say, callbacks, data).run_all(start_from)
    except DataError as e:  # a token outside of the vocabulary is found as it is read
        raise ConfigError(f"data={job.recipe.data.name}: {e}") from None
    except OSError as e:
        raise RunFolderNotWritable(f"{run.path if run else job.recipe.data.path}: {e}") from None


class _Training:
    def __init__(
        self,
        job: Job,
        run: RunFolder | None,
        world: World,
        say: Callable[[str], None],
        callbacks: Sequence[Callback],
        data: RunData | None,
    ) -> None:
        self.job, self.run, self.world = job, run, world
        self.say = say if world.first else lambda _: None
        self.say_steps = None if say is print else say  # print: a line that a terminal redraws
        self.callbacks = callbacks if world.first else ()
        self.recipe = job.recipe
        self.batches, self.held_out = data or run_data(job.recipe)
        if self.batches.remark:
            self.say(wrapped(self.batches.remark, more="  ") + "\n")
        refuse_layout(self.recipe, self.world.size, job.foreign)
        self.backend = registry.backend(job.choice.backend)
        if microbatches(job, world) > 1:
            self.backend.cache_weights(job.model)
        if self.recipe.trainer.val_check_interval:
            validation_batches(
                self.recipe, self.held_out, world
            )  # a batch that cannot be had is said before the first step
        self.val_loss: float | None = None
        self.reported_rows = 0
        self.saver = Saver(job, run, world, self.batches, self.say, self._saved)

    def run_all(self, start_from: Loaded | None) -> Result:
        refuse_unlike(start_from[1] if start_from else None, self.world)
        if start_from:
            if isinstance(start_from[0], LoadedTensors):
                start_from[0].check_sums(self.world)
            job_state.check_saved_state(*start_from)
        first, last = self._load(start_from), self.recipe.trainer.max_steps
        if first < last:
            before = start_from[1] if start_from else None
            compile_as_chosen(self.job, before, self.batches, first, self.world, self.say)
        self.world.waits("start", first + 1)  # the groups that the job has made, too
        with ExitStack() as stack:
            self.logs = stack.enter_context(RunLogs(self.job, self.run, first))
            self._say_holes()
            self.record = StepRecord(
                self.job, self.run, self.world, self.say, self.callbacks, self.logs
            )
            # A callback finds the job as the step that it is called of left it.
            ahead = may_launch_ahead(self.job) and not self.world.any(bool(self.callbacks))
            # A wish is known one step later where steps are launched ahead.
            self.look_ahead = LookAhead(
                self.job, self.batches, self.world, first, steps=2 if ahead else 1
            )
            self.last_step = LastStep(self.job, self.saver, self.world, first, self.say)
            agree = self.world.any if self.world.size > 1 else None
            self.stop = stack.enter_context(StopSignals(agree)) if _main_thread() else None
            if first and self._evaluates(first) and self.world.any(not self.logs.evaluated(first)):
                self._evaluate(first)  # the run was stopped there
            if first >= last:
                self.say(f"nothing left to do: {first} steps of trainer.max_steps={last} are done")
                self._refuse_diverged(
                    first, self.logs.found(first, "loss"), self.logs.found(first, "val_loss")
                )
                return Result(first, None, self.val_loss)
            self.saver.check_room()
            if self._asked():
                raise Interrupted(
                    f"stopped before step {first + 1} of {last}; resume goes on from there"
                )
            if self.world.first:
                self.record.progress = stack.enter_context(
                    Progress(last, self.recipe.log.every_n_steps, say=self.say_steps)
                )
            stack.enter_context(self.saver)
            steps = stack.enter_context(
                StepSequence(self.job, self.batches, self.world, self._wish, self._record, ahead)
            )
            try:
                for step in range(first, last):
                    self._take(steps, step, last)
            except Exception as error:
                with suppress(Exception):
                    steps.settle()
                self.last_step.save(error, self.record.skipped > 0)
                raise
        self._report_skipped_rows()
        self._refuse_diverged(last, self.record.loss, self.val_loss)
        return Result(last, self.record.loss, self.val_loss)

    def _take(self, steps: StepSequence, step: int, last: int) -> None:
        """Step number `step`, the first being 0, and all that is due after it."""
        self.look_ahead.read(step)
        self.last_step.begin(step)
        self.logs.statistics(self.batches, step, self.world)
        steps.take(step, settled=not self.record.proved or self._looks(step + 1))
        self.world.waits("start", step + 1)
        # At 1, 2, 4, 8, ... rows: a broken shard must not flood the log.
        self._report_skipped_rows(at_least=max(1, self.reported_rows))
        self._after(step + 1)
        self.world.waits("step", step + 2)
        if step + 1 == last:
            return
        wish = steps.wish_of_all()
        if wish == Wish.NONE:
            return
        self.world.waits("start", step + 1)
        if wish == Wish.STOP:
            self._interrupt(step + 1)
        self._save(step + 1)
        self.world.waits("step", step + 2)

    def _report_skipped_rows(self, at_least: int = 1) -> None:
        """Prints how many rows of a stream were skipped, if `at_least` so many are new."""
        samples = self.batches.samples
        if not isinstance(samples, Stream):
            return
        count = samples.skipped_rows
        if count - self.reported_rows >= at_least:
            self.reported_rows = count
            rows = "1 row" if count == 1 else f"{count} rows"
            self.say(f"data: {rows} of the stream skipped so far, the last: {samples.last_skipped}")

    def _say_holes(self) -> None:
        # A run that starts from the checkpoint of another has no lines of its steps.
        if self.run and manifest.steps(self.run.files.folder(CHECKPOINTS)):
            holes = self.logs.holes()
            if holes:
                self.say(holes)

    def _record(self, of: Done) -> None:
        self.last_step.record(of.number)
        self.record.add(of)

    def _wish(self) -> Wish:
        """What this rank wants after the step that it is in."""
        if self.look_ahead.problem or (self.stop is not None and self.stop.received is not None):
            return Wish.STOP
        return Wish.SAVE if self.saver.is_due() else Wish.NONE

    def _refuse_diverged(self, last: int, training: Value, validation: Value) -> None:
        """Raise Diverged where no step was taken, or the last losses are not finite: under a loss scale such steps are skipped, and
        the run goes on."""
        if self.job.optimizer.steps == 0:
            raise Diverged(
                f"all {last} steps were skipped, gradients overflowed; raise trainer.max_steps or"
                " lower precision.initial_loss_scale"
            )
        losses = {"training loss": training, "validation loss": validation}
        bad = [
            f"the {name} is {loss}"
            for name, loss in losses.items()
            if isinstance(loss, float) and not math.isfinite(loss)
        ]
        if bad:
            skipped = (
                f", all steps from {last - self.record.skipped + 1} on were skipped"
                if self.record.skipped
                else ""
            )
            raise Diverged(f"step {last}: {', '.join(bad)}{skipped}; {after_divergence(self.run)}")

    def _asked(self) -> bool:
        return self.stop is not None and self.stop.stop_requested()

    def _signalled(self) -> bool:
        """Whether this rank got a signal."""
        return self.stop is not None and self.stop.received is not None

    def _interrupt(self, done: int) -> None:
        self.saver.save(done, self.record.skipped > 0, last=True)
        for problem in self.world.texts(self.look_ahead.problem):
            if problem.strip():
                self.say(f"step {done} is saved; the data of a later step cannot be used")
                raise DataError(problem)
        raise Interrupted(
            f"stopped after step {done} of {self.recipe.trainer.max_steps}; resume goes on from"
            " there"
        )

    def _load(self, start_from: Loaded | None) -> int:
        if not start_from:
            if not self.job.foreign:  # whose own layers draw as the seed of their user has it
                torch.manual_seed(self.recipe.trainer.seed)
            return 0
        if other := job_state.another_multiplies(
            start_from[1], self.recipe, self.job.choice.backend
        ):
            self.say(other)
        done = job_state.restore(self.job, *start_from, self.batches, self.say)
        if isinstance(start_from[0], LoadedTensors):
            # The run may remove this checkpoint. An open file would keep its space on the disk.
            start_from[0].close()
        if change := self._lr_change(Recipe(**start_from[1]["recipe"]), done):
            self.say(change)
        return done

    def _lr_change(self, before: Recipe, done: int) -> str:
        """A line if the next step has another learning rate than by the schedule of the recipe `before`."""
        steps = self.job.optimizer.steps  # skipped ones do not count
        old, new = schedule_of(before).lr_at(steps), self.job.schedule.lr_at(steps)
        if old == new or done >= self.recipe.trainer.max_steps:
            return ""
        ratio = f", {new / old:.3g} times as high" if old else ""
        return wrapped(
            f"note: the learning rate of step {done + 1} is {new:.3g}{ratio}, for the schedule has"
            f" changed; by the schedule of the checkpoint it is {old:.3g}. Set optim.lr and"
            " optim.lr_decay_style to choose another"
        )

    def _saved(self, done: int, folder: Path) -> None:
        for callback in self.callbacks:
            callback.save(done, folder)

    def _after(self, done: int) -> None:
        if self._evaluates(done):
            self._evaluate(done)
        self.saver.settle()
        if self._saves(done):
            self._save(done)

    def _save(self, done: int) -> None:
        began = time.perf_counter()
        self.saver.save(done, self.record.skipped > 0, done == self.recipe.trainer.max_steps)
        if self.recipe.checkpoint.async_save:
            self.logs.write(done, {"save_seconds": time.perf_counter() - began})

    def _saves(self, done: int) -> bool:
        every = self.recipe.checkpoint.every_n_steps
        return done == self.recipe.trainer.max_steps or (bool(every) and done % every == 0)

    def _looks(self, done: int) -> bool:
        """Whether anything is done with the job after that step, which has to be settled before."""
        return self._evaluates(done) or self._saves(done)

    def _evaluates(self, done: int) -> bool:
        every = self.recipe.trainer.val_check_interval
        return bool(every) and (done == self.recipe.trainer.max_steps or done % every == 0)

    def _evaluate(self, done: int) -> None:
        batches = validation_batches(self.recipe, self.held_out, self.world)
        try:
            masked = self.held_out is not None and self.held_out.masked
            self.val_loss = loss = evaluate(self.job, batches, self.world, self._signalled, masked)
        except Stopped:
            self._interrupt(done)
        self.logs.write(done, {"val_loss": loss})
        self.say(f"step {done}: validation loss {loss:.4f}")
        for callback in self.callbacks:
            callback.evaluation(done, loss)


def _main_thread() -> bool:
    """Signals can be caught by the main thread alone; a run in another one is stopped by whoever started it."""
    return threading.current_thread() is threading.main_thread()
