"""Evaluation of a job between training steps: the loss of its validation data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8cfg.data import DataError, eval_batches
from fp8cfg.numerics.async_copies import HostCopy, copy_to_device
from fp8cfg.parallel.mesh import batch_share
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training.microbatches import NoTargets, copy_batch_to_device, count_local_targets
from fp8cfg.training.step import pipeline_schedule

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.data import Samples
    from fp8cfg.schema.recipe import Recipe


class Stopped(Exception):
    """A signal ended an evaluation before its last batch."""


def validation_batches(
    recipe: Recipe, held_out: Samples | None, world: World
) -> Iterator[tuple[Tensor, ...]]:
    """Returns this rank's batches of one evaluation.

    Raises:
        ConfigError: There are no validation data, or not enough for one batch. Raised at once, not
            when the first batch is read.
    """
    t = recipe.trainer
    if held_out is None:
        raise ConfigError("data.validation_path=null: a stream has no held-out part; set a path")
    try:
        share = batch_share(t.strategy, world.rank, world.size)
        return eval_batches(held_out, t.global_batch_size, t.limit_val_batches, *share)
    except DataError as e:
        raise ConfigError(f"data={recipe.data.name}: {e}") from None


@torch.no_grad()
def evaluate(
    job: Job,
    batches: Iterable[tuple[Tensor, ...]],
    world: World,
    stop: Callable[[], bool] = lambda: False,
    masked: bool = False,
) -> float:
    """Computes the mean loss over batches on all ranks. All ranks call it.

    The model runs in high precision, so the validation losses of different recipes are comparable.
    Set fp8.use_autocast_during_eval to run it in FP8. FP8 state does not change.

    Args:
        job: The job.
        batches: Batches of this rank on the CPU. All ranks must have the same number.
        world: Ranks of the run.
        stop: Returns whether this rank wants to stop.
        masked: Whether to weight each microbatch by its number of targets.

    Returns:
        The mean loss.

    Raises:
        Stopped: A rank wants to stop. Raised at most one microbatch later, on all ranks.
        NoTargets: No token of the batches has a loss. Raised on all ranks.
    """
    was_training = job.model.training
    job.model.eval()
    requests = _StopRequests(stop, world, job.device)
    run_batch = _evaluate_batch if job.prepared.pipeline is None else _evaluate_in_stages
    losses: list[Tensor] = []
    num_targets: list[float] = []
    try:
        with job.autocast(job.recipe.fp8.use_autocast_during_eval):
            for batch in batches:
                for loss, count in run_batch(job, batch, world, requests):
                    losses.append(loss)
                    num_targets.append(count)
    finally:
        job.model.train(was_training)
        if job.prepared.fsdp2:
            from fp8cfg.parallel.fsdp import reshard_weights

            # Forward passes gather weights, and no backward pass has freed them.
            reshard_weights(job.model)
    if not losses:
        # Pipeline stages without an output layer have no loss, but take part in the sums below.
        losses = [torch.zeros((), dtype=torch.float32, device=job.device)]
        num_targets = [0.0]

    loss = torch.stack(losses)
    if masked:
        weights = torch.tensor(num_targets, dtype=torch.float64, device=job.device)
        sums = world.sum(torch.stack([(loss * weights).sum(), weights.sum()]))
        total, count = sums.tolist()
        if not count:
            raise NoTargets(
                f"data={job.recipe.data.name}: no token of the validation data has a loss; set"
                " another data.validation_path, or trainer.val_check_interval=0"
            )
        return float(total / count)
    # One of num_stages ranks has losses: the last stage. The others add 0 to the sum.
    num_stages = job.recipe.trainer.strategy.pipeline_model_parallel_size
    return world.sum(loss.mean() * num_stages / world.size).item()


class _StopRequests:
    """Checks during an evaluation whether any rank wants to stop, without waiting.

    Each check launches an all-reduce and reads the result of the previous one. So the host does not
    wait for other ranks, and the evaluation ends one microbatch after the first request.

    Args:
        stop: Returns whether this rank wants to stop.
        world: Ranks of the run.
        device: Device of the all-reduce.
    """

    def __init__(self, stop: Callable[[], bool], world: World, device: torch.device) -> None:
        self._stop = stop
        self._world = world
        self._device = device
        self._previous: HostCopy | None = None

    def check(self) -> None:
        """Raises Stopped. All ranks call it before each microbatch."""
        if self._world.size == 1:
            if self._stop():
                raise Stopped
            return
        previous = self._previous
        request = copy_to_device(
            torch.tensor(float(self._stop()), dtype=torch.float32), self._device
        )
        self._previous = HostCopy.of(self._world.largest(request))
        if previous is not None and previous.read() > 0:
            raise Stopped


def _evaluate_batch(
    job: Job, batch: tuple[Tensor, ...], world: World, requests: _StopRequests
) -> Iterator[tuple[Tensor, float]]:
    """Yields the loss [] and this rank's number of targets for each microbatch of `batch`."""
    columns = [torch.split(tensor, job.recipe.trainer.micro_batch_size) for tensor in batch]
    for tensors in zip(*columns, strict=True):
        requests.check()
        loss = job.model(*copy_batch_to_device(tensors, job.device))
        yield loss, float(count_local_targets(job, tensors[1]))


def _evaluate_in_stages(
    job: Job, batch: tuple[Tensor, ...], world: World, requests: _StopRequests
) -> Iterator[tuple[Tensor, float]]:
    """Yields the same as `_evaluate_batch` for a pipeline, on its last stage only."""
    requests.check()
    losses = pipeline_schedule(job, world).evaluate(copy_batch_to_device(batch, job.device))
    targets = torch.split(batch[1], job.recipe.trainer.micro_batch_size)
    # Not strict: other stages have no losses.
    for loss, targets_of_loss in zip(losses, targets, strict=False):
        yield loss, float(count_local_targets(job, targets_of_loss))
