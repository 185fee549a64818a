"""Training step: one optimizer step over its microbatches.

    zero_grad
    for each microbatch:
        forward         loss = mean over the targets of the microbatch
        backward        loss * loss_scale / num_shares
    sum gradients       over data-parallel ranks; FSDP2 has done so during backward
    set lr              from the number of steps completed so far
    optimizer.step()    unscale -> norm -> skip if it is not finite -> clip -> Adam
                        -> FP8 scales -> weights
    sum the loss        over data-parallel ranks

`train_step` only launches this work. On a GPU, the host reads the metrics of step k after it has
launched step k + 1 (`PendingStep.wait`), so neither waits for the other:

    host      launch 1   launch 2   read 1   launch 3   read 2   ...
    device          step 1             step 2              step 3   ...
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.building.job import Job
from fp8cfg.data import IGNORED, Batches
from fp8cfg.numerics.async_copies import HostCopy
from fp8cfg.numerics.linear_operands import cached_weights
from fp8cfg.optim.deferred_step import DeferredSteps
from fp8cfg.optim.loss_scale import loss_factors
from fp8cfg.parallel.gradient_sync import stores_early, sum_gradients
from fp8cfg.parallel.mesh import batch_share, coordinates
from fp8cfg.parallel.pipeline import PipelineRank
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.communication import pass_traffic
from fp8cfg.planning.layout import quantizes_weights_once, stage_parts
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.training import Strategy

if TYPE_CHECKING:
    from fp8cfg.parallel.pipeline_schedule import Pipeline, StageSync


class Microbatch(NamedTuple):
    """Input of one forward and backward pass.

    Attributes:
        tensors: Tokens and targets, int64 [micro_batch_size, seq_length], and document numbers if
            attention is separated by document.
        num_shares: The step's loss is a mean of so many equal shares, and the loss of this
            microbatch is one of them. With masked targets: the targets of the step over the
            targets of this microbatch, a number or float64 [] on the device.
        loss_weight: Factor of the loss in the sum that the step reports.
    """

    tensors: tuple[Tensor, ...]
    num_shares: float | Tensor
    loss_weight: float | Tensor


@dataclass(frozen=True)
class StepResult:
    """Metrics of a finished optimizer step.

    Attributes:
        loss: Mean over the targets of the global batch.
        lr: Learning rate.
        grad_norm: Norm of the gradients before clipping.
        stepped: False if the gradients were not finite, and the step changed nothing.
        step: Number of the step, counted from 1.
        sent_bytes: Bytes that this rank has sent.
        sent: What it has sent, in words.
        metrics: The tensors of `collect_metrics`, on the host.
    """

    loss: float
    lr: float
    grad_norm: float
    stepped: bool
    step: int = 0
    sent_bytes: int = 0
    sent: str = ""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingStep:
    """An optimizer step that the device may still be working on.

    Attributes:
        step: Number of the step, counted from 1.
        lr: Learning rate.
        sizes: Number of values of each metric in `copy`.
        copy: All metrics, float32 [sum of sizes], on their way to the host.
        deferred: Knows the device's decision about the step. None if the host has decided:
        grad_norm: Norm of the gradients before clipping.
        stepped: Whether the step was made, not skipped.
        sent_bytes: Bytes that this rank has sent.
        sent: What it has sent, in words.
        data: Name of the data set, for errors.
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

    def wait(self) -> StepResult:
        """Waits for the step. Call it once for each step, in the order of the launches.

        Raises:
            NoTargets: No token of the step has a loss. The device has skipped the step.
        """
        values = self.copy.read()
        metrics = dict(zip(self.sizes, values.split(list(self.sizes.values())), strict=True))
        grad_norm, stepped = self.grad_norm, self.stepped
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
        )


CollectMetrics = Callable[[Tensor], Mapping[str, Tensor]]
"""Gets the loss of a step, float32 []. Returns more metrics to copy to the host with it."""


def train_step(
    job: Job,
    batches: Batches,
    step: int,
    world: World,
    collect_metrics: CollectMetrics | None = None,
) -> PendingStep:
    """Launches optimizer step `step`, counted from 0.

    Does not wait for the device inside of `DeferredSteps`. If it raises an error the gradients are
    dropped, and the job can take another step.
    """
    optimizer = job.optimizer
    num_microbatches = count_microbatches(job, world)
    microbatches, num_targets = load_microbatches(job, batches, step, world)

    with dropping_gradients_on_error(job):
        optimizer.zero_grad()
        weighted_loss = torch.zeros((), dtype=torch.float32, device=job.device)
        with quantized_weight_cache(job, num_microbatches):
            losses: Iterable[tuple[Tensor, float | Tensor]]
            if job.prepared.pipeline is not None:
                losses = run_pipeline(job, microbatches, world)
            else:
                losses = run_microbatches(job, microbatches, num_microbatches, world)
            for loss, loss_weight in losses:
                weighted_loss += loss * loss_weight

        # A sum over the ranks, not a mean: the shares add up to 1 over all ranks.
        sum_gradients(job.prepared, optimizer, world)
        job.summed = True

        # A skipped step does not advance the schedule (Megatron's training.py).
        lr = job.schedule.apply(optimizer, optimizer.steps)

        # The order inside optimizer.step():
        #   unscale    divides the gradients by the loss scale
        #   check      computes their norm over all ranks; the step is skipped if not finite
        #   clip       to trainer.gradient_clip_val
        #   update     of the fp32 master weights; with opt_level, of the low-precision state
        #   scales     reduces the amaxes of this step over the ranks, then sets the FP8 scales
        #   weights    quantizes FP8 weights with the new scales; ZeRO broadcasts them
        stepped = optimizer.step()

        # Tensor-parallel ranks have the same loss.
        divisor = job.recipe.trainer.strategy.tensor_model_parallel_size
        if not batches.samples.masked:
            divisor *= num_microbatches * count_batch_shares(job.recipe.trainer.strategy, world)
        loss = world.sum(weighted_loss / divisor)

    metrics = {"loss": loss}
    if optimizer.deferred is not None:
        metrics["grad_norm"] = optimizer.deferred.norm
        if num_targets is not None:
            metrics["num_targets"] = num_targets
    if collect_metrics is not None:
        metrics |= collect_metrics(loss)
    # One copy for all metrics. A copy of its own would cost each of them a launch.
    flat = [tensor.reshape(-1).float() for tensor in metrics.values()]
    return PendingStep(
        step=step + 1,
        lr=lr,
        sizes={name: tensor.numel() for name, tensor in metrics.items()},
        copy=HostCopy.of(torch.cat(flat)),
        deferred=optimizer.deferred,
        grad_norm=optimizer.grad_norm,
        stepped=stepped,
        sent_bytes=sum(world.traffic.bytes.values()),
        sent=str(world.traffic),
        data=job.recipe.data.name,
    )


def check_pass(job: Job, batches: Batches, step: int, world: World) -> Tensor:
    """Runs forward and backward passes of the first microbatch of a step, of all in a pipeline.

    Returns their loss, []. The gradients of this rank stay in `.grad`.
    """
    microbatches, _ = load_microbatches(job, batches, step, world)
    job.optimizer.zero_grad()
    if job.prepared.pipeline is None:
        with quantized_weight_cache(job, 1):
            return forward_backward(job, next(iter(microbatches)), world, is_last=True)
    total = torch.zeros((), dtype=torch.float32, device=job.device)
    with quantized_weight_cache(job, count_microbatches(job, world)):
        for loss, _ in run_pipeline(job, microbatches, world):
            total += loss
    return total


@contextmanager
def dropping_gradients_on_error(job: Job) -> Iterator[None]:
    """After an error in the middle of a step, the next step begins as if there had been none."""
    try:
        yield
    except BaseException:
        job.summed = False
        if job.prepared.fsdp2:
            from fp8cfg.parallel import fsdp  # here: it takes a second to load

            fsdp.discard_step(job.model, job.prepared.shard)
        raise


# ------------------------------------------------------------------------------------------------
# Forward and backward passes


def run_microbatches(
    job: Job, microbatches: Iterable[Microbatch], num_microbatches: int, world: World
) -> Iterator[tuple[Tensor, float | Tensor]]:
    """Runs the passes of one microbatch after the other. Yields losses and their weights."""
    for index, microbatch in enumerate(microbatches):
        is_last = index + 1 == num_microbatches
        with gradient_storage(job, is_last):
            loss = forward_backward(job, microbatch, world, is_last)
        yield loss, microbatch.loss_weight


def forward_backward(job: Job, microbatch: Microbatch, world: World, is_last: bool) -> Tensor:
    """Runs the forward and backward pass of a microbatch. Returns its loss, []."""
    if job.prepared.fsdp2:
        from fp8cfg.parallel import fsdp  # here: it takes a second to load

        # With ZeRO-1, FSDP2 reduces gradients in the last microbatch only.
        fsdp.prepare_microbatch(job.model, job.prepared.shard, is_last)
    with job.autocast():
        loss = compute_loss(job, microbatch.tensors)
        # Weighing the loss, not the sum of the gradients, keeps the gradients that FP8 sees
        # independent of the number of microbatches and ranks.
        job.backward(loss, microbatch.num_shares)
    count_traffic(job, len(microbatch.tensors[0]), world)
    return loss.detach()


def run_pipeline(
    job: Job, microbatches: Iterable[Microbatch], world: World
) -> list[tuple[Tensor, float | Tensor]]:
    """Runs all microbatches of a step through the stages of a pipeline.

    Returns:
        Losses and their weights on the last stage, nothing on other stages.
    """
    microbatches = list(microbatches)
    columns = zip(*(microbatch.tensors for microbatch in microbatches), strict=True)
    batch = on_device(tuple(torch.cat(column) for column in columns), job.device)
    factors = loss_factors(job.loss_scaler, [each.num_shares for each in microbatches])
    with job.autocast():
        losses = pipeline(job, world).train(batch, factors)
    for microbatch in microbatches:
        count_traffic(job, len(microbatch.tensors[0]), world)
    weights = [microbatch.loss_weight for microbatch in microbatches]
    return list(zip(losses, weights, strict=False))


def pipeline(job: Job, world: World) -> Pipeline:
    """Returns the schedule of the passes of `job` through its stages. It is built once."""
    rank: PipelineRank = job.prepared.pipeline
    if rank.schedule is None:
        from fp8cfg.parallel.pipeline_schedule import Pipeline  # here: it takes time to load

        sync: StageSync | None = None
        if job.prepared.fsdp2:
            from fp8cfg.parallel.fsdp import FSDPStageSync

            chunks = [
                [job.model.get_submodule(f"layers.{number}") for number in chunk]
                for chunk in rank.chunks
            ]
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

    Raises:
        ConfigError: A custom model does not take (tokens, targets), or does not return a loss.
    """
    batch = on_device(tensors, job.device)
    problem = ""
    if job.foreign:
        try:
            inspect.signature(job.model.forward).bind(*batch)
        except TypeError as error:
            problem = f"cannot be called so: {error}"
    if not problem:
        loss = job.forward(*batch)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss
        problem = f"gives {type(loss).__name__}"
        if isinstance(loss, Tensor):
            problem = f"gives a tensor of shape {[*loss.shape]}"
    raise ConfigError(
        "fit: trains models whose model(tokens, targets) is the loss, and"
        f" {type(job.model).__name__} {problem}; give build a module that returns the loss, or"
        " train job.model in a loop of your own"
    )


def quantized_weight_cache(job: Job, num_microbatches: int) -> AbstractContextManager[None]:
    """Lets the first microbatch of a step quantize the weights for all of them."""
    prepared = job.prepared
    is_cached = quantizes_weights_once(job.recipe, prepared.state, prepared.shard, num_microbatches)
    return cached_weights(job.model, is_cached)


def gradient_storage(job: Job, is_last: bool) -> AbstractContextManager[None]:
    """Quantizes each gradient as soon as the last microbatch completes it (opt_level O2, O3).

    Then the full-precision gradients of the whole model never exist at once.
    """
    if job.recipe.storage.accumulate == "stored":
        return nullcontext()  # the optimizer already quantizes them in every microbatch
    if is_last and stores_early(job.prepared):
        return job.optimizer.storing()
    return nullcontext()


def count_traffic(job: Job, num_samples: int, world: World) -> None:
    """Counts what this rank sends in a forward and backward pass of `num_samples` samples."""
    if world.size == 1:
        return
    if num_samples not in job.sent_in_pass:
        # Cached, because it takes milliseconds for a model with many layers.
        strategy = job.recipe.trainer.strategy
        stage = coordinates(strategy, world.rank, world.size)["pp"]
        part = stage_parts(job.recipe, strategy.size)[stage]
        job.sent_in_pass[num_samples] = list(pass_traffic(job.recipe, part, num_samples))
    for sent in job.sent_in_pass[num_samples]:
        world.traffic.add(sent.what, sent.bytes, sent.messages)


# ------------------------------------------------------------------------------------------------
# Microbatches


def can_run_ahead(job: Job) -> bool:
    """Returns whether step k + 1 may be launched before the host has read step k.

    A CPU would gain nothing. Under a loss scale, the loss scale and the learning rate of a step
    depend on whether the step before was skipped.
    """
    return job.device.type == "cuda" and job.optimizer.can_defer and job.loss_scaler is None


def count_microbatches(job: Job, world: World) -> int:
    """Returns the forward and backward passes of one optimizer step on each rank.

    Raises:
        ConfigError: The global batch is not a multiple of the samples of one pass.
    """
    trainer = job.recipe.trainer
    _, num_data_ranks = batch_share(trainer.strategy, world.rank, world.size)
    samples_per_pass = trainer.micro_batch_size * num_data_ranks
    if trainer.global_batch_size % samples_per_pass:
        multiple = max(1, round(trainer.global_batch_size / samples_per_pass))
        kind = "" if num_data_ranks == world.size else "data-parallel "
        raise ConfigError(
            f"trainer.global_batch_size={trainer.global_batch_size}: not a multiple of"
            f" trainer.micro_batch_size x {num_data_ranks} {kind}ranks = {samples_per_pass};"
            f" nearest is {multiple * samples_per_pass}"
        )
    return trainer.global_batch_size // samples_per_pass


def count_batch_shares(strategy: Strategy, world: World) -> int:
    """Returns the number of shares into which the ranks cut each microbatch of all ranks.

    Context-parallel ranks have shares of the same sequences, with a loss each.
    """
    return world.size // (
        strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size
    )


def load_microbatches(
    job: Job, batches: Batches, step: int, world: World
) -> tuple[Iterable[Microbatch], Tensor | None]:
    """Loads this rank's microbatches of optimizer step `step`, counted from 0.

    Returns:
        The microbatches; and the number of targets of the step, float64 [] on the device, if the
        host has not looked at it. Without a target the device skips the step.

    Raises:
        NoTargets: No token of the step has a loss, on any rank.
    """
    strategy = job.recipe.trainer.strategy
    num_microbatches = count_microbatches(job, world)
    num_shares = count_batch_shares(strategy, world)
    share, num_data_ranks = batch_share(strategy, world.rank, world.size)

    def load(index: int) -> tuple[Tensor, ...]:
        return batches.batch(step, share, num_data_ranks, index, num_microbatches)

    if not batches.samples.masked:
        # Equal shares are summed as they are, and divided once, at the end.
        equal_shares = num_microbatches * num_shares
        indices = range(num_microbatches)
        return (Microbatch(load(index), equal_shares, 1.0) for index in indices), None

    loaded = [load(index) for index in range(num_microbatches)]
    targets = [targets_here(job, tensors[1]) for tensors in loaded]
    targets_of_rank = float(sum(targets))
    if world.size == 1:
        if not targets_of_rank:
            refuse_without_targets(job.recipe.data.name, step + 1)
        microbatches = []
        for tensors, count in zip(loaded, targets, strict=True):
            parts = targets_of_rank / count if count else math.inf
            microbatches.append(Microbatch(tensors, parts, 1 / parts))
        return microbatches, None

    # The sum stays on the device. A number would make the host wait for all other ranks.
    total = torch.full((), targets_of_rank, dtype=torch.float64, device=job.device)
    total = world.sum(total) * num_shares / world.size
    runs_ahead = job.optimizer.deferred is not None and can_run_ahead(job)
    if job.optimizer.deferred is not None and runs_ahead:
        job.optimizer.deferred.skip_without_targets(total)
    elif not total:
        refuse_without_targets(job.recipe.data.name, step + 1)
    microbatches = []
    for tensors, count in zip(loaded, targets, strict=True):
        share_count = total / count
        microbatches.append(Microbatch(tensors, share_count, (1 / share_count).float()))
    return microbatches, total if runs_ahead else None


def targets_here(job: Job, targets: Tensor) -> int:
    """Returns how many of the `targets` of whole sequences have a loss on this rank."""
    context = getattr(job.model, "context", None)
    if context is not None:
        targets = context.part(targets)
    return int((targets != IGNORED).sum())


class NoTargets(ConfigError):
    """No token of a step has a loss. All ranks raise it in the same step."""


def refuse_without_targets(data: str, step: int) -> None:
    """Raises NoTargets for step `step`, counted from 1, on the data set `data`."""
    raise NoTargets(f"data={data}: no token of step {step} has a loss")


def on_device(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Returns host tensors on `device`, for work that is launched on it after this call."""
    if device.type != "cuda":
        return tuple(tensor.to(device) for tensor in tensors)
    # A stream of its own: on the main stream the copy would wait for all launched work, and the
    # host would wait for a copy from pageable memory.
    main_stream = torch.cuda.current_stream(device)
    copy_stream = _copy_stream(device)
    with torch.cuda.stream(copy_stream):
        copies = tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)
    main_stream.wait_stream(copy_stream)
    for copy in copies:
        # Without it the allocator would give out the memory again while the main stream reads it.
        copy.record_stream(main_stream)
    return copies


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
