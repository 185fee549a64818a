"""Reports of finished steps: metrics, progress line, warnings and callbacks."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch

from fp8cfg.backends import registry
from fp8cfg.models.sdpa_backend import sdpa_backends
from fp8cfg.numerics import Overflow
from fp8cfg.numerics.formats import DTYPES
from fp8cfg.parallel.process_group import World, pipeline_world
from fp8cfg.run_folder.file_names import COVERAGE
from fp8cfg.run_folder.metrics_file import Value
from fp8cfg.schema.tables import labeled, wrapped
from fp8cfg.training.bad_steps import BadStep
from fp8cfg.training.metrics import RunLogs
from fp8cfg.training.overflow_watch import OverflowWarnings, overflow_values
from fp8cfg.training.step import StepResult

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.planning.coverage import Coverage
    from fp8cfg.run_folder.run_folder import RunFolder
    from fp8cfg.training.progress import Progress

_PRODUCT_NAMES = {"emulate": "emulated", "scaled_mm": "scaled matrix products"}


class Callback:
    """Base class for callbacks of a run. Override the methods you need.

    Callbacks run on the first rank only. An error in a callback ends the run.
    """

    def step(self, done: int, values: Mapping[str, Value]) -> None:
        """Called after each optimizer step.

        Args:
            done: The step, counted from 1.
            values: Its metrics, as in metrics.jsonl.
        """

    def evaluation(self, done: int, loss: float) -> None:
        """Called after each evaluation.

        Args:
            done: Optimizer steps done.
            loss: Mean validation loss.
        """

    def save(self, done: int, folder: Path) -> None:
        """Called after each complete checkpoint.

        Args:
            done: Optimizer steps of the checkpoint.
            folder: Folder of the checkpoint.
        """


class StepReport:
    """Reports the finished steps of a run, in order.

    Args:
        job: The job.
        run: Run folder, None on ranks that write nothing.
        world: Ranks of the run.
        say: Prints a message.
        callbacks: Called on this rank.
        logs: Log files of the run.

    Attributes:
        loss: Training loss of the last step, without skipped bad steps.
        is_proved: Whether the first step was compared with the plan.
        progress: Shows the steps. The training loop sets it on the first rank.
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
        self._job = job
        self._run = run
        self._world = world
        self._say = say
        self._callbacks = callbacks
        self._logs = logs
        self._overflow_warnings = OverflowWarnings(say)
        self._has_reported_traffic = False
        self.progress: Progress | None = None
        self.is_proved = False
        self.loss: float | None = None

    def add(
        self,
        result: StepResult,
        overflow: Overflow | None,
        seconds: float,
        bad_step: BadStep | None = None,
    ) -> None:
        """Reports a finished step. All ranks call it.

        Args:
            result: Metrics of the step.
            overflow: FP8 overflow of the step, None if unknown.
            seconds: Duration of the step.
            bad_step: The step if it is bad, None for a good one.

        Raises:
            NotFP8Error: The first step did not run in the planned formats.
            RunFolderError: The run folder was deleted.
        """
        if not self.is_proved:
            self._check_coverage()
        if bad_step is None:
            self.loss = result.loss
        values = self._metric_values(result, overflow, seconds)
        if bad_step is not None:
            values["bad_step"] = bad_step.policy
        if overflow is not None:
            self._overflow_warnings.check(overflow, result.step)
        # The first step that is not skipped: a skipped step broadcasts no weights.
        if self._world.size > 1 and result.stepped and not self._has_reported_traffic:
            self._has_reported_traffic = True
            message = f"sent in a step by the first rank: {result.sent}"
            self._say(fill(message, 80, subsequent_indent="  "))
        self._logs.write(result.step, values)
        if self.progress:
            self.progress.update({"step": result.step} | values)
        for callback in self._callbacks:
            callback.step(result.step, values)
        if self._run:
            self._run.check_there()

    def pass_over(self, bad: BadStep) -> None:
        """Reports a step that the run passes over, because it was bad before."""
        self._say(f"step {bad.step} is skipped: {bad.problem}")
        tokens = bad.step * self._tokens_per_step()
        self._logs.write(bad.step, {**bad.values(), "tokens": tokens, "time": time.time()})

    def _metric_values(
        self, result: StepResult, overflow: Overflow | None, seconds: float
    ) -> dict[str, Value]:
        """Returns the metrics of a step for metrics.jsonl."""
        values: dict[str, Value] = {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "stepped": result.stepped,
            "tokens": result.step * self._tokens_per_step(),
            "time": time.time(),
            "seconds": seconds,
            "tokens_per_second": self._tokens_per_step() / seconds,
            "memory": peak_memory(self._job.device),
        }
        if self._job.loss_scaler is not None:
            # The scaler was updated by this step, so this is the scale of the next one.
            values["loss_scale"] = self._job.loss_scaler.scale
        num_values: list[float] = []
        if "values" in result.metrics:
            num_values = result.metrics["values"].tolist()
        values |= overflow_values(overflow, num_values)
        if self._world.size > 1:
            values["sent_bytes"] = result.sent_bytes
        return values

    def _tokens_per_step(self) -> int:
        """Returns the tokens of the global batch."""
        return self._job.recipe.trainer.global_batch_size * self._job.recipe.model.seq_length

    def _check_coverage(self) -> None:
        """Compares the GEMMs of the first step with the plan, and writes coverage.json."""
        self.is_proved = True
        # With pipeline stages a collective: all ranks must call `prove`.
        coverage = self._job.prove()
        if self._job.recipe.fp8.enabled:
            self._say(self._describe_coverage(coverage))
            warning = coverage.low_share_warning
            # A custom model prints this warning itself, in its first optimizer step.
            if warning and not self._job.foreign:
                self._say(wrapped(f"warning: {warning}"))
        # Another collective, so it comes before the test for a run folder.
        record = coverage_record(self._job, coverage)
        if self._run:
            self._run.files.replace(COVERAGE, (json.dumps(record, indent=1) + "\n").encode())
            self._logs.loggers.save(COVERAGE)

    def _describe_coverage(self, coverage: Coverage) -> str:
        """Returns the observed coverage: a line if it is as planned, otherwise the table."""
        product = _PRODUCT_NAMES[self._job.choice.product]
        is_as_planned = coverage.runs_as(self._job.plan)
        if is_as_planned and self._job.recipe.log.level != "debug":
            return labeled("FP8", f"{coverage.summary}, as planned, {product}")
        return f"coverage, observed in the first step ({product})\n{coverage}\n"


def coverage_record(job: Job, coverage: Coverage) -> dict[str, Any]:
    """Returns the contents of coverage.json.

    All ranks call it.

    Args:
        job: The job.
        coverage: Result of `job.prove()`.
    """
    backend = registry.backend(job.choice.backend)
    return {
        "backend": asdict(job.choice),
        **coverage.data(),
        "sdpa_backend": attention_kernels(job),
        **backend.record(job.model),
    }


def attention_kernels(job: Job) -> dict[str, str]:
    """Returns the SDPA backend of each high-precision attention layer, by layer name.

    All ranks call it. The result covers all pipeline stages. It is empty for a custom model.
    """
    if job.foreign:
        return {}
    recipe = job.recipe
    kernels_of_stage = sdpa_backends(
        job.model,
        recipe.trainer.micro_batch_size,
        recipe.model.seq_length,
        DTYPES[recipe.precision.compute],
        recipe.data.reset_attention_mask,
    )
    kernels: dict[str, str] = {}
    for text in pipeline_world(job.prepared).texts(json.dumps(kernels_of_stage)):
        kernels |= json.loads(text)
    return kernels


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory of this process in bytes.

    On a GPU that is the memory that torch's allocator has given to tensors, on a CPU the resident
    memory. The GPU does not have to finish its work for it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak  # macOS counts bytes, Linux KiB
    return peak * 1024
