"""Adapters where ranks share matrices or layers: the losses of one rank, and one file of whole adapters."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.communication import step_traffic
from fp8cfg.planning.layout import stage_parts
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from tests.support import sharded_checkpoints, whole_checkpoints
from tests.support.ranks import on_ranks
from tests.support.small import small

WORDS = (
    "task=lora",
    "precision=fp32",
    "data=tiny",
    "model.num_layers=4",
    "model.num_query_groups=2",
    "optim.lr=0.01",
    "optim.warmup_steps=0",
    "trainer.micro_batch_size=2",
)
TENSOR = "trainer.strategy.tensor_model_parallel_size=2"
PIPELINE = "trainer.strategy.pipeline_model_parallel_size=2"
SEQUENCE = "trainer.strategy.sequence_parallel=true"
HEAD = "lora.targets=[q_proj,o_proj,up_proj,lm_head]"
LAYOUTS = {
    "tensor": (TENSOR,),
    "sequence": (TENSOR, SEQUENCE),
    "tensor fsdp": (TENSOR, "storage.shard=fsdp"),
    "tensor full": (TENSOR, SEQUENCE, "model.recompute_granularity=full"),
    "tensor fp8": (TENSOR, "precision=bf16_fp8_current"),
    "tensor head": (TENSOR, HEAD),
    "tensor last": (TENSOR, SEQUENCE, "lora.targets=[layers.2.mlp.linear_fc2,layers.3.*.o_proj]"),
    "pipeline": (PIPELINE,),
    "pipeline zero1": (PIPELINE, "storage.shard=zero1"),
    "pipeline fsdp": (PIPELINE, "storage.shard=fsdp"),
    "pipeline tied": (PIPELINE, "model.share_embeddings_and_output_weights=true"),
    "pipeline head": (PIPELINE, HEAD),
    "pipeline interleaved": (
        PIPELINE,
        "trainer.strategy.virtual_pipeline_model_parallel_size=2",
    ),
}
STEPS, SAVED = 4, 2


def words_of(name: str, split: bool) -> list[str]:
    """The words of a layout, or the same ones on one rank."""
    words = [word for word in LAYOUTS[name] if split or "strategy" not in word]
    if not split:
        words = ["storage.shard=none" if "shard" in word else word for word in words]
    return [*WORDS, *words, *(["trainer.devices=2"] if split else [])]


def steps(job: Job, world: World, first: int, last: int) -> list[list[float]]:
    """Loss and gradient norm of each step."""
    batches = run_data(job.recipe)[0]
    every = [train_step(job, batches, step, world).wait() for step in range(first, last)]
    return [[each.loss, each.grad_norm] for each in every]


def split_run(name: str, world: World, folder: Path) -> dict[str, Any]:
    """A run that is saved half-way, with what it sent, and what was planned, in the last step."""
    job = fp8cfg.build(small(*words_of(name, True)))
    found = steps(job, world, 0, SAVED)
    sharded_checkpoints.saved(job, world, folder / name, SAVED)
    found += steps(job, world, SAVED, STEPS - 1)
    world.traffic.clear()
    found += steps(job, world, STEPS - 1, STEPS)
    stage = 0 if job.prepared.pipeline is None else job.prepared.pipeline.rank
    part = stage_parts(job.recipe, 2)[stage]
    planned = step_traffic(job.recipe, part, job.choice.backend)
    return {
        "steps": found,
        "sent": sum(world.traffic.bytes.values()),
        "planned": sum(each.bytes for each in planned),
    }


def on_two(folder: Path, world: World) -> dict[str, Any]:
    return {name: split_run(name, world, folder) for name in LAYOUTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return on_ranks(2, functools.partial(on_two, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_as_one(name: str, two: list[dict[str, Any]], folder: Path) -> None:
    """The same losses and norms, also on one rank after the checkpoint of two."""
    job = fp8cfg.build(small(*words_of(name, False)))
    whole = steps(job, World(), 0, STEPS)
    assert_close = functools.partial(_assert_close, in_fp8="fp8" in name)
    for rank in two:
        assert_close(rank[name]["steps"], whole)
        assert rank[name]["sent"] == pytest.approx(rank[name]["planned"], rel=0.02)
    resumed = fp8cfg.build(small(*words_of(name, False)))
    batches = run_data(resumed.recipe)[0]
    job_state.restore(resumed, *whole_checkpoints.load(folder / name / f"step-{SAVED:08}"), batches)
    assert_close(steps(resumed, World(), SAVED, STEPS), whole[SAVED:])


def _assert_close(found: list[list[float]], whole: list[list[float]], in_fp8: bool) -> None:
    """Losses and norms of float32, or losses alone of FP8, whose sums are rounded in another order."""
    one, other = torch.tensor(found), torch.tensor(whole)
    if in_fp8:
        torch.testing.assert_close(one[:, 0], other[:, 0], rtol=1e-2, atol=0)
    else:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
