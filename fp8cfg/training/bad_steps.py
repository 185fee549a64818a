"""Bad steps: how a run finds them, and what it does about them (trainer.on_bad_step).

A step is bad if its loss or its gradients are not finite, or if its loss spikes: it is more than
trainer.spike_factor times the median of the losses before it. Under fp16 the loss scale handles
gradients that are not finite.

    stop      ends the run with Diverged
    skip      continues without the batch, as if it were not in the data
    rewind    loads the newest checkpoint, and skips the batch when the run gets to it again

skipped_steps.json in the run folder has the skipped steps. A resumed run passes them over.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fp8cfg.checkpoint import job_state, manifest
from fp8cfg.checkpoint.load import LoadedTensors, open_checkpoint
from fp8cfg.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.numerics.stored_state import RAN, ROUNDING_COUNT
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.file_names import CHECKPOINTS, METRICS, SKIPPED_STEPS
from fp8cfg.run_folder.files import RunFiles, StrangeFile
from fp8cfg.run_folder.metrics_file import NON_FINITE, Value, read_metrics, to_json_value
from fp8cfg.schema.errors import ConfigError, printable
from fp8cfg.training.step import StepResult

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.run_folder.run_folder import RunFolder

Policy = Literal["stop", "skip", "rewind"]
MAX_OVERFLOWS = 100
"""Number of consecutive steps that overflow under a loss scale, after which a run stops."""
SPIKE_WINDOW = 100
"""Number of losses in the median."""
MIN_LOSSES = 10
"""Number of losses that the median needs. Before that no loss is a spike."""


@dataclass(frozen=True)
class BadStep:
    """A bad step.

    Attributes:
        step: The step, counted from 1.
        problem: Why it is bad.
        policy: What the run does.
        loss: Its loss.
        lr: Its learning rate.
        grad_norm: Its gradient norm. NaN if the loss was bad, so that it was not computed.
    """

    step: int
    problem: str
    policy: Policy
    loss: float
    lr: float
    grad_norm: float

    def values(self) -> dict[str, Value]:
        """Returns the metrics of a step that is passed over."""
        return {
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "stepped": False,
            "bad_step": self.policy,
        }


class BadSteps:
    """Finds bad steps, and keeps the list of skipped ones. All ranks make the same calls.

    Args:
        job: The job.
        run: Run folder, None on ranks that write nothing.
        world: Ranks of the run.
        done: Optimizer steps done.
        say: Prints a message.

    Attributes:
        skipped: Skipped steps by number, counted from 1.
        num_skipped: Consecutive steps without an update, including the last step.
    """

    def __init__(
        self,
        job: Job,
        run: RunFolder | None,
        world: World,
        done: int,
        say: Callable[[str], None],
    ) -> None:
        trainer = job.recipe.trainer
        self._job = job
        self._run = run
        self._world = world
        self._say = say
        self._policy: Policy = trainer.on_bad_step
        self._spike_factor = trainer.spike_factor
        self._max_bad_steps = trainer.max_bad_steps
        self.skipped = self._read_skipped()
        self.restart(done)

    def restart(self, done: int) -> None:
        """Continues after step `done`. Reads the losses before it from metrics.jsonl."""
        self.num_skipped = 0
        self._num_overflows = 0
        self._losses = deque[float](maxlen=SPIKE_WINDOW)
        if self._spike_factor and done:
            self._losses.extend(self._read_losses(done))

    @property
    def reads_each_loss(self) -> bool:
        """Whether the host reads the loss of each step before the optimizer updates the weights."""
        return self._policy != "stop" or self._spike_factor > 0

    def largest_loss(self) -> float | None:
        """Returns the largest good loss of the next step. None if the host does not read it."""
        if not self.reads_each_loss:
            return None
        if not self._spike_factor or len(self._losses) < MIN_LOSSES:
            return math.inf
        median_loss = median(self._losses)
        if median_loss <= 0:
            # A multiple has no meaning for losses around 0, as a custom model may have.
            return math.inf
        return self._spike_factor * median_loss

    def check(self, result: StepResult) -> BadStep | None:
        """Checks a finished step and counts it.

        Returns:
            The step if it is bad. Its policy is "stop" if the run has skipped too many in a row.
        """
        problem = self._describe_problem(result)
        policy = self._policy
        self._count_step(result)
        if not problem and self._num_overflows == MAX_OVERFLOWS:
            # The loss scale did not help, and nothing else will.
            problem = (
                f"the gradient norm is {result.grad_norm} for {MAX_OVERFLOWS} steps in a row (loss"
                f" {result.loss})"
            )
            policy = "stop"
        if not problem:
            return None
        num_bad = self._count_before(result.step) + 1
        if policy != "stop" and num_bad > self._max_bad_steps:
            policy = "stop"
            problem += (
                f", and {num_bad - 1} steps before it were skipped"
                f" (trainer.max_bad_steps={self._max_bad_steps})"
            )
        return BadStep(result.step, problem, policy, result.loss, result.lr, result.grad_norm)

    def _count_step(self, result: StepResult) -> None:
        """Counts steps without an update, and keeps the losses of the others."""
        scaler = self._job.loss_scaler
        if not result.stepped:
            self.num_skipped += 1
            if scaler is not None and not result.rejected:
                self._num_overflows += 1
            return
        if scaler is not None and self._num_overflows:
            self._say(
                f"step {result.step}: {self._num_overflows} steps before it were skipped, gradients"
                f" overflowed; loss scale {scaler.scale:g}"
            )
        self.num_skipped = 0
        self._num_overflows = 0
        if math.isfinite(result.loss):
            self._losses.append(result.loss)

    def skip(self, bad: BadStep) -> None:
        """Adds a step to the skipped ones."""
        self.skipped[bad.step] = bad
        if self._run is None:
            return
        data = {}
        for step, bad_step in sorted(self.skipped.items()):
            fields = {name: to_json_value(value) for name, value in asdict(bad_step).items()}
            del fields["step"]
            data[str(step)] = fields
        try:
            self._run.files.replace(SKIPPED_STEPS, (json.dumps(data, indent=1) + "\n").encode())
        except OSError as error:
            # A full disk must not end the run: a resumed run finds the bad step again.
            self._say(f"{SKIPPED_STEPS} could not be written: {error.strerror}")

    def _describe_problem(self, result: StepResult) -> str:
        """Returns why a step is bad, or ""."""
        if result.rejected and math.isfinite(result.loss):
            median_loss = median(self._losses)
            return (
                f"the loss {result.loss:.4g} is {result.loss / median_loss:.3g} times the median"
                f" {median_loss:.4g} of the last {len(self._losses)} steps"
                f" (trainer.spike_factor={self._spike_factor:g})"
            )
        # Skipped steps lower the loss scale of fp16, so gradients can become finite again.
        if self._job.loss_scaler is not None:
            return ""
        if result.rejected or (result.stepped and not math.isfinite(result.loss)):
            return f"the loss is {result.loss}"
        if not result.stepped:
            return f"the gradient norm is {result.grad_norm} (loss {result.loss})"
        return ""

    def _count_before(self, step: int) -> int:
        """Returns the number of consecutive skipped steps right before `step`."""
        count = 0
        while step - count - 1 in self.skipped:
            count += 1
        return count

    def _read_skipped(self) -> dict[int, BadStep]:
        """Reads skipped_steps.json. The first rank reads it for all."""
        text = "{}"
        try:
            if self._run and self._run.files.kind(SKIPPED_STEPS):
                text = self._run.files.read(SKIPPED_STEPS).decode(errors="replace")
        except (OSError, StrangeFile) as error:
            text = f"cannot be read: {error}"  # all ranks must raise the error below
        try:
            return {
                int(step): _parse_skipped(int(step), fields)
                for step, fields in json.loads(self._world.text(text)).items()
            }
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ConfigError(
                f"{SKIPPED_STEPS}: not a list of skipped steps ({error}); delete the file to train"
                " on all batches"
            ) from None

    def _read_losses(self, done: int) -> list[float]:
        """Returns the last losses up to step `done`. The first rank reads them for all."""
        losses: list[float] = []
        if self._run and self._run.files.kind(METRICS):
            for row in read_metrics(self._run.files, METRICS):
                loss = row.get("loss")
                step = row["step"]
                assert isinstance(step, int)
                if not isinstance(loss, float) or not math.isfinite(loss):
                    continue
                if row.get("stepped") and step <= done:
                    losses.append(loss)
        text = self._world.text(json.dumps(losses[-SPIKE_WINDOW:]))
        last_losses: list[float] = json.loads(text)
        return last_losses


def _parse_skipped(step: int, fields: Mapping[str, Value]) -> BadStep:
    """Returns an entry of skipped_steps.json."""
    numbers = {}
    for name in ("loss", "lr", "grad_norm"):
        value = fields[name]
        if isinstance(value, str):
            numbers[name] = NON_FINITE[value]
        else:
            numbers[name] = float(value or 0.0)
    policy: Policy = "skip"
    if fields["policy"] == "rewind":
        policy = "rewind"
    return BadStep(step, str(fields["problem"]), policy, **numbers)


# ------------------------------------------------------------------------------------------------
# State before a step


Buffers = list[tuple[Tensor, Tensor]]
"""Buffers of a model, each with a copy."""


def capture_buffers(job: Job) -> Buffers:
    """Copies the buffers that a skipped step must not change.

    These are counts of random draws for stochastic rounding, and buffers of a custom model, such as
    the running means of a batch norm. A skipped step drops its FP8 amaxes anyway.
    """
    captured = []
    for name, buffer in job.model.named_buffers():
        leaf = name.rpartition(".")[2]
        is_fp8 = leaf.startswith("fp8_") or leaf in (*RAN, "gemms_ran")
        if not is_fp8 or leaf == ROUNDING_COUNT:
            captured.append((buffer, buffer.clone()))
    return captured


def restore_buffers(captured: Buffers) -> None:
    """Restores the buffers that `capture_buffers` has copied."""
    for buffer, copy in captured:
        buffer.copy_(copy)


def newest_checkpoint(
    run: RunFolder | None, world: World, say: Callable[[str], None]
) -> tuple[LoadedTensors, dict[str, object]] | None:
    """Opens the newest valid checkpoint of a run. All ranks call it.

    Args:
        run: Run folder, on the first rank.
        world: Ranks of the run.
        say: Prints a message for each damaged checkpoint.

    Returns:
        The tensors and the state. None if there is no valid checkpoint.
    """
    path, names = "", list[str]()
    if run:
        path = str(run.path)
        names = [name for _, name in manifest.list_steps(run.files.folder(CHECKPOINTS))]
    path, names = json.loads(world.text(json.dumps([path, names])))
    for name in names:
        problem, loaded = "", None
        try:
            files = run.files if run else RunFiles.at(Path(path))
            loaded = open_checkpoint(files.folder(CHECKPOINTS), name, world.size)
            job_state.check_saved_state(*loaded)
        except (DamagedCheckpoint, StrangeFile, OSError) as error:
            problem = str(error) or type(error).__name__
        # Exchange the problem. Otherwise the other ranks would load this checkpoint.
        problems = [text for text in world.texts(problem) if text.strip()]
        try:
            if not problems and loaded is not None:
                loaded[0].check_sums(world)
                return loaded
        except DamagedCheckpoint as error:
            problems = [str(error)]
        say(manifest.skip_message(printable(problems[0])))
    return None
