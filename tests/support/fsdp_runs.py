"""Jobs whose weights FSDP2 splits and the same ones whole: their words, some steps, a checkpoint after the first."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.parallel.process_group import World
from fp8cfg.training.data import run_data
from fp8cfg.training.evaluation import evaluate, validation_batches
from fp8cfg.training.step import train_step
from tests.support import rank_runs, sharded_checkpoints
from tests.support.small import small

FSDP, WHOLE, PLAIN = "storage.shard=fsdp", "storage.shard=none", "fp8.params=false"
EVERYWHERE = "fp8.high_precision_at_start=0 fp8.high_precision_at_end=0"
CURRENT = f"precision=bf16_fp8_current {PLAIN} {EVERYWHERE}"
TORCHAO = f"{CURRENT} backend=torchao"
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
SAVED, STEPS = 1, 3
"""Steps of a run before it is saved, and in all."""
NOT_CLIPPED = (
    "trainer.gradient_clip_val=0"  # norms are added up in another order, and nothing else is
)


def job_of(*words: str) -> Job:
    return fp8cfg.build(small("trainer.micro_batch_size=4", *" ".join(words).split()))


def run(job: Job, world: World, first: int, last: int) -> list[list[float]]:
    batches, _ = run_data(job.recipe)
    return [
        [s.loss, s.grad_norm]
        for s in (train_step(job, batches, step, world).wait() for step in range(first, last))
    ]


def held_out(job: Job, world: World) -> float:
    return evaluate(job, validation_batches(job.recipe, run_data(job.recipe)[1], world), world)


def save(job: Job, world: World, path: Path) -> None:
    sharded_checkpoints.saved(job, world, path, SAVED)


def load(job: Job, path: Path) -> Job:
    return rank_runs.resumed(job, path, SAVED)
