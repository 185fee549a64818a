"""Amax reduction groups: delayed scales that ranks share, of all ranks with the same layers or of those with the same samples alone."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.parallel.process_group import World
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from tests.support.rank_runs import in_fp8, resumed
from tests.support.ranks import on_ranks
from tests.support.sharded_checkpoints import saved
from tests.support.small import small

ALONE = "fp8.tp_only_amax_red=true"
LAYOUTS = {  # name -> words on four ranks, ranks that share scales under tp_only_amax_red, and else
    "tensor": ("trainer.strategy.tensor_model_parallel_size=2", [(0, 1), (2, 3)], [(0, 1, 2, 3)]),
    "context": ("trainer.strategy.context_parallel_size=2", [(0, 1), (2, 3)], [(0, 1, 2, 3)]),
    "pipeline": (
        "trainer.strategy.pipeline_model_parallel_size=2",
        [(0,), (1,), (2,), (3,)],
        [(0, 1), (2, 3)],
    ),
}


def job_of(name: str, words: str = ALONE) -> Job:
    return fp8cfg.build(
        small(
            "precision=bf16_fp8",
            LAYOUTS[name][0],
            *words.split(),
            "trainer.devices=4",
            "trainer.micro_batch_size=2",
            "trainer.max_steps=4",
        )
    )


def trained(job: Job, world: World, first: int, last: int) -> dict[str, Any]:
    """Losses of steps `first` to `last`, and the scales after them."""
    batches = run_data(job.recipe)[0]
    losses = [train_step(job, batches, step, world).wait().loss for step in range(first, last)]
    return {"losses": losses, "scales": in_fp8(job)["scales"]}


def on_four(folder: Path, world: World) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "4"
    found: dict[str, Any] = {}
    for name in LAYOUTS:
        job = job_of(name)
        found[name] = trained(job, world, 0, 2)
        saved(job, world, folder / name, 2)
        found[f"{name} rest"] = trained(job, world, 2, 3)
        found[f"{name} resumed"] = trained(resumed(job_of(name), folder / name, 2), world, 2, 3)
        found[f"{name} shared"] = trained(job_of(name, "fp8.reduce_amax=true"), world, 0, 1)
    return found


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(
        4,
        functools.partial(on_four, tmp_path_factory.mktemp("ranks")),
        tmp_path_factory.mktemp("four"),
    )


def sharing(ranks: list[dict[str, torch.Tensor]]) -> list[tuple[int, ...]]:
    """The ranks whose scales are all the same, together."""
    alike = {
        tuple(
            i
            for i, b in enumerate(ranks)
            if a.keys() == b.keys() and all(torch.equal(t, b[k]) for k, t in a.items())
        )
        for a in ranks
    }
    return sorted(alike)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_with_the_same_samples_share_scales(name: str, four: list[dict[str, Any]]) -> None:
    _, apart, together = LAYOUTS[name]
    assert sharing([rank[name]["scales"] for rank in four]) == apart
    assert sharing([rank[f"{name} shared"]["scales"] for rank in four]) == together


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_goes_on_with_its_own_scales(name: str, four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert rank[f"{name} resumed"]["losses"] == rank[f"{name} rest"]["losses"]
        assert all(
            torch.equal(t, rank[f"{name} rest"]["scales"][k])
            for k, t in rank[f"{name} resumed"]["scales"].items()
        )


def test_what_shares_nothing_is_refused() -> None:
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"fp8.tp_only_amax_red=true: has no effect with fp8.reduce_amax=false",
    ):
        small("precision=bf16_fp8", "fp8.tp_only_amax_red=true", "fp8.reduce_amax=false")
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"fp8.tp_only_amax_red=true: has no effect with fp8.scaling=current",
    ):
        small("precision=bf16_fp8_current", "fp8.tp_only_amax_red=true")
