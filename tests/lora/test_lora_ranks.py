"""Adapters on two ranks: ZeRO has the bits of the unsharded run, context parallelism trains them, and the first rank's save holds all."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.training.checkpoint import checkpoint, job_state
from fp8cfg.training.data import run_data
from fp8cfg.training.distributed.world import World
from fp8cfg.training.train_step import train_step
from tests.support import sharded_checkpoints
from tests.support.ranks import on_ranks
from tests.support.small import small

WORDS = ("lora.enabled=true", "precision=bf16_fp8", "optim.lr=0.01", "trainer.micro_batch_size=4")


def run(world: World, folder: Path | None = None, *words: str) -> dict[str, Any]:
    job = fp8cfg.build(small(*WORDS, *words))
    batches, _ = run_data(job.recipe)
    losses = [train_step(job, batches, step, world).loss for step in range(2)]
    if folder:
        sharded_checkpoints.saved(job, world, folder, 2)
        job = fp8cfg.build(job.recipe)
        job_state.restore(job, *checkpoint.load(folder / "step-00000002"), batches)
    losses += [train_step(job, batches, step, world).loss for step in range(2, 4)]
    return {"losses": losses, "owned": len(job.prepared.masters), **{n: p.detach() for n, p in job.model.named_parameters() if p.requires_grad}}


def on_two(folder: Path, world: World) -> dict[str, Any]:
    return {"none": run(world, None, "storage.shard=none"), "zero1": run(world, folder),
            "context": run(world, None, "trainer.strategy.context_parallel_size=2", "trainer.devices=2", "trainer.micro_batch_size=8")}


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """Under ZeRO-1 the run is saved and resumed half-way."""
    (tmp_path / "saved").mkdir()
    first, second = on_ranks(2, functools.partial(on_two, tmp_path / "saved"), tmp_path)
    assert first["none"]["losses"] == first["zero1"]["losses"] == second["zero1"]["losses"]
    for name in first["none"].keys() - {"owned", "losses"}:
        assert torch.equal(first["none"][name], first["zero1"][name]) and torch.equal(first["zero1"][name], second["zero1"][name]), name
    assert first["zero1"]["owned"] + second["zero1"]["owned"] == first["none"]["owned"] == 28 and second["zero1"]["owned"] < 28
    assert all(abs(a - b) < 0.01 for a, b in zip(first["context"]["losses"], first["none"]["losses"], strict=True))
