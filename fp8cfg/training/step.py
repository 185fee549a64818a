"""Training step: one optimizer step over its microbatches.

    zero_grad
    for each microbatch:
        forward         loss = mean over the targets of the microbatch
        backward        loss * loss_scale / num_shares
    sum gradients       over data-parallel ranks; FSDP2 has done so during backward
    sum the loss        over data-parallel ranks
    set lr              from the number of steps completed so far
    optimizer.step()    unscale -> norm -> skip if it is not finite -> clip -> Adam
                        -> FP8 scales -> weights

`train_step` only launches this work. On a GPU the host reads the metrics of step k after it has
launched step k + 1 (`PendingStep.wait`). So neither waits for the other:

    host      launch 1   launch 2   read 1   launch 3   read 2   ...
    device          step 1             step 2              step 3   ...
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8cfg.data import Batches
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.async_copies import HostCopy
from fp8cfg.numerics.formats import DTYPES
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS
from fp8cfg.numerics.linear_operands import cached_weights
from fp8cfg.numerics.overflow_counts import pause_overflow_counts
from fp8cfg.optim.deferred_step import DeferredSteps
from fp8cfg.optim.loss_scale import loss_factors
from fp8cfg.parallel.gradient_sync import stores_early, sum_gradients
from fp8cfg.parallel.pipeline import PipelineRank
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training.microbatches import (
    Microbatch,
    copy_batch_to_device,
    count_batch_shares,
    count_microbatches,
    load_microbatches,
    refuse_without_targets,
)

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.parallel.pipeline_schedule import Pipeline, StageSync


@dataclass(frozen=True)
class StepResult:
    """Metrics of a finished optimizer step.

    Attributes:
        loss: Mean loss over the targets of the global batch.
        lr: Learning rate.
        grad_norm: Norm of the gradients before clipping.
        stepped: False if the gradients were not finite, so the step was skipped.
        step: Number of the step, counted from 1.
        sent_bytes: Bytes sent by this rank.
        sent: Description of the sent bytes, for the log.
        metrics: All metrics on the host by name, including those of `collect_metrics`.
        rejected: Whether the step was skipped because of its loss. Then `grad_norm` is NaN.
    """

    loss: float
    lr: float
    grad_norm: float
    stepped: bool
    step: int = 0
    sent_bytes: int = 0
    sent: str = ""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    rejected: bool = False


@dataclass(frozen=True)
class PendingStep:
    """A launched optimizer step. The device may still be working on it.

    Attributes:
        step: Number of the step, counted from 1.
        lr: Learning rate.
        sizes: Number of values of each metric in `copy`.
        copy: Asynchronous copy of all metrics to the host, float32 [sum of sizes].
        deferred: Reads the device's decision to skip the step. None if the host has decided. Then
            `grad_norm` and `stepped` are valid.
        grad_norm: Norm of the gradients before clipping.
        stepped: Whether the step was made, not skipped.
        sent_bytes: Bytes sent by this rank.
        sent: Description of the sent bytes, for the log.
        data: Name of the data set, for errors.
        rejected: See `StepResult`.
    """

    step: int
    lr: float
    sizes: Mapping[str, int]
    copy: HostCopy
    deferred: DeferredSteps | None
    grad_norm: float
    stepped: bool
    sent_bytes: int
    sent: str
    data: str
    rejected: bool = False

    def wait(self) -> StepResult:
        """Waits for the step and returns its metrics. Call it once per step, in launch order.

        Raises:
            NoTargets: No token of the step has a loss. The device has skipped the step.
        """
        values = self.copy.read()
        metrics = dict(zip(self.sizes, values.split(list(self.sizes.values())), strict=True))
        grad_norm = self.grad_norm
        stepped = self.stepped
        if self.deferred is not None:
            grad_norm = metrics["grad_norm"].item()
            # The device has decided already. This updates the loss scale and the step counts.
            stepped = self.deferred.settle(grad_norm)
            if "num_targets" in metrics and metrics["num_targets"].item() == 0:
                refuse_without_targets(self.data, self.step)
        return StepResult(
            loss=metrics["loss"].item(),
            lr=self.lr,
            grad_norm=grad_norm,
            stepped=stepped,
            step=self.step,
            sent_bytes=self.sent_bytes,
            sent=self.sent,
            metrics=metrics,
            rejected=self.rejected,
        )


CollectMetrics = Callable[[Tensor], Mapping[str, Tensor]]
"""Takes the loss of a step, float32 []. Returns more metrics for the copy to the host."""


def train_step(
    job: Job,
    batches: Batches,
    step: int,
    world: World,
    collect_metrics: CollectMetrics | None = None,
    largest_loss: float | None = None,
) -> PendingStep:
    """Launches an optimizer step. All ranks call it.

    Does not wait for the device inside `DeferredSteps`. After an error the job can take another
    step, which drops the gradients.

    Args:
        job: The job.
        batches: Training data.
        step: Number of the step, counted from 0.
        world: Ranks of the run.
        collect_metrics: Adds metrics to the copy to the host.
        largest_loss: Skips the step if its loss is larger or not finite. The host waits for the
            loss then. With a loss scale, only a finite loss counts.

    Returns:
        The launched step. Call its `wait`.

    Raises:
        NoTargets: No token of the step has a loss.
        ConfigError: The batch size does not fit the ranks, or a custom model returns no loss.
    """
    optimizer = job.optimizer
    num_microbatches = count_microbatches(job, world)
    host_waits = largest_loss is not None
    microbatches, num_targets = load_microbatches(job, batches, step, world, host_waits)

    with dropping_gradients_on_error(job):
        optimizer.zero_grad()

        # Forward and backward. Gradients add up over the microbatches.
        weighted_loss = torch.zeros((), dtype=torch.float32, device=job.device)
        with quantized_weight_cache(job, num_microbatches):
            for microbatch_loss, weight in run_passes(job, microbatches, num_microbatches, world):
                weighted_loss += microbatch_loss * weight

        # Reduce. A sum over the ranks, not a mean: each loss was divided by its share of the step.
        sum_gradients(job.prepared, optimizer, world)
        job.summed = True  # otherwise optimizer.step() warns
        loss = sum_losses(job, batches, weighted_loss, world)

        # `optimizer.steps` excludes skipped steps, so these do not advance the schedule, as in
        # Megatron's training.py.
        lr = job.schedule.apply(optimizer, optimizer.steps)

        rejected = False
        if largest_loss is not None:
            rejected = is_bad_loss(job, loss.item(), largest_loss)  # the host waits for the loss
        if rejected:
            skip_update(job)
            stepped = False
        else:
            # Our optimizers do everything from here on inside step(), so that it also happens in a
            # custom loop or under Accelerate:
            #   unscale    divides the gradients by the loss scale
            #   check      computes their norm over all ranks; the step is skipped if not finite
            #   clip       to trainer.gradient_clip_val
            #   update     of the fp32 master weights; with opt_level, of the low-precision state
            #   scales     on_step hook: reduces the amaxes of this step over the ranks, then sets
            #              the FP8 scales; on_skip hook: drops the amaxes of a skipped step
            #   weights    quantizes FP8 weights with the new scales
            #   ZeRO       on_written hook: broadcasts the weights
            # building/optimizer.py sets these hooks.
            stepped = optimizer.step()

    metrics = {"loss": loss}
    deferred: DeferredSteps | None = None
    grad_norm = math.nan
    if not rejected:
        deferred = optimizer.deferred
        grad_norm = optimizer.grad_norm
    if deferred is not None:
        metrics["grad_norm"] = deferred.norm
        if num_targets is not None:
            metrics["num_targets"] = num_targets
    if collect_metrics is not None:
        metrics |= collect_metrics(loss)
    # One copy to the host for all metrics, instead of one launch each.
    flat = [tensor.reshape(-1).float() for tensor in metrics.values()]
    return PendingStep(
        step=step + 1,
        lr=lr,
        sizes={name: tensor.numel() for name, tensor in metrics.items()},
        copy=HostCopy.of(torch.cat(flat)),
        deferred=deferred,
        grad_norm=grad_norm,
        stepped=stepped,
        sent_bytes=sum(world.traffic.bytes.values()),
        sent=str(world.traffic),
        data=job.recipe.data.name,
        rejected=rejected,
    )


def sum_losses(job: Job, batches: Batches, weighted_loss: Tensor, world: World) -> Tensor:
    """Returns the loss of a step from the sum of this rank's weighted losses, float32 []."""
    strategy = job.recipe.trainer.strategy
    # Tensor-parallel ranks compute the same loss, so the sum counts it several times.
    divisor = strategy.tensor_model_parallel_size
    if not batches.samples.masked:
        divisor *= count_microbatches(job, world) * count_batch_shares(strategy, world)
    return world.sum(weighted_loss / divisor)


def is_bad_loss(job: Job, loss: float, largest_loss: float) -> bool:
    """Whether a step with this loss is skipped."""
    if not math.isfinite(loss):
        # With a loss scale the optimizer finds this in the gradients, and lowers the scale.
        return job.loss_scaler is None
    return loss > largest_loss


def skip_update(job: Job) -> None:
    """Drops the gradients and FP8 amaxes of a step, instead of optimizer.step()."""
    for hook in job.optimizer.on_skip:
        hook()
    job.optimizer.zero_grad()
    job.summed = False


def check_pass(job: Job, batches: Batches, step: int, world: World) -> Tensor:
    """Runs the first microbatch of a step forward and backward, without an optimizer step.

    With pipeline stages it runs all microbatches. Gradients stay in `.grad` of this rank.

    Args:
        job: The job.
        batches: Training data.
        step: Number of the step, counted from 0.
        world: Ranks of the run.

    Returns:
        The loss, []. With pipeline stages the sum of the losses, 0 on all stages but the last.
    """
    microbatches, _ = load_microbatches(job, batches, step, world)
    job.optimizer.zero_grad()
    if job.prepared.pipeline is None:
        first_microbatch = next(iter(microbatches))
        with quantized_weight_cache(job, 1):
            return forward_backward(job, first_microbatch, world, is_last=True)
    total = torch.zeros((), dtype=torch.float32, device=job.device)
    with quantized_weight_cache(job, count_microbatches(job, world)):
        for loss, _ in run_pipeline(job, microbatches, world):
            total += loss
    return total


@contextmanager
def extra_pass(job: Job) -> Iterator[None]:
    """Context manager for passes that are not part of a training step.

    Afterwards all buffers are as before, such as FP8 amaxes, and there are no gradients. The random
    state is the caller's concern.
    """
    copies = {}
    for name, buffer in job.model.named_buffers():
        leaf = name.rpartition(".")[2]
        if leaf not in WEIGHT_BUFFERS:  # large, and a pass only reads them
            copies[name] = buffer.clone()
    try:
        with pause_overflow_counts():
            yield
    finally:
        job.optimizer.zero_grad()
        with torch.no_grad():
            for name, copy in copies.items():
                job.model.get_buffer(name).copy_(copy)
        for layer in fp8_linears(job.model):
            if layer.fsdp_shard is not None:
                # Forces the next pass to quantize the shard again and to record its amax.
                layer.fsdp_shard.quantized = None


@contextmanager
def dropping_gradients_on_error(job: Job) -> Iterator[None]:
    """Discards the state of an unfinished step after an error, so another step can follow."""
    try:
        yield
    except BaseException:
        job.summed = False
        if job.prepared.fsdp2:
            from fp8cfg.parallel import fsdp  # here: it takes a second to load

            # Weights may be gathered, and reduce-scatters may have left partial gradients.
            fsdp.discard_step(job.model, job.prepared.shard)
        raise


# ------------------------------------------------------------------------------------------------
# Forward and backward passes


def run_passes(
    job: Job, microbatches: Iterable[Microbatch], num_microbatches: int, world: World
) -> Iterable[tuple[Tensor, float | Tensor]]:
    """Runs the forward and backward passes of a step. Yields the losses and their weights."""
    if job.prepared.pipeline is not None:
        return run_pipeline(job, microbatches, world)
    return run_microbatches(job, microbatches, num_microbatches, world)


def run_microbatches(
    job: Job, microbatches: Iterable[Microbatch], num_microbatches: int, world: World
) -> Iterator[tuple[Tensor, float | Tensor]]:
    """Runs the microbatches one after the other. Yields their losses and loss weights."""
    for index, microbatch in enumerate(microbatches):
        is_last = index + 1 == num_microbatches
        with gradient_storage(job, is_last):
            loss = forward_backward(job, microbatch, world, is_last)
        yield loss, microbatch.loss_weight


def forward_backward(job: Job, microbatch: Microbatch, world: World, is_last: bool) -> Tensor:
    """Runs the forward and backward pass of a microbatch.

    Args:
        job: The job.
        microbatch: Its input, on the CPU.
        world: Ranks of the run.
        is_last: Whether it is the last microbatch of the step on this rank.

    Returns:
        The loss, [], detached and not divided by `num_shares`.
    """
    if job.prepared.fsdp2:
        from fp8cfg.parallel import fsdp  # here: it takes a second to load

        # With ZeRO-1, FSDP2 reduces gradients in the last microbatch only.
        fsdp.prepare_microbatch(job.model, job.prepared.shard, is_last)
    with job.autocast():
        loss = compute_loss(job, microbatch.tensors)
        # The loss is divided, not the summed gradients. So the size of FP8 gradients does not
        # depend on the number of microbatches and ranks. Inside the context, because layers under
        # activation checkpointing run their forward pass again.
        job.backward(loss, microbatch.num_shares)
    count_traffic(job, len(microbatch.tensors[0]), world)
    return loss.detach()


def run_pipeline(
    job: Job, microbatches: Iterable[Microbatch], world: World
) -> list[tuple[Tensor, float | Tensor]]:
    """Runs all microbatches of a step through the pipeline stages.

    Returns:
        Losses and loss weights on the last stage, an empty list on other stages.
    """
    microbatches = list(microbatches)
    columns = zip(*(microbatch.tensors for microbatch in microbatches), strict=True)
    batch = copy_batch_to_device(tuple(torch.cat(column) for column in columns), job.device)
    num_shares = [microbatch.num_shares for microbatch in microbatches]
    factors = loss_factors(job.loss_scaler, num_shares)
    with job.autocast():
        losses = pipeline_schedule(job, world).train(batch, factors)
    for microbatch in microbatches:
        count_traffic(job, len(microbatch.tensors[0]), world)
    weights = [microbatch.loss_weight for microbatch in microbatches]
    # Not strict: only the last stage has losses.
    return list(zip(losses, weights, strict=False))


def pipeline_schedule(job: Job, world: World) -> Pipeline:
    """Returns the pipeline schedule of a job. The first call builds it."""
    rank: PipelineRank = job.prepared.pipeline
    if rank.schedule is None:
        from fp8cfg.parallel.pipeline_schedule import Pipeline  # here: it takes time to load

        sync: StageSync | None = None
        if job.prepared.fsdp2:
            from fp8cfg.parallel.fsdp import FSDPStageSync

            # With interleaved schedules a rank has several chunks of layers.
            chunks = []
            for numbers in rank.chunks:
                chunks.append([job.model.get_submodule(f"layers.{i}") for i in numbers])
            sync = FSDPStageSync(job.model, job.prepared.shard, chunks)
        rank.schedule = Pipeline(
            job.model,  # type: ignore[arg-type]
            rank,
            count_microbatches(job, world),
            job.recipe.trainer.micro_batch_size,
            DTYPES[job.recipe.precision.compute],
            job.device,
            sync,
        )
    schedule: Pipeline = rank.schedule
    return schedule


def compute_loss(job: Job, tensors: tuple[Tensor, ...]) -> Tensor:
    """Runs the forward pass of a microbatch.

    Args:
        job: The job.
        tensors: Tokens, targets and optional document numbers, [micro_batch_size, seq_length].

    Returns:
        The loss, [].

    Raises:
        ConfigError: A custom model does not take (tokens, targets), or does not return a loss.
    """
    batch = copy_batch_to_device(tensors, job.device)
    problem = ""
    # The signature is checked first, so that a TypeError inside the model is not mistaken for it.
    if job.foreign:
        try:
            inspect.signature(job.model.forward).bind(*batch)
        except TypeError as error:
            problem = f"does not accept them: {error}"
    if not problem:
        loss = job.forward(*batch)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss
        problem = f"returns {type(loss).__name__}"
        if isinstance(loss, Tensor):
            problem = f"returns a tensor of shape {[*loss.shape]}"
    raise ConfigError(
        "fit: needs a model whose model(tokens, targets) returns the loss, but"
        f" {type(job.model).__name__} {problem}; pass such a module to build, or train job.model"
        " in your own loop"
    )


def quantized_weight_cache(job: Job, num_microbatches: int) -> AbstractContextManager[None]:
    """Caches quantized weights from the first microbatch for all microbatches of the step."""
    return cached_weights(job.model, job.quantizes_weights_once(num_microbatches))


def gradient_storage(job: Job, is_last: bool) -> AbstractContextManager[None]:
    """Quantizes each gradient once the last microbatch has completed it (opt_level O2, O3).

    So the high-precision gradients of the full model never exist at the same time.
    """
    if job.recipe.storage.accumulate == "stored":
        return nullcontext()  # the optimizer already quantizes them in every microbatch
    if is_last and stores_early(job.prepared):
        return job.optimizer.storing()
    return nullcontext()


def count_traffic(job: Job, num_samples: int, world: World) -> None:
    """Counts the bytes sent by this rank in a forward and backward pass of `num_samples`."""
    if world.size == 1:
        return
    for sent in job.pass_traffic(num_samples, world):
        world.traffic.add(sent.content, sent.bytes, sent.messages)
