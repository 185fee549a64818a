"""Jobs of a pipeline of four layers, and single steps of them: what stages send, sum and gather, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.parallel.process_group import SENT, World
from fp8cfg.planning.layout import stage_parts
from fp8cfg.training import memory_measurement
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from tests.support import rank_runs
from tests.support.collective_events import Events
from tests.support.small import small
from tests.support.traced import trace_model
from tools.layout_proof.collective_counter import CollectiveCounter
from tools.layout_proof.comparison import planned_sent


def job_of(words: str, pipeline: int, ranks: int) -> Job:
    micro = 2 if ranks in (1, pipeline) or "tensor" in words or "context" in words else 1
    job = fp8cfg.build(
        small(
            "model.num_layers=4",
            *words.split(),
            f"trainer.micro_batch_size={micro}",
            f"trainer.devices={ranks}",
            f"trainer.max_steps={rank_runs.LONG}",
            f"trainer.strategy.pipeline_model_parallel_size={pipeline}",
        )
    )
    if job.recipe.trainer.compile == "on":
        trace_model(job)
    return job


def sent(job: Job, world: World) -> list[int]:
    """Bytes between stages that a step counts, and those that are handed to point-to-point operations."""
    handed, isend = [0], torch.distributed.isend

    def counted(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        handed[0] += t.nbytes
        return isend(t, *args, **kwargs)

    train_step(job, run_data(job.recipe)[0], 0, world)  # which also votes, a number each
    SENT.clear()
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            patch.setattr(module, "isend", counted)
        train_step(job, run_data(job.recipe)[0], 1, world)
    return [SENT.bytes["stage outputs"], handed[0]]


def sums(words: str, world: World) -> dict[str, Any]:
    """The sums of gradients of a step over two data-parallel ranks, and each time that a chunk of layers is back; what it sends, as counted and
    as planned."""
    job, events = job_of(words, 2, 4), Events()
    batches, rank = run_data(job.recipe)[0], job.prepared.pipeline.rank
    for chunk in job.prepared.pipeline.chunks:
        say_back(job.model.get_submodule(f"layers.{chunk[0]}"), events, str(chunk[0]))
    train_step(job, batches, 0, world)
    events.found.clear()
    with CollectiveCounter(job.recipe.trainer.strategy) as counter, events:
        train_step(job, batches, 1, world)
    plan = planned_sent(
        job.recipe, stage_parts(job.recipe, 4)[rank], job.choice.backend, world.rank % 2
    )
    return {
        "events": [
            name
            for name, size in events.found
            if name.isdecimal() or (name == "all-reduce" and size > 1 << 10)
        ],
        "counted": dict(counter.sent),
        "planned": plan,
    }


def say_back(layer: torch.nn.Module, events: Events, name: str) -> None:
    """Let `events` have the `name` of `layer` each time that it has gone back."""

    def enters(module: torch.nn.Module, args: Any) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: events.found.append((name, 0)))

    layer.register_forward_pre_hook(enters)


def broken_off(words: str, world: World) -> list[float]:
    """The losses of two steps, with an error on all ranks before the passes of the second."""
    job = job_of(words, 2, 4)
    losses = [train_step(job, run_data(job.recipe)[0], 0, world).wait().loss]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8cfg.training.step.run_pipeline", None)
        with pytest.raises(TypeError):
            train_step(job, run_data(job.recipe)[0], 1, world)
    return [*losses, train_step(job, run_data(job.recipe)[0], 1, world).wait().loss]


def sharded(words: str, world: World) -> dict[str, Any]:
    """Messages of a step of stages that FSDP2 shards over two ranks each, and planned and measured bytes."""
    job = job_of(words, 2, 4)
    assert job.prepared.fsdp2
    train_step(job, run_data(job.recipe)[0], 0, world)
    SENT.clear()
    train_step(job, run_data(job.recipe)[0], 1, world)
    return {
        "messages": dict(SENT.messages),
        "memory": memory_measurement.measure_memory(job.recipe),
    }
