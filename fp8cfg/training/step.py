"""Training step: one optimizer step over its microbatches."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.building.job import Job
from fp8cfg.data import IGNORED, Batches
from fp8cfg.numerics.weight_workspace import weights_kept
from fp8cfg.optim.loss_scale import loss_factors
from fp8cfg.parallel.gradient_sync import stores_early, sum_gradients
from fp8cfg.parallel.mesh import batch_share, coordinates
from fp8cfg.parallel.pipeline import PipelineRank
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.communication import of_pass
from fp8cfg.planning.layout import quantizes_once, stage_parts
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.training import Strategy

if TYPE_CHECKING:
    from fp8cfg.parallel.pipeline_schedule import Pipeline, StageSync


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def on_device(batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The tensors of the host on `device`; work that is launched on it after this call finds them there."""
    if device.type != "cuda":
        return tuple(t.to(device) for t in batch)
    main, stream = torch.cuda.current_stream(device), _stream(device)
    with torch.cuda.stream(stream):
        copied = tuple(t.pin_memory().to(device, non_blocking=True) for t in batch)
    main.wait_stream(stream)
    for t in copied:
        t.record_stream(
            main
        )  # or its memory would be given out again while that stream still reads it
    return copied


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


class NoTargets(ConfigError):
    """No token of a step has a loss. All ranks raise it in the same step."""


def refuse_without_targets(job: Job, step: int) -> None:
    """Raises NoTargets for step number `step`, the first being 0."""
    raise NoTargets(f"data={job.recipe.data.name}: no token of step {step + 1} has a loss")


def count_pass(job: Job, samples: int, world: World) -> None:
    """Count what this rank sends in a forward and a backward pass over that many samples."""
    if world.size == 1:
        return
    if samples not in job.sent_in_pass:  # which takes milliseconds for many layers
        strategy = job.recipe.trainer.strategy
        stage = coordinates(strategy, world.rank, world.size)["pp"]
        part = stage_parts(job.recipe, strategy.size)[stage]
        job.sent_in_pass[samples] = list(of_pass(job.recipe, part, samples))
    for sent in job.sent_in_pass[samples]:
        world.traffic.add(sent.what, sent.bytes, sent.messages)


@dataclass(frozen=True)
class Step:
    """What one optimizer step did. `loss` is the mean over the targets of the global batch; `stepped` is False where non-finite
    gradients made it be skipped."""

    loss: float
    lr: float
    grad_norm: float
    stepped: bool


def train_step(job: Job, batches: Batches, step: int, world: World) -> Step:
    """Optimizer step number `step`, the first being 0."""
    mean, lr, stepped, _ = run_step(job, batches, step, world)
    return Step(mean.item(), lr, job.optimizer.grad_norm, stepped)


class RunStep(NamedTuple):
    """An optimizer step that was run: its mean loss, [] on the device, the learning rate, or both that it may have, and what the
    optimizer's step returned. `targets` of all ranks, float64 [] on the device, are to be looked at later: where there are none the
    step was skipped. None where it has some."""

    mean: Tensor
    lr: float
    stepped: bool
    targets: Tensor | None


def run_step(job: Job, batches: Batches, step: int, world: World) -> RunStep:
    """Run an optimizer step. After an error in its midst the job takes another step, or one of a loop of one's own, as if this one
    had not begun."""
    try:
        return _step(job, batches, step, world)
    except BaseException:
        job.summed = False
        if job.prepared.fsdp2:
            from fp8cfg.parallel import fsdp  # inside: it takes a second to load

            fsdp.discard_step(job.model, job.prepared.shard)
        raise


def _step(job: Job, batches: Batches, step: int, world: World) -> RunStep:
    count = microbatches(job, world)
    strategy = job.recipe.trainer.strategy
    # A mean of equal parts is divided once, at its end.
    whole = 1 if batches.samples.masked else count * shares_of_batch(strategy, world)
    every, targets = parts_of_step(job, batches, step, world)
    if targets is not None and job.optimizer.deferred is not None:
        job.optimizer.deferred.skip_without_targets(targets)
    total = torch.zeros((), dtype=torch.float32, device=job.device)
    job.optimizer.zero_grad()
    with weights_kept(
        job.model, quantizes_once(job.recipe, job.prepared.state, job.prepared.shard, count)
    ):
        for loss, parts in _passes(job, every, count, world):
            share = whole / parts
            total += loss * (share.float() if isinstance(share, Tensor) else share)
    sum_gradients(job.prepared, job.optimizer, world)
    job.summed = True
    # A skipped step does not advance the schedule (Megatron's training.py).
    lr = job.schedule.apply(job.optimizer, job.optimizer.steps)
    stepped = job.optimizer.step()
    mean = world.sum(
        total / (whole * strategy.tensor_model_parallel_size)
    )  # so many ranks have the same loss
    return RunStep(mean, lr, stepped, targets)


def check_pass(job: Job, batches: Batches, step: int, world: World) -> Tensor:
    """Runs forward and backward passes of the first microbatch of a step, of all in a pipeline.

    Returns their loss, []. The gradients of this rank stay in `.grad`.
    """
    every, _ = parts_of_step(job, batches, step, world)
    count = microbatches(job, world)
    if job.prepared.pipeline is None:
        every, count = itertools.islice(every, 1), 1
    job.optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float32, device=job.device)
    with weights_kept(
        job.model, quantizes_once(job.recipe, job.prepared.state, job.prepared.shard, count)
    ):
        for loss, _ in _passes(job, every, count, world, stores=False):
            total += loss
    return total


def _passes(
    job: Job, every: Iterable[Part], count: int, world: World, stores: bool = True
) -> Iterable[tuple[Tensor, float | Tensor]]:
    """Forward and backward passes over the `count` microbatches: the loss of each, and of how many parts it is one."""
    if job.prepared.pipeline is not None:
        return _pipelined(job, every, world)
    return _one_by_one(job, every, count, world, stores)


def _one_by_one(
    job: Job, every: Iterable[Part], count: int, world: World, stores: bool
) -> Iterator[tuple[Tensor, float | Tensor]]:
    again = job.recipe.storage.accumulate == "stored"  # then the optimizer stores each by itself
    if job.prepared.fsdp2:
        from fp8cfg.parallel import fsdp  # inside: it takes a second to load
    for i, (batch, parts) in enumerate(every):
        if job.prepared.fsdp2:
            fsdp.prepare_microbatch(job.model, job.prepared.shard, i + 1 == count)
        early = stores and not again and i + 1 == count and stores_early(job.prepared)
        with job.autocast(), job.optimizer.storing() if early else nullcontext():
            loss = _loss(job, batch)
            job.backward(loss, parts)
        count_pass(job, len(batch[0]), world)
        yield loss.detach(), parts


def _pipelined(
    job: Job, every: Iterable[Part], world: World
) -> list[tuple[Tensor, float | Tensor]]:
    """The same through the stages of a pipeline: what the last has of losses, nothing on the others."""
    batches, parts = zip(*every, strict=True)
    whole = on_device(tuple(torch.cat(part) for part in zip(*batches, strict=True)), job.device)
    with job.autocast():
        losses = pipeline(job, world).train(whole, loss_factors(job.loss_scaler, parts))
    for batch in batches:
        count_pass(job, len(batch[0]), world)
    return list(zip(losses, parts, strict=False))


def pipeline(job: Job, world: World) -> Pipeline:
    """What runs the passes of `job` through its stages, made once."""
    here: PipelineRank = job.prepared.pipeline
    if here.schedule is None:
        from fp8cfg.parallel.pipeline_schedule import Pipeline  # inside: it takes some time to load

        t, dtype = job.recipe.trainer, DTYPES[job.recipe.precision.compute]
        sync: StageSync | None = None
        if job.prepared.fsdp2:
            from fp8cfg.parallel.fsdp import FSDPStageSync

            chunks = [
                [job.model.get_submodule(f"layers.{n}") for n in chunk] for chunk in here.chunks
            ]
            sync = FSDPStageSync(job.model, job.prepared.shard, chunks)
        here.schedule = Pipeline(
            job.model,  # type: ignore[arg-type]
            here,
            microbatches(job, world),
            t.micro_batch_size,
            dtype,
            job.device,
            sync,
        )
    made: Pipeline = here.schedule
    return made


def _loss(job: Job, parts: Iterable[Tensor]) -> Tensor:
    """What the model makes of a batch. Raises ConfigError where a given one does not make a loss of it."""
    batch = on_device(tuple(parts), job.device)
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
        shape = f"a tensor of shape {[*loss.shape]}" if isinstance(loss, Tensor) else None
        what = f"gives {shape or type(loss).__name__}"
    raise ConfigError(
        f"fit: trains models whose model(tokens, targets) is the loss, and {kind} {what}; give"
        " build a module that returns the loss, or train job.model in a loop of your own"
    )
