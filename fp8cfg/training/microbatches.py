"""Microbatches of an optimizer step: their number, their tensors and their weights in the loss.

All microbatches weigh the same, unless data are masked. Then a microbatch weighs as much as its
number of targets, and all ranks must know the number of targets of the whole step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp8cfg.data import IGNORED, Batches
from fp8cfg.parallel.mesh import batch_share
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import ConfigError

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.schema.training import Strategy


class Microbatch(NamedTuple):
    """Input of one forward and backward pass.

    Attributes:
        tensors: Tokens and targets, int64 [micro_batch_size, seq_length], and document numbers if
            attention is separated by document.
        num_shares: Divisor of the loss before backward: the number of microbatches over all data-
            and context-parallel ranks. With masked targets: targets of the step / targets of this
            microbatch, a number or float64 [] on the device.
        loss_weight: Factor of the loss in the reported sum.
    """

    tensors: tuple[Tensor, ...]
    num_shares: float | Tensor
    loss_weight: float | Tensor


class NoTargets(ConfigError):
    """No token of a step or of the validation data has a loss. All ranks raise it together."""


def load_microbatches(
    job: Job, batches: Batches, step: int, world: World, host_waits: bool = False
) -> tuple[Iterable[Microbatch], Tensor | None]:
    """Loads this rank's microbatches of an optimizer step. All ranks call it.

    Args:
        job: The job.
        batches: Training data.
        step: Number of the step, counted from 0.
        world: Ranks of the run.
        host_waits: Whether the host reads the loss of the step before the update. Then it also
            reads the number of targets.

    Returns:
        The microbatches. With them the number of targets of the step, float64 [] on the device, if
        the host has not read it. In this case the device skips a step without targets.

    Raises:
        NoTargets: No token of the step has a loss, on any rank.
    """
    strategy = job.recipe.trainer.strategy
    num_microbatches = count_microbatches(job, world)
    num_shares = count_batch_shares(strategy, world)
    share, num_data_ranks = batch_share(strategy, world.rank, world.size)

    def load(index: int) -> tuple[Tensor, ...]:
        """Loads one microbatch on the CPU."""
        return batches.batch(step, share, num_data_ranks, index, num_microbatches)

    if not batches.samples.masked:
        # All microbatches count equally. `sum_losses` divides the sum of losses once.
        equal_shares = num_microbatches * num_shares
        # A generator: each microbatch is loaded right before its pass.
        microbatches = (
            Microbatch(load(index), equal_shares, 1.0) for index in range(num_microbatches)
        )
        return microbatches, None

    loaded = [load(index) for index in range(num_microbatches)]
    return weight_by_targets(job, loaded, step, world, host_waits)


def weight_by_targets(
    job: Job,
    loaded: Sequence[tuple[Tensor, ...]],
    step: int,
    world: World,
    host_waits: bool = False,
) -> tuple[list[Microbatch], Tensor | None]:
    """Weights each microbatch of masked data by its number of targets.

    Arguments, results and errors as in `load_microbatches`.

    Args:
        job: The job.
        loaded: Tensors of this rank's microbatches.
        step: Number of the step, counted from 0.
        world: Ranks of the run.
        host_waits: Whether the host waits for the loss of the step.
    """
    counts = [count_local_targets(job, tensors[1]) for tensors in loaded]
    targets_of_rank = float(sum(counts))
    microbatches = []
    if world.size == 1:
        if not targets_of_rank:
            refuse_without_targets(job.recipe.data.name, step + 1)
        for tensors, count in zip(loaded, counts, strict=True):
            inverse_weight = math.inf  # a microbatch without targets has the weight 0
            if count:
                inverse_weight = targets_of_rank / count
            microbatches.append(Microbatch(tensors, inverse_weight, 1 / inverse_weight))
        return microbatches, None

    # The sum stays on the device: with a Python number the host would wait for all ranks. Ranks
    # with the same tokens count the same targets.
    num_shares = count_batch_shares(job.recipe.trainer.strategy, world)
    total = torch.full((), targets_of_rank, dtype=torch.float64, device=job.device)
    total = world.sum(total) * num_shares / world.size
    total_on_device = None
    deferred = job.optimizer.deferred
    if deferred is not None and can_run_ahead(job) and not host_waits:
        deferred.skip_without_targets(total)
        total_on_device = total
    elif not total:
        refuse_without_targets(job.recipe.data.name, step + 1)
    for tensors, count in zip(loaded, counts, strict=True):
        share_count = total / count
        microbatches.append(Microbatch(tensors, share_count, (1 / share_count).float()))
    return microbatches, total_on_device


def count_local_targets(job: Job, targets: Tensor) -> int:
    """Returns the number of targets with a loss on this rank.

    Args:
        job: The job.
        targets: Targets of full sequences, [samples, seq_length].
    """
    # A context-parallel rank computes the loss of its part of each sequence.
    context = getattr(job.model, "context", None)
    if context is not None:
        targets = context.part(targets)
    return int((targets != IGNORED).sum())


def refuse_without_targets(data: str, step: int) -> None:
    """Raises NoTargets for a step, counted from 1, of the data set `data`."""
    raise NoTargets(f"data={data}: no token of step {step} has a loss")


def count_microbatches(job: Job, world: World) -> int:
    """Returns the number of microbatches of an optimizer step on each rank.

    Raises:
        ConfigError: The global batch is not a multiple of the samples of one pass.
    """
    trainer = job.recipe.trainer
    _, num_data_ranks = batch_share(trainer.strategy, world.rank, world.size)
    samples_per_pass = trainer.micro_batch_size * num_data_ranks
    if trainer.global_batch_size % samples_per_pass:
        multiple = max(1, round(trainer.global_batch_size / samples_per_pass))
        kind = "ranks"
        if num_data_ranks < world.size:
            kind = "data-parallel ranks"
        raise ConfigError(
            f"trainer.global_batch_size={trainer.global_batch_size}: not a multiple of"
            f" trainer.micro_batch_size x {num_data_ranks} {kind} = {samples_per_pass};"
            f" nearest is {multiple * samples_per_pass}"
        )
    return trainer.global_batch_size // samples_per_pass


def count_batch_shares(strategy: Strategy, world: World) -> int:
    """Returns the number of ranks with different tokens: data and context parallel."""
    # Context-parallel ranks have parts of the same sequences, and each has its own loss.
    return world.size // (
        strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size
    )


def can_run_ahead(job: Job) -> bool:
    """Whether step k + 1 can be launched before the host has read the metrics of step k."""
    # A CPU would gain nothing. With a loss scale, the scale and the learning rate of step k + 1
    # depend on whether step k was skipped.
    return job.device.type == "cuda" and job.optimizer.can_defer and job.loss_scaler is None


def copy_batch_to_device(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Copies host tensors to `device` without blocking. Later launches see the copies."""
    if device.type != "cuda":
        return tuple(tensor.to(device) for tensor in tensors)
    # A separate stream, because on the main stream the copy would wait for all launched work.
    # Pinned memory, because the host would wait for a copy from pageable memory.
    main_stream = torch.cuda.current_stream(device)
    copy_stream = _copy_stream(device)
    with torch.cuda.stream(copy_stream):
        copies = tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)
    main_stream.wait_stream(copy_stream)
    for copy in copies:
        # Otherwise the allocator could reuse this memory while the main stream still reads it.
        copy.record_stream(main_stream)
    return copies


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream for copies to `device`, one per process."""
    return torch.cuda.Stream(device)
