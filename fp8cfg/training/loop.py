"""Training loop: steps, evaluations, checkpoints, and a stop on a signal.

    load the checkpoint, or seed a new run
    compile the model                   if trainer.compile asks for it
    for each step:
        read data ahead                 with several ranks
        launch the step                 `step.train_step`
        finish earlier steps            read their metrics, report them, handle a bad step
        evaluate                        every trainer.val_check_interval steps
        save                            every checkpoint.every_n_steps steps
        follow requests                 of any rank, to save or to stop

On a GPU the host reads the metrics of step k after it has launched step k + 1. Before an
evaluation, a checkpoint or a callback, the host waits for all launched steps.
"""

from __future__ import annotations

import math
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from fp8cfg.backends import registry
from fp8cfg.checkpoint import job_state, manifest
from fp8cfg.checkpoint.load import LoadedTensors, Tensors, refuse_unlike
from fp8cfg.checkpoint.saver import Diverged, Saver, after_divergence
from fp8cfg.data import DataError
from fp8cfg.data.stream import Stream
from fp8cfg.optim.deferred_step import DeferredSteps
from fp8cfg.optim.lr_schedule import Schedule
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.file_names import CHECKPOINTS
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.metrics_file import Value, read_history
from fp8cfg.schema.errors import Fp8cfgError
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import labeled, wrapped
from fp8cfg.training.bad_steps import (
    BadStep,
    BadSteps,
    Buffers,
    capture_buffers,
    newest_checkpoint,
    restore_buffers,
)
from fp8cfg.training.compile import compile_as_chosen
from fp8cfg.training.evaluation import Stopped, evaluate, validation_batches
from fp8cfg.training.faults import report_fault
from fp8cfg.training.last_step import LastStep
from fp8cfg.training.look_ahead import LookAhead
from fp8cfg.training.metrics import RunLogs
from fp8cfg.training.microbatches import can_run_ahead, count_microbatches
from fp8cfg.training.overflow_watch import OverflowCollector
from fp8cfg.training.profiling import MemorySnapshots, StepProfiler
from fp8cfg.training.signals import REQUEUE, StopSignals
from fp8cfg.training.step import PendingStep, train_step
from fp8cfg.training.step_report import Callback, StepReport

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.run_folder.run_folder import RunFolder
    from fp8cfg.training.data import RunData
    from fp8cfg.training.loggers.run_loggers import RunLoggers
    from fp8cfg.training.progress import Progress
    from fp8cfg.training.run_status import RunStatus


class Interrupted(Fp8cfgError):
    """A signal stopped the run. All finished steps are saved. Exit code 75: resume the run."""

    exit_code = REQUEUE


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Attributes:
        steps: Optimizer steps done.
        loss: Last training loss. None if no step was left to do.
        val_loss: Last validation loss. None if this call made no evaluation.
        folder: Run folder on the first rank, otherwise None.
    """

    steps: int
    loss: float | None
    val_loss: float | None
    folder: Path | None = field(default=None, compare=False)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Metrics of the run so far, one row per optimizer step, as in metrics.jsonl.

        A row has "step", and "val_loss" if the step was followed by an evaluation. Also has the
        steps before a resume. Empty on ranks without the run folder.
        """
        if self.folder is None:
            return []
        return read_history(RunFiles.at(self.folder))


Loaded = tuple[Tensors, dict[str, Any]]
"""Tensors and state of a checkpoint, as `checkpoint.load.open_checkpoint` returns them."""


class Request(IntEnum):
    """Request of a rank after a step. All ranks follow the maximum of their requests."""

    NONE = 0
    SAVE = 1
    STOP = 2


def train(
    job: Job,
    data: RunData,
    loggers: RunLoggers,
    status: RunStatus,
    progress: Progress | None,
    run: RunFolder | None,
    start_from: Loaded | None,
    world: World,
    say: Callable[[str], None],
    callbacks: Sequence[Callback],
) -> Result:
    """Trains a job until trainer.max_steps or a signal. All ranks call it.

    `runs.train_job` creates the arguments.

    Args:
        job: The job.
        data: Training batches and validation samples.
        loggers: Loggers of the run.
        status: Gets the number of steps done.
        progress: Shows the steps. Only the first rank has one.
        run: Folder for metrics, coverage and checkpoints on the first rank. None writes nothing.
        start_from: Loaded checkpoint to resume from.
        world: Ranks of the run.
        say: Prints a message. Does nothing on other ranks than the first.
        callbacks: Called after steps, evaluations and saves. Only the first rank has some.

    Returns:
        The number of steps and the last losses, without the run folder.

    Raises:
        NotFP8Error: The first step did not run in the planned formats.
        Interrupted: A signal stopped the run. A checkpoint was saved, except before the first step.
        Diverged: The loss or the gradients are not finite.
        DataError: A batch cannot be read, or has a token outside the vocabulary.
        CheckpointError: The last checkpoint could not be written.
        OSError: A file of the run folder could not be written.
    """
    training = _Training(job, data, loggers, status, progress, run, world, say, callbacks)
    return training.train(start_from)


class _Training:
    """State of one call of `train`. Arguments as in `train`."""

    def __init__(
        self,
        job: Job,
        data: RunData,
        loggers: RunLoggers,
        status: RunStatus,
        progress: Progress | None,
        run: RunFolder | None,
        world: World,
        say: Callable[[str], None],
        callbacks: Sequence[Callback],
    ) -> None:
        self.job = job
        self.run = run
        self.status = status
        self.loggers = loggers
        self.progress = progress
        self.world = world
        self.recipe = job.recipe
        self.max_steps = job.recipe.trainer.max_steps
        self.say = say
        self.callbacks = callbacks
        self.batches, self.validation_samples = data
        if self.batches.remark:
            self.say(labeled("data", self.batches.remark.removeprefix("data: ")))
        if count_microbatches(job, world) > 1:
            # Transformer Engine then quantizes each weight once per step, not in each microbatch.
            registry.backend(job.choice.backend).cache_weights(job.model)
        if self.recipe.trainer.val_check_interval:
            # Reports missing validation data before the first step.
            validation_batches(self.recipe, self.validation_samples, world)
        self.val_loss: float | None = None
        self.num_reported_rows = 0  # skipped rows of a stream, as printed last
        self.saver = Saver(job, run, world, self.batches, self.say, self._call_saved)
        self.pending: deque[PendingStep] = deque()  # launched steps, oldest first
        self.requested = Request.NONE  # maximum over the ranks and the finished steps
        self.buffers: Buffers = []  # model buffers from before the step, if it may be dropped
        self.must_rewind = False

    def train(self, start_from: Loaded | None) -> Result:
        """Loads the checkpoint, compiles the model and runs all steps."""
        state: dict[str, Any] | None = None
        if start_from is not None:
            _, state = start_from
        refuse_unlike(state, self.world)
        first_step = self._load_or_seed(start_from)
        if first_step < self.max_steps:
            compile_as_chosen(self.job, state, self.batches, first_step, self.world, self.say)
        # After the build and torch.compile: the timeout must cover their process groups, too.
        self.world.apply_timeout("start", first_step + 1)

        with ExitStack() as stack:
            self._open_run(first_step, stack)
            self._evaluate_if_missing(first_step)
            if first_step >= self.max_steps:
                return self._return_trained(first_step)
            self.saver.check_room()
            if self.signals is not None and self.signals.stop_requested():
                raise Interrupted(
                    f"stopped before step {first_step + 1} of {self.max_steps};"
                    f" {self._resume_advice()}"
                )
            if self.progress is not None:
                self.report.progress = stack.enter_context(self.progress)
            stack.enter_context(self.saver)
            if self.job.optimizer.can_defer:
                # The device decides whether to skip a step. Otherwise optimizer.step() would wait
                # for the gradient norm.
                optimizer: Any = self.job.optimizer
                stack.enter_context(DeferredSteps(optimizer))
            step = first_step
            try:
                while step < self.max_steps:
                    step = self._take_step(step)
            except Exception as error:
                # Earlier steps may still be on the device. Their results decide what to save.
                with suppress(Exception):
                    self._finish_steps(max_pending=0, is_failing=True)
                self.last_step.save(error, self.bad_steps.num_skipped > 0)
                raise
        self._report_skipped_rows()
        self._check_divergence(self.max_steps, self.report.loss, self.val_loss)
        return Result(self.max_steps, self.report.loss, self.val_loss)

    # --------------------------------------------------------------------------------------------
    # One iteration

    def _take_step(self, step: int) -> int:
        """Launches a step, counted from 0. Then evaluates, saves or stops if due.

        Returns:
            The next step. After a rewind that is an earlier one.
        """
        num_done = step + 1
        self.look_ahead.read(step)
        if num_done in self.bad_steps.skipped:
            self._pass_over(num_done)
        else:
            self._run_step(step)
            if self.must_rewind:
                return self._rewind(num_done)

        # Evaluations and saves take longer than steps, so they have the longer timeout.
        self.world.apply_timeout("start", num_done)
        # At 1, 2, 4, 8, ... rows, so that a broken shard does not flood the log.
        self._report_skipped_rows(at_least=max(1, self.num_reported_rows))
        if self._evaluates_after(num_done):
            self._evaluate(num_done)
        self.saver.settle()
        if self._saves_after(num_done):
            self._save(num_done)
        self.world.apply_timeout("step", num_done + 1)
        if num_done < self.max_steps:
            self._follow_requests(num_done)
        return num_done

    def _run_step(self, step: int) -> None:
        """Launches a step, counted from 0, and finishes it unless the next one can run ahead."""
        num_done = step + 1
        self.last_step.begin(step)
        if self.bad_steps.reads_each_loss:
            self.buffers = capture_buffers(self.job)
        self.logs.write_statistics(self.batches, step, self.world)
        with self.profiler.step(num_done):
            self._launch_step(step)
        must_finish = (
            not self.runs_ahead
            or not self.report.is_proved  # the first step is compared with the plan at once
            or self._evaluates_after(num_done)
            or self._saves_after(num_done)
            or self.profiler.must_finish(num_done)
        )
        if must_finish:
            self._finish_steps(max_pending=0)
        else:
            # Read step k - 1 while step k runs.
            self._finish_steps(max_pending=1)
        self.profiler.finish(num_done)
        self.memory_snapshots.finish(num_done)

    def _launch_step(self, step: int) -> None:
        """Launches a step without waiting for its metrics."""
        self.world.traffic.clear()
        if not self.pending:
            # Otherwise this step begins when the pending one ends: `_finish_steps` sets the time.
            self.step_began = time.perf_counter()
        try:
            pending_step = train_step(
                self.job,
                self.batches,
                step,
                self.world,
                collect_metrics=self._collect_metrics,
                largest_loss=self.bad_steps.largest_loss(),
            )
        except BaseException:
            # The earlier steps are good and must be reported before the error.
            self._finish_steps(max_pending=0, is_failing=True)
            raise
        self.pending.append(pending_step)

    def _finish_steps(self, max_pending: int, is_failing: bool = False) -> None:
        """Waits for launched steps until `max_pending` are left, and reports them in order.

        Args:
            max_pending: Number of steps that may stay on the device.
            is_failing: Whether an error ends the run. Other ranks may not get here then.
        """
        while len(self.pending) > max_pending:
            result = self.pending.popleft().wait()
            end_time = time.perf_counter()
            seconds = end_time - self.step_began
            self.step_began = end_time  # of the next step, already on the device
            self.last_step.record(result.step)
            self.status.step = result.step
            if "request" in result.metrics:
                request = Request(round(result.metrics["request"].item()))
                self.requested = max(self.requested, request)
            if not result.stepped and self.job.loss_scaler is None:
                # The device skips all steps behind a skipped one, and the run stops. If it does not
                # stop (trainer.on_bad_step), no step runs ahead and this list is empty.
                self.pending.clear()
            overflow = None
            if result.stepped:
                # A skipped step updates no scales, so it has no overflow to report.
                overflow = self.overflow.read(result.metrics)
            bad_step = self.bad_steps.check(result)
            self.report.add(result, overflow, seconds, bad_step)
            if bad_step is not None:
                self._handle_bad_step(bad_step, result.stepped, is_failing)

    def _collect_metrics(self, loss: Tensor) -> dict[str, Tensor]:
        """Collects overflow and this rank's request on the device. See `CollectMetrics`."""
        return self.overflow.collect(loss, request=float(self._local_request()))

    def _local_request(self) -> Request:
        """Returns what this rank requests now."""
        if self.look_ahead.problem or self._has_signal():
            return Request.STOP
        if self.saver.is_due():
            return Request.SAVE
        return Request.NONE

    def _follow_requests(self, num_done: int) -> None:
        """Saves or stops after step `num_done` if a rank requests it.

        With several ranks, the requests arrive with the metrics of finished steps. So all ranks act
        after the same step.
        """
        request = self.requested
        if self.world.size == 1:
            request = self._local_request()
        if request == Request.NONE:
            return
        self._finish_steps(max_pending=0)
        # A step that was still on the device may request more.
        request = max(request, self.requested)
        self.requested = Request.NONE
        self.world.apply_timeout("start", num_done)
        if request == Request.STOP:
            self._save_and_interrupt(num_done)
        self._save(num_done)
        self.world.apply_timeout("step", num_done + 1)

    def _save_and_interrupt(self, num_done: int) -> NoReturn:
        """Saves step `num_done` and raises the reason to stop: Interrupted or DataError."""
        self.saver.save(num_done, self.bad_steps.num_skipped > 0, last=True)
        # Ranks exchange their data errors, so that all raise the same one.
        for problem in self.world.texts(self.look_ahead.problem):
            if problem.strip():
                self.say(f"step {num_done} is saved; the data of a later step cannot be used")
                raise DataError(problem)
        raise Interrupted(
            f"stopped after step {num_done} of {self.max_steps}; {self._resume_advice()}"
        )

    def _resume_advice(self) -> str:
        """Returns the command that continues a stopped run."""
        if self.run is None:
            return "continue with fp8cfg resume"
        return f"continue with fp8cfg resume {shlex.quote(str(self.run.path))}"

    def _has_signal(self) -> bool:
        """Whether this rank got a signal."""
        return self.signals is not None and self.signals.received is not None

    def _report_skipped_rows(self, at_least: int = 1) -> None:
        """Prints the number of skipped rows of a stream, if at least `at_least` are new."""
        samples = self.batches.samples
        if not isinstance(samples, Stream):
            return
        count = samples.skipped_rows
        if count - self.num_reported_rows >= at_least:
            self.num_reported_rows = count
            rows = f"{count} rows"
            if count == 1:
                rows = "1 row"
            self.say(f"data: {rows} of the stream skipped so far, the last: {samples.last_skipped}")

    # --------------------------------------------------------------------------------------------
    # Bad steps

    def _handle_bad_step(self, bad: BadStep, stepped: bool, is_failing: bool) -> None:
        """Looks for the cause of a bad step. Then stops, or skips its batch.

        Args:
            bad: The step.
            stepped: Whether the weights were updated all the same.
            is_failing: See `_finish_steps`.

        Raises:
            Diverged: The run stops.
        """
        if not is_failing:
            self._report_fault(bad, stepped)
        if bad.policy == "stop" or is_failing:
            skipped = ", and the step was skipped"
            if stepped:
                skipped = ""
            raise Diverged(f"step {bad.step}: {bad.problem}{skipped}; {after_divergence(self.run)}")
        # As if the batch were not there: the next step draws the same random numbers.
        job_state.restore_rng(*self.last_step.random_state(bad.step - 1))
        restore_buffers(self.buffers)
        self.bad_steps.skip(bad)
        self.last_step.restart(bad.step)
        self.must_rewind = bad.policy == "rewind"
        self.say(f"step {bad.step} is skipped (trainer.on_bad_step={bad.policy})")

    def _report_fault(self, bad: BadStep, stepped: bool) -> None:
        """Runs the batch of a bad step again, and reports the first bad tensor."""
        self.world.apply_timeout("start", bad.step)
        rng = self.last_step.random_state(bad.step - 1)
        weights = "before the step"
        if stepped:
            weights = "after the step"
        file = report_fault(
            bad, self.job, self.batches, self.world, rng, weights, self.run, self.say
        )
        if file:
            self.loggers.save(file)

    def _pass_over(self, num_done: int) -> None:
        """Skips a step that was bad when the run trained it before, without running it."""
        self._finish_steps(max_pending=0)
        self.report.pass_over(self.bad_steps.skipped[num_done])
        self.last_step.restart(num_done)
        self.status.step = num_done

    def _rewind(self, bad_step: int) -> int:
        """Loads the newest checkpoint. Returns its number of steps."""
        self.must_rewind = False
        self.world.apply_timeout("start", bad_step)
        self.saver.settle(wait=True)
        loaded = newest_checkpoint(self.run, self.world, self.say)
        if loaded is None:
            raise Diverged(
                f"step {bad_step}: trainer.on_bad_step=rewind: there is no checkpoint to return to"
                " yet; start again with skip, or with a smaller checkpoint.every_n_steps"
            )
        tensors, state = loaded
        num_done = job_state.restore(self.job, tensors, state, self.batches, self.say)
        tensors.close()
        self.logs.rewind(self.run, num_done)
        self.bad_steps.restart(num_done)
        self.last_step.restart(num_done)
        self.saver.restart(num_done)
        self.look_ahead.restart(num_done)
        self.status.step = num_done
        self.say(f"back to the checkpoint of step {num_done}")
        self.world.apply_timeout("step", num_done + 1)
        return num_done

    # --------------------------------------------------------------------------------------------
    # Evaluation and checkpoints

    def _evaluates_after(self, num_done: int) -> bool:
        """Whether step `num_done` is followed by an evaluation. The last step always is."""
        interval = self.recipe.trainer.val_check_interval
        if not interval:
            return False
        return num_done == self.max_steps or num_done % interval == 0

    def _evaluate_if_missing(self, num_done: int) -> None:
        """Evaluates if the run was stopped after step `num_done`, but before its evaluation."""
        if num_done == 0 or not self._evaluates_after(num_done):
            return
        # The first rank has metrics.jsonl and decides for all.
        if self.world.any(not self.logs.has_val_loss(num_done)):
            self._evaluate(num_done)

    def _evaluate(self, num_done: int) -> None:
        """Evaluates after step `num_done`, and reports the validation loss."""
        samples = self.validation_samples
        batches = validation_batches(self.recipe, samples, self.world)
        is_masked = samples is not None and samples.masked
        try:
            loss = evaluate(self.job, batches, self.world, self._has_signal, is_masked)
        except Stopped:
            self._save_and_interrupt(num_done)
        self.val_loss = loss
        self.logs.write(num_done, {"val_loss": loss})
        if self.report.progress:
            self.report.progress.evaluation(num_done, loss)
        self.say(f"step {num_done}: validation loss {loss:.4f}")
        for callback in self.callbacks:
            callback.evaluation(num_done, loss)

    def _saves_after(self, num_done: int) -> bool:
        """Whether step `num_done` is saved. The last step always is."""
        if num_done == self.max_steps:
            return True
        interval = self.recipe.checkpoint.every_n_steps
        return interval > 0 and num_done % interval == 0

    def _save(self, num_done: int) -> None:
        """Saves step `num_done`, in the background if checkpoint.async_save is true."""
        start_time = time.perf_counter()
        is_last = num_done == self.max_steps
        self.saver.save(num_done, self.bad_steps.num_skipped > 0, is_last)
        if self.recipe.checkpoint.async_save:
            self.logs.write(num_done, {"save_seconds": time.perf_counter() - start_time})

    def _call_saved(self, num_done: int, folder: Path) -> None:
        for callback in self.callbacks:
            callback.save(num_done, folder)

    # --------------------------------------------------------------------------------------------
    # Begin and end

    def _load_or_seed(self, start_from: Loaded | None) -> int:
        """Loads the checkpoint, or seeds a new run. Returns the number of steps done."""
        if start_from is None:
            # The user has seeded a custom model already.
            if not self.job.foreign:
                torch.manual_seed(self.recipe.trainer.seed)
            return 0
        tensors, state = start_from
        if isinstance(tensors, LoadedTensors):
            tensors.check_sums(self.world)
        job_state.check_saved_state(tensors, state)
        backend_note = job_state.backend_change(state, self.recipe, self.job.choice.backend)
        if backend_note:
            self.say(backend_note)
        num_done = job_state.restore(self.job, tensors, state, self.batches, self.say)
        if isinstance(tensors, LoadedTensors):
            # The run may delete this checkpoint later. An open file would keep its disk space.
            tensors.close()
        self._report_lr_change(Recipe(**state["recipe"]), num_done)
        return num_done

    def _report_lr_change(self, before: Recipe, num_done: int) -> None:
        """Prints a note if the learning rate jumps, because the schedule differs from `before`."""
        steps = self.job.optimizer.steps  # skipped ones do not count
        old_lr = Schedule.from_recipe(before).lr_at(steps)
        lr = self.job.schedule.lr_at(steps)
        if old_lr == lr or num_done >= self.max_steps:
            return
        ratio = ""
        if old_lr:
            rounded = f"{lr / old_lr:.3g}"
            if rounded == "1":
                return
            ratio = f" ({rounded} times as high)"
        self.say(
            wrapped(
                f"note: the learning rate of step {num_done + 1} is {lr:.3g}{ratio}, because"
                f" the schedule has changed; with the checkpoint's schedule it is {old_lr:.3g}. To"
                " change it, set optim.lr and optim.lr_decay_style"
            )
        )

    def _open_run(self, first_step: int, stack: ExitStack) -> None:
        """Opens logs and reports, and installs the signal handlers. `stack` closes them."""
        job, world = self.job, self.world
        self.logs = stack.enter_context(RunLogs(job, self.run, first_step, self.loggers))
        if first_step < self.max_steps:
            self.loggers.open(first_step)
        self.profiler = stack.enter_context(StepProfiler(job, self.run, self.say))
        snapshots = MemorySnapshots(job.recipe, self.run, self.say)
        self.memory_snapshots = stack.enter_context(snapshots)
        self._report_gaps()
        self.report = StepReport(job, self.run, world, self.say, self.callbacks, self.logs)
        self.overflow = OverflowCollector(job, world)
        self.bad_steps = BadSteps(job, self.run, world, first_step, self.say)
        # Whether a step may be launched before the host has read the metrics of the one before.
        # Callbacks, on the first rank, may read the job after their step.
        has_callbacks = world.any(bool(self.callbacks))
        self.runs_ahead = (
            can_run_ahead(job) and not has_callbacks and not self.bad_steps.reads_each_loss
        )
        num_batches_ahead = 1
        if self.runs_ahead:
            num_batches_ahead = 2  # a request to stop is read one step later
        self.look_ahead = LookAhead(job, self.batches, world, first_step, num_batches_ahead)
        self.last_step = LastStep(job, self.saver, world, first_step, self.say)
        self.signals: StopSignals | None = None
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self.signals = stack.enter_context(StopSignals(world.any))

    def _report_gaps(self) -> None:
        """Prints a note about finished steps without lines in metrics.jsonl."""
        # A new run from another run's checkpoint never had lines for these steps.
        if self.run and manifest.list_steps(self.run.files.folder(CHECKPOINTS)):
            note = self.logs.gap_note()
            if note:
                self.say(note)

    def _return_trained(self, num_done: int) -> Result:
        """Returns the result if no step is left to do."""
        self.say(
            f"nothing left to do: {num_done} steps of trainer.max_steps={self.max_steps} are done"
        )
        loss = self.logs.value_of_step(num_done, "loss")
        if self.logs.value_of_step(num_done, "bad_step") is not None:
            loss = None  # the loss of a skipped batch does not count
        val_loss: Value = self.val_loss  # set if the evaluation was missing
        if val_loss is None:
            val_loss = self.logs.value_of_step(num_done, "val_loss")
        self._check_divergence(num_done, loss, val_loss)
        return Result(num_done, None, self.val_loss)

    def _check_divergence(self, num_done: int, loss: Value, val_loss: Value) -> None:
        """Raises Diverged if all steps were skipped, or if the last loss is not finite.

        Only the end of a run is checked: with a loss scale a bad step is skipped, and the run can
        recover.
        """
        if self.job.optimizer.steps == 0:
            if self.job.loss_scaler is None:
                raise Diverged(f"all {num_done} steps were bad and skipped (trainer.on_bad_step)")
            raise Diverged(
                f"all {num_done} steps were skipped because gradients overflowed; raise"
                " trainer.max_steps or lower precision.initial_loss_scale"
            )
        problems = []
        for name, value in (("training loss", loss), ("validation loss", val_loss)):
            if isinstance(value, float) and not math.isfinite(value):
                problems.append(f"the {name} is {value}")
        if not problems:
            return
        skips = ""
        if self.bad_steps.num_skipped:
            first_skipped = num_done - self.bad_steps.num_skipped + 1
            skips = f", all steps from {first_skipped} on were skipped"
        raise Diverged(
            f"step {num_done}: {', '.join(problems)}{skips}; {after_divergence(self.run)}"
        )
