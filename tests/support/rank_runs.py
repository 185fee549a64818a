"""Runs on ranks: some steps of a job and what is compared of them, with a checkpoint on the way, and a job that goes on from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state
from fp8cfg.checkpoint.load import open_checkpoint
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.training import memory_measurement
from fp8cfg.training.data import run_data
from fp8cfg.training.evaluation import evaluate, validation_batches
from fp8cfg.training.step import StepResult, train_step
from tests.support import sharded_checkpoints

SAVED, STEPS, LONG = 1, 3, 8
"""Steps before the evaluation and the checkpoint of a run, of a run (the third has moments and scales of two), and of the float32 runs that
are held to one rank for longest."""


def trained(job: Job, world: World, first: int = 0, last: int = STEPS) -> dict[str, Any]:
    """Losses and norms of steps `first` to `last`, the validation loss in their midst where it is asked for, and in FP8 coverage and scales."""
    batches, held_out = run_data(job.recipe)
    steps, val = list[StepResult](), list[float]()
    for step in range(first, last):
        if step == SAVED and job.recipe.trainer.val_check_interval:
            val.append(
                evaluate(
                    job,
                    validation_batches(job.recipe, held_out, world),
                    world,
                    masked=held_out.masked,
                )
            )
        steps.append(train_step(job, batches, step, world).wait())
    found = {
        "losses": [s.loss for s in steps],
        "norms": [s.grad_norm for s in steps],
        "stepped": [s.stepped for s in steps],
        "val": val,
    }
    return found | in_fp8(job)


def saved(job: Job, world: World, folder: Path, last: int = STEPS) -> dict[str, Any]:
    """`trained`, with a checkpoint on the way in `folder`."""
    start = trained(job, world, 0, SAVED)
    sharded_checkpoints.saved(job, world, folder, SAVED)
    rest = trained(job, world, SAVED, last)
    return rest | {key: [*start[key], *rest[key]] for key in ("losses", "norms", "stepped")}


def in_fp8(job: Job) -> dict[str, Any]:
    """Coverage and scales of a job in FP8, of any other nothing."""
    if not job.recipe.fp8.enabled:
        return {}
    return {
        "coverage": str(job.prove()),
        "scales": {k: v for k, v in job.state_dict().items() if k.endswith("fp8_scale")},
    }


def resumed(job: Job, folder: Path, step: int = SAVED) -> Job:
    """`job` as the checkpoint of `step` in `folder` has it."""
    saved = open_checkpoint(RunFiles.at(folder), f"step-{step:08d}")
    assert job_state.restore(job, *saved, run_data(job.recipe)[0]) == step
    return job


def measured(ranks: int, words: str) -> dict[str, tuple[int, int]]:
    """Planned and measured bytes of llama_tiny, two layers of it, on so many ranks."""
    return memory_measurement.measure_memory(
        fp8cfg.compose(
            [
                "recipe=llama_tiny",
                "data=tiny",
                "model.num_layers=2",
                "trainer.micro_batch_size=2",
                f"trainer.devices={ranks}",
                *words.split(),
            ]
        )
    )


def takes_what_is_planned(measured: list[dict[str, tuple[int, int]]]) -> None:
    """The rank of these that takes most of what stays, and at the peak of the passes, takes what is planned."""
    most = {
        kind: tuple(max(found[kind][i] for found in measured) for i in (0, 1))
        for kind in measured[0]
    }
    off = {
        kind: most[kind]
        for kind, bound in memory_measurement.BOUNDS.items()
        if kind in most and most[kind][1] != pytest.approx(most[kind][0], rel=bound)
    }
    assert not off, off
    assert most["peak"][1] > 0, "something is measured"
