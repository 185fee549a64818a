"""Adapters on two ranks: ZeRO and a split base have the losses of the unsharded run, context parallelism trains them, and the first rank's save holds all."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.optim.low_bit.shards import local
from fp8cfg.training import memory_measurement
from fp8cfg.training.checkpoint import checkpoint, job_state
from fp8cfg.training.data import run_data
from fp8cfg.training.distributed.world import World
from fp8cfg.training.train_step import train_step
from tests.support import sharded_checkpoints
from tests.support.ranks import on_ranks
from tests.support.small import small

WORDS = ("lora.enabled=true", "precision=bf16_fp8", "optim.lr=0.01", "trainer.micro_batch_size=4")


FSDP = {"delayed": (), "float32": ("precision=fp32",), "MX": ("precision=bf16_mxfp8", "fp8.params=true"), "low-bit moments": ("precision=bf16", "storage.exp_avg=fp8")}
MEASURED = ("precision=bf16_fp8", "precision=bf16")


def run(world: World, folder: Path | None = None, *words: str) -> dict[str, Any]:
    job = fp8cfg.build(small(*WORDS, *words))
    batches, _ = run_data(job.recipe)
    losses = [train_step(job, batches, step, world).loss for step in range(2)]
    if folder:
        sharded_checkpoints.saved(job, world, folder, 2)
        job = fp8cfg.build(job.recipe)
        job_state.restore(job, *checkpoint.load(folder / "step-00000002"), batches)
    losses += [train_step(job, batches, step, world).loss for step in range(2, 4)]
    return {"losses": losses, "owned": len(job.prepared.masters), **{n: local(p).detach() for n, p in job.model.named_parameters() if p.requires_grad}}


def on_two(folder: Path, world: World) -> dict[str, Any]:
    split = {}
    for row, words in FSDP.items():
        saved = folder / row
        saved.mkdir(exist_ok=True)
        split[row] = {"fsdp": run(world, saved, *words, "storage.shard=fsdp"), "none": run(world, None, *words, "storage.shard=none")["losses"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")  # torchrun's, for the plan
        recipes = {words: fp8cfg.compose(["recipe=llama_tiny", "data=tiny", "trainer.micro_batch_size=4", "storage.shard=fsdp", "lora.enabled=true", words]) for words in MEASURED}
        memory = {words: memory_measurement.measure(recipe) for words, recipe in recipes.items()}
    return {"none": run(world, None, "storage.shard=none"), "zero1": run(world, folder), "split": split, "memory": memory,
            "context": run(world, None, "trainer.strategy.context_parallel_size=2", "trainer.devices=2", "trainer.micro_batch_size=8")}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    (folder / "saved").mkdir()
    return on_ranks(2, functools.partial(on_two, folder / "saved"), folder)


@pytest.mark.slow
def test_zero_and_context(two: list[dict[str, Any]]) -> None:
    """Under ZeRO-1 the run is saved and resumed half-way."""
    first, second = two
    assert first["none"]["losses"] == first["zero1"]["losses"] == second["zero1"]["losses"]
    for name in first["none"].keys() - {"owned", "losses"}:
        assert torch.equal(first["none"][name], first["zero1"][name]) and torch.equal(first["zero1"][name], second["zero1"][name]), name
    assert first["zero1"]["owned"] + second["zero1"]["owned"] == first["none"]["owned"] == 28 and second["zero1"]["owned"] < 28
    assert all(abs(a - b) < 0.01 for a, b in zip(first["context"]["losses"], first["none"]["losses"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("row", FSDP)
def test_fsdp_splits_the_base_and_the_adapters(row: str, two: list[dict[str, Any]]) -> None:
    """The losses of the run that is not split, saved and resumed half-way; each rank has half of the adapters' elements."""
    whole = two[0]["none"]
    for found in (rank["split"][row] for rank in two):
        assert found["fsdp"]["losses"] == pytest.approx(found["none"], rel=1e-6)
        assert sum(t.numel() for name, t in found["fsdp"].items() if ".lora." in name) * 2 == sum(t.numel() for name, t in whole.items() if ".lora." in name)


@pytest.mark.slow
@pytest.mark.parametrize("words", MEASURED)
def test_the_plan_of_a_split_base_is_what_is_measured(words: str, two: list[dict[str, Any]]) -> None:
    for found in (dict(rank["memory"][words]) for rank in two):
        for kind in ("weights", "gradients", "moments", "FP8 state"):
            planned, here = found[kind]
            assert here == pytest.approx(planned, rel=0.01, abs=1 << 12), kind
        assert all(0.95 * here <= planned <= 1.1 * here for planned, here in (found["peak"], found["after forward"]))
