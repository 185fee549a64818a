"""One shard of FSDP2's on each rank (storage.shard=none) in a loop of one's own: gradients are summed, state dicts are plain and go on with one rank, with two, and from either to the other, and weights are averaged."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.parallel.process_group import World
from fp8cfg.training.data import run_data
from tests.support.ranks import on_ranks
from tests.support.small import small

ROWS = {
    "FP8 weights": "precision=bf16_fp8",
    "codec": "precision=bf16 storage.weight=fp8",
    "LoRA": "precision=bf16 lora.enabled=true",
    "momentum": "precision=fp32 optim.name=sgd optim.momentum=0.9",
    "low-bit moments": "precision=bf16 storage.exp_avg=fp8_block storage.exp_avg_sq=fp8_block",
}
SAVED, STEPS, SHARES = 1, 3, 2
"""Steps before state is saved, steps in all, and microbatches of a step over all ranks."""


def job_of(row: str) -> Job:
    return fp8cfg.build(
        small(
            *ROWS[row].split(),
            "storage.shard=none",
            "trainer.micro_batch_size=4",
            "trainer.gradient_clip_val=0",
        )
    )


def steps(job: Job, world: World, first: int, last: int) -> list[list[float]]:
    """The mean loss and the gradient norm of each."""
    (batches, _), found = run_data(job.recipe), []
    for step in range(first, last):
        job.optimizer.zero_grad()
        total = torch.zeros(())
        for i in range(count := SHARES // world.size):
            with job.autocast():
                loss = job.model(*batches.batch(step, world.rank, world.size, i, count))
                job.backward(loss, SHARES)
            total += loss.detach() / SHARES
        job.sum_gradients()
        job.optimizer.step()
        found.append([world.sum(total).item(), job.optimizer.grad_norm])
    return found


def goes_on(folder: Path, world: World) -> dict[str, Any]:
    """Of each row the steps, those after the state of so many ranks, where it is there, the loss of an average, and the kinds of tensors of state."""
    found: dict[str, Any] = {}
    for row in ROWS:
        job = job_of(row)
        losses = steps(job, world, 0, SAVED)
        state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        kinds = {
            type(t)
            for t in (
                *state["model"].values(),
                *state["optimizer"]["tensors"].values(),
                *state["optimizer"].get("fp8", {}).values(),
            )
        }
        if world.first:
            torch.save(state, folder / f"{row} {world.size}")
        average = fp8cfg.averaged(job, 0.5)
        losses += steps(job, world, SAVED, STEPS)
        average.update()
        if world.size > 1:
            with pytest.raises(
                fp8cfg.ConfigError,
                match=r"^DistributedDataParallel: FSDP2 shards the parameters of this job's model and sums their gradients",
            ):
                torch.nn.parallel.DistributedDataParallel(job.model)
            with pytest.raises(
                TypeError,
                match=r"storage\.shard=none: FSDP2 manages its parameters; use fp8cfg\.averaged\(job\) for an average",
            ):
                copy.deepcopy(job.model)
        found[row] = {
            "losses": losses,
            "fsdp2": job.prepared.fsdp2,
            "plain": kinds == {torch.Tensor},
            "average": average.model(*run_data(job.recipe)[0].batch(0)).item(),
        }
        for ranks in (1, 2):
            if (path := folder / f"{row} {ranks}").exists():
                job, saved = job_of(row), torch.load(path, weights_only=True)
                job.model.load_state_dict(saved["model"])
                job.optimizer.load_state_dict(saved["optimizer"])
                found[row][f"from {ranks}"] = steps(job, world, SAVED, STEPS)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("states")
    goes_on(folder, World())
    first, second = on_ranks(2, functools.partial(goes_on, folder), tmp_path_factory.mktemp("two"))
    return {"first": first, "second": second, "one": goes_on(folder, World())}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_two_ranks_with_a_shard_each_are_one_rank_with_all_microbatches(
    row: str, ranks: dict[str, Any]
) -> None:
    one, first, second = ranks["one"][row], ranks["first"][row], ranks["second"][row]
    assert first["fsdp2"] and not one["fsdp2"] and first == second | {"average": first["average"]}
    assert first["losses"] == one["losses"] and first["average"] == one["average"]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_state_dict_goes_on_with_any_number_of_ranks(row: str, ranks: dict[str, Any]) -> None:
    for found in (ranks["one"][row], ranks["first"][row]):
        assert found["plain"] and found["from 1"] == found["from 2"] == found["losses"][SAVED:]
