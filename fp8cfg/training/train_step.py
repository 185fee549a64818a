"""Training step: one optimizer step over its microbatches, and one evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8cfg.config.errors import ConfigError
from fp8cfg.data import Batches
from fp8cfg.job import Job
from fp8cfg.parallel.mesh import batch_share
from fp8cfg.training.distributed.gradient_sync import stores_early, sum_gradients
from fp8cfg.training.distributed.world import World
from fp8cfg.training.model_traffic import count_pass


@dataclass(frozen=True)
class Step:
    """What one optimizer step did. `loss` is the mean over the global batch; `stepped` is False where non-finite gradients
    made it be skipped."""

    loss: float
    lr: float
    grad_norm: float
    stepped: bool


class Stopped(Exception):
    """An evaluation was asked to end before its last batch."""


def microbatches(job: Job, world: World) -> int:
    """Forward and backward passes of one optimizer step on each rank. Raises ConfigError where batches do not divide."""
    t = job.recipe.trainer
    _, data = batch_share(t.strategy, world.rank, world.size)
    per_pass = t.micro_batch_size * data
    if t.global_batch_size % per_pass:
        nearest = max(1, round(t.global_batch_size / per_pass)) * per_pass
        kind = "" if data == world.size else "data-parallel "
        raise ConfigError(f"trainer.global_batch_size={t.global_batch_size}: not a multiple of trainer.micro_batch_size x "
                          f"{data} {kind}ranks = {per_pass}; nearest is {nearest}")
    return t.global_batch_size // per_pass


def train_step(job: Job, batches: Batches, step: int, world: World) -> Step:
    """Optimizer step number `step`, the first being 0."""
    count, share = microbatches(job, world), batch_share(job.recipe.trainer.strategy, world.rank, world.size)
    total = torch.zeros((), device=job.device)
    data = world.size // job.recipe.trainer.strategy.tensor_model_parallel_size  # ranks with other tokens
    again = job.recipe.storage.accumulate == "stored"  # then the optimizer stores each by itself
    job.optimizer.zero_grad()
    for i in range(count):
        tokens, targets = batches.batch(step, *share, i, count)
        stores = not again and i + 1 == count and stores_early(job.prepared, world)
        with job.autocast(), job.optimizer.storing() if stores else nullcontext():
            loss = _loss(job, tokens, targets)
            job.backward(loss, parts=count * data)
        count_pass(job.recipe, len(tokens), world)
        total += loss.detach()
    sum_gradients(job.prepared, job.optimizer, world)
    job.summed = True
    lr = job.schedule.apply(job.optimizer, job.optimizer.steps)  # a skipped step does not move it (Megatron's training.py)
    stepped = job.optimizer.step()
    mean = world.sum(total / (count * world.size))
    return Step(mean.item(), lr, job.optimizer.grad_norm, stepped)


def _loss(job: Job, tokens: Tensor, targets: Tensor) -> Tensor:
    """What the model makes of a batch. Raises ConfigError where a given one does not make a loss of it."""
    batch = tokens.to(job.device), targets.to(job.device)
    kind, what = type(job.model).__name__, ""
    if job.foreign:
        try:
            inspect.signature(job.model.forward).bind(*batch)
        except TypeError as e:
            what = f"cannot be called so: {e}"
    if not what:
        loss = job.forward(*batch)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss
        what = f"gives {f'a tensor of shape {[*loss.shape]}' if isinstance(loss, Tensor) else type(loss).__name__}"
    raise ConfigError(f"fit: trains models whose model(tokens, targets) is the loss, and {kind} {what}; give build a module that "
                      "returns the loss, or train job.model in a loop of your own")


@torch.no_grad()
def evaluate(
    job: Job, batches: Iterable[tuple[Tensor, Tensor]], world: World, stop: Callable[[], bool] = lambda: False
) -> float:
    """Mean loss over `batches` on all ranks, in high precision unless fp8.use_autocast_during_eval. Moves no FP8 state. Raises
    Stopped where `stop`, which all ranks ask before each microbatch, says so."""
    training = job.model.training
    job.model.eval()
    losses = []
    try:
        with job.autocast(job.recipe.fp8.use_autocast_during_eval):
            for batch in batches:
                parts = [torch.split(t, job.recipe.trainer.micro_batch_size) for t in batch]
                for tokens, targets in zip(*parts, strict=True):
                    if stop():
                        raise Stopped
                    losses.append(job.model(tokens.to(job.device), targets.to(job.device)))
    finally:
        job.model.train(training)
        if job.prepared.shard == "fsdp":
            from fp8cfg.training.distributed.fsdp import let_go

            let_go(job.model)
    mean = torch.stack(losses).mean() / world.size
    return world.sum(mean).item()
