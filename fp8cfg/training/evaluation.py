"""Evaluation: the mean loss over held-out batches, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from fp8cfg.job import Job
from fp8cfg.training.device_copy import on_device
from fp8cfg.training.distributed.world import World
from fp8cfg.training.microbatches import targets_here
from fp8cfg.training.train_step import pipeline


class Stopped(Exception):
    """An evaluation was asked to end before its last batch."""


@torch.no_grad()
def evaluate(
    job: Job,
    batches: Iterable[tuple[Tensor, ...]],
    world: World,
    stop: Callable[[], bool] = lambda: False,
    masked: bool = False,
) -> float:
    """Mean loss over `batches` on all ranks, in high precision unless fp8.use_autocast_during_eval; of their targets where these
    are `masked`, and so not as many in each. Moves no FP8 state. Raises Stopped where `stop`, which all ranks ask before each
    microbatch, says so."""
    training = job.model.training
    job.model.eval()
    losses, counts = (
        [torch.zeros((), dtype=torch.float32, device=job.device)],
        [0.0],
    )  # of stages without an output layer
    passes = _evaluated if job.prepared.pipeline is None else _evaluated_in_stages
    try:
        with job.autocast(job.recipe.fp8.use_autocast_during_eval):
            found = [each for batch in batches for each in passes(job, batch, world, stop)]
            losses, counts = (
                (list(each) for each in zip(*found, strict=True)) if found else (losses, counts)
            )
    finally:
        job.model.train(training)
        if job.prepared.fsdp2:
            from fp8cfg.training.distributed.fsdp import let_go

            let_go(job.model)
    if masked:
        weights = torch.tensor(counts, dtype=torch.float64, device=job.device)
        sums = world.sum(torch.stack([(torch.stack(losses) * weights).sum(), weights.sum()]))
        return (sums[0] / sums[1]).item()
    mean = (
        torch.stack(losses).mean()
        * job.recipe.trainer.strategy.pipeline_model_parallel_size
        / world.size
    )
    return world.sum(mean).item()


def _evaluated(
    job: Job, batch: tuple[Tensor, ...], world: World, stop: Callable[[], bool]
) -> Iterator[tuple[Tensor, float]]:
    """The loss of each microbatch of `batch`, and the number of its targets here."""
    parts = [torch.split(t, job.recipe.trainer.micro_batch_size) for t in batch]
    for part in zip(*parts, strict=True):
        if stop():
            raise Stopped
        yield job.model(*on_device(part, job.device)), float(targets_here(job, part[1]))


def _evaluated_in_stages(
    job: Job, batch: tuple[Tensor, ...], world: World, stop: Callable[[], bool]
) -> Iterator[tuple[Tensor, float]]:
    """The same of a pipeline, on its last stage."""
    if stop():
        raise Stopped
    losses = pipeline(job, world).evaluate(on_device(batch, job.device))
    targets = torch.split(batch[1], job.recipe.trainer.micro_batch_size)
    yield from zip(losses, (float(targets_here(job, each)) for each in targets), strict=False)
