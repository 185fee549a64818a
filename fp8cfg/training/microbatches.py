"""Microbatches of an optimizer step: how many a rank has, and of how many parts of the step's loss each is one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fp8cfg.config.errors import ConfigError
from fp8cfg.config.training_nodes import Strategy
from fp8cfg.data import IGNORED, Batches
from fp8cfg.job import Job
from fp8cfg.parallel.mesh import batch_share
from fp8cfg.training.distributed.world import World

Part = tuple[tuple[Tensor, ...], float | Tensor]
"""A microbatch, as Batches gives it, and of how many parts of the step's loss its loss is one."""


def microbatches(job: Job, world: World) -> int:
    """Forward and backward passes of one optimizer step on each rank. Raises ConfigError where batches do not divide."""
    t = job.recipe.trainer
    _, data = batch_share(t.strategy, world.rank, world.size)
    per_pass = t.micro_batch_size * data
    if t.global_batch_size % per_pass:
        nearest = max(1, round(t.global_batch_size / per_pass)) * per_pass
        kind = "" if data == world.size else "data-parallel "
        raise ConfigError(
            f"trainer.global_batch_size={t.global_batch_size}: not a multiple of"
            f" trainer.micro_batch_size x {data} {kind}ranks = {per_pass}; nearest is {nearest}"
        )
    return t.global_batch_size // per_pass


def shares_of_batch(strategy: Strategy, world: World) -> int:
    """Into how many parts the ranks cut each microbatch of all."""
    return world.size // (
        strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size
    )


def parts_of_step(
    job: Job, batches: Batches, step: int, world: World
) -> tuple[Iterable[Part], Tensor | None]:
    """This rank's microbatches, and the targets of all ranks where somebody has to look at them later.

    The step's loss is the mean over all targets of the global batch of which one is taken. Where these are as many in each
    microbatch, each is one of equal parts; else as large as its share of them, which all ranks count together before the first
    pass, on the device: nobody waits for the others. Raises ConfigError where there are none, if the host knows or may wait.
    """
    strategy, count = job.recipe.trainer.strategy, microbatches(job, world)
    share, shares = batch_share(strategy, world.rank, world.size), shares_of_batch(strategy, world)
    if not batches.samples.masked:
        return ((batches.batch(step, *share, i, count), count * shares) for i in range(count)), None
    passes = [batches.batch(step, *share, i, count) for i in range(count)]
    targets = [targets_here(job, each[1]) for each in passes]
    here = float(sum(targets))
    if world.size == 1:
        if not here:
            refuse_without_targets(job, step)
        return (
            (each, here / n if n else math.inf) for each, n in zip(passes, targets, strict=True)
        ), None
    whole = (
        world.sum(torch.full((), here, dtype=torch.float64, device=job.device))
        * shares
        / world.size
    )
    if job.optimizer.deferred is None and not whole:
        refuse_without_targets(job, step)
    return ((each, whole / n) for each, n in zip(passes, targets, strict=True)), whole


def targets_here(job: Job, targets: Tensor) -> int:
    """Of whole sequences, the targets that this rank takes a loss of."""
    context = getattr(job.model, "context", None)
    part = targets if context is None else context.part(targets)
    return int((part != IGNORED).sum())


def refuse_without_targets(job: Job, step: int) -> None:
    """Raises ConfigError for step number `step`, the first being 0."""
    raise ConfigError(f"data={job.recipe.data.name}: no token of step {step + 1} has a loss")
