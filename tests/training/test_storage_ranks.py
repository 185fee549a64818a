"""Rows of the low-precision chart on two gloo ranks: owners of whole tensors, what is sent, checkpoints of each layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.parallel.process_group import World
from fp8cfg.training import memory_measurement
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from tests.support import sharded_checkpoints, whole_checkpoints
from tests.support.ranks import on_ranks
from tests.support.small import small
from tests.support.storage_rows import FP8, SCALE, bits, equal

RANKED = {
    "O2": f"{FP8} opt_level=O2",
    "O3": f"{FP8} opt_level=O3",
    "O3, mxfp8": "precision=bf16_mxfp8 opt_level=O3",
    "O2, fp16": f"precision=fp16 opt_level=O2 {SCALE}",
    "O3, summed in float32": f"{FP8} opt_level=O3 storage.comm=fp32",
    "bf16 moments": "precision=bf16 storage.master_weight=fp16_scaled storage.exp_avg=bf16 storage.exp_avg_sq=bf16",
    "float32 masters": "precision=bf16 storage.weight_grad=fp8 storage.comm=fp8",
    "O3, tied": f"{FP8} opt_level=O3 fp8.output_layer=true model.share_embeddings_and_output_weights=true",
    # What FSDP2 does not gather as a rank alone stores it (tests/parallel/test_zero_shards.py has the rest).
    "FP8 weights": "precision=bf16_mxfp8 storage.master_weight=fp16_scaled",
    "FP8 weights outside of FP8": "precision=bf16 storage.weight=fp8 storage.weight_grad=fp8 storage.comm=fp8",
    "momentum": "precision=bf16 storage.weight=fp8 storage.comm=fp8 optim.name=sgd optim.momentum=0.9 optim.lr=0.1 trainer.gradient_clip_val=0.5",
}
SHARDS = ("none", "zero1", "zero2")
RESUMED = [
    ("O2", "none", "zero2"),
    ("O2", "zero1", "zero1"),
    ("O3", "zero2", "zero2"),
    ("O3", "zero2", "none"),
    ("O3", "none", "zero1"),
    ("O3, tied", "zero1", "zero2"),
    ("FP8 weights outside of FP8", "zero1", "none"),
    ("FP8 weights", "none", "zero1"),
    ("FP8 weights", "zero2", "zero2"),
    ("momentum", "none", "zero1"),
]
SENT = ("fp32", "bf16", "fp8")
SPOILED = ("layers.0.mlp.linear_fc1.weight", "final_layernorm.weight")


def ranked_job(*words: str) -> Job:
    return fp8cfg.build(
        small(*words, "model.num_layers=1", "trainer.micro_batch_size=2", "optim.lr=1e-3")
    )


def run(job: Job, world: World, first: int, last: int) -> list[list[float]]:
    batches, _ = run_data(job.recipe)
    return [
        [s.loss, s.grad_norm]
        for s in (train_step(job, batches, step, world).wait() for step in range(first, last))
    ]


def state(job: Job, world: World) -> dict[str, Tensor]:
    return {
        k: t.clone()
        for k, t in {
            **stored_state_dict(job.model),
            **sharded_checkpoints.whole(job, world)["optimizer"],
        }.items()
    }


def spoil(p: Tensor) -> None:
    p.grad.view(-1)[0] = float("inf")


def save(job: Job, world: World, path: Path) -> None:
    sharded_checkpoints.saved(job, world, path, 2)


def load(job: Job, path: Path) -> None:
    assert (
        job_state.restore(
            job, *whole_checkpoints.load(path / "step-00000002"), run_data(job.recipe)[0]
        )
        == 2
    )


def on_two(folder: Path, world: World) -> dict[str, Any]:
    """What a rank has of each row and way to shard it, of runs that were saved and go on, and of gradients sent in each codec."""
    found: dict[str, Any] = {}
    for row, its in RANKED.items():
        for shard in SHARDS:
            job = ranked_job(*its.split(), f"storage.shard={shard}")
            assert not job.prepared.fsdp2, "whole tensors have owners"
            losses = run(job, world, 0, 2)
            save(job, world, folder / f"{row} {shard}")
            world.traffic.clear()
            losses += run(job, world, 2, 3)
            sent = dict(world.traffic.bytes)
            losses += run(job, world, 3, 4)
            kept = [
                sum(t.nbytes for t in held if t.dim())
                for held in (
                    memory_measurement.persistent_tensors(job)["masters"]
                    + memory_measurement.persistent_tensors(job)["moments"],
                    memory_measurement.gradient_tensors(job),
                )
            ]
            found[f"{row} {shard}"] = {
                "losses": losses,
                "sent": sent,
                "kept": kept,
                "state": state(job, world),
                "json": job.optimizer.state_json(),
            }
    for row, before, now in RESUMED:
        job = ranked_job(*RANKED[row].split(), f"storage.shard={now}")
        load(job, folder / f"{row} {before}")
        found[f"{row} {before} {now}"] = {
            "losses": run(job, world, 2, 4),
            "state": state(job, world),
        }
    job = ranked_job(
        "precision=bf16_fp8_block", "fp8.params=true", "opt_level=O3", "storage.shard=zero1"
    )
    load(job, folder / "O3 zero1")
    found["other scaling"] = {k: t.clone() for k, t in stored_state_dict(job.model).items()}
    for shard in SHARDS:
        for name in SPOILED:
            job = ranked_job(*RANKED["O3"].split(), f"storage.shard={shard}")
            run(job, world, 0, 1)
            before = state(job, world)
            if world.rank == 1:
                job.model.get_parameter(name).register_post_accumulate_grad_hook(spoil)
            stepped = train_step(job, run_data(job.recipe)[0], 1, world).wait().stepped
            found[f"{name} {shard}"] = {
                "stepped": stepped,
                "before": before,
                "after": state(job, world),
            }
    for name in SENT:
        job = ranked_job("precision=bf16", f"storage.comm={name}", "storage.shard=none")
        world.traffic.clear()
        found[name] = {"losses": run(job, world, 0, 3), "sent": world.traffic.bytes["gradients"]}
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, functools.partial(on_two, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("row", RANKED)
def test_sharded_runs_have_the_bits_of_the_unsharded_one(
    row: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    _, ranks = two
    whole = ranks[0][f"{row} none"]
    if row != "momentum":  # whose steps are small beside the differences of batches
        assert whole["losses"][-1][0] < whole["losses"][0][0]
    for shard in SHARDS:
        first, second = (found[f"{row} {shard}"] for found in ranks)
        if (row, shard) == (
            "momentum",
            "zero2",
        ):  # whose sums, sent in FP8 from float32, are rounded once less
            assert first["losses"] == second["losses"] != whole["losses"]
            assert [loss for loss, _ in first["losses"]] == pytest.approx(
                [loss for loss, _ in whole["losses"]], rel=1e-3
            )
            continue
        assert (
            first["losses"] == second["losses"] == whole["losses"]
            and first["json"] == second["json"] == whole["json"]
        )
        assert equal(first["state"], whole["state"]), (
            "a checkpoint of the sharded run is that of the unsharded one"
        )
        model = {k: t for k, t in whole["state"].items() if k in second["state"]}
        assert equal({k: t for k, t in second["state"].items() if k in model}, model)
        (state, grads), (other_state, other_grads) = first["kept"], second["kept"]
        share = {"none": (2, 2), "zero1": (1, 2), "zero2": (1, 1)}[shard]
        assert (state + other_state, grads + other_grads) == (
            share[0] * whole["kept"][0],
            share[1] * whole["kept"][1],
        )
        split, other_split = (
            (state, other_state) if shard == "zero1" else (state + grads, other_state + other_grads)
        )
        assert abs(split - other_split) < 0.2 * split
        assert ("weights" in first["sent"]) == (shard != "none")
    stored = row in ("O2", "O3", "O2, fp16")
    sent = {
        shard: sum(found[f"{row} {shard}"]["sent"]["gradients"] for found in ranks)
        for shard in SHARDS
    }
    assert not stored or sent["zero2"] < 0.55 * sent["none"] == 0.55 * sent["zero1"]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "before", "now"), RESUMED)
def test_two_ranks_resume_bit_for_bit_sharded_like_before_or_not(
    row: str, before: str, now: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    whole, resumed = two[1][0][f"{row} none"], two[1][0][f"{row} {before} {now}"]
    assert resumed["losses"] == whole["losses"][2:] == two[1][1][f"{row} {before} {now}"]["losses"]
    assert equal(resumed["state"], whole["state"])


@pytest.mark.slow
@pytest.mark.parametrize("row", ["O2", "O3"])
def test_one_rank_goes_on_from_the_checkpoint_of_two(
    row: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, ranks = two
    job = ranked_job(*RANKED[row].split(), "storage.shard=zero2")
    load(job, folder / f"{row} zero2")
    tensors, _ = whole_checkpoints.load(folder / f"{row} none" / "step-00000002")
    assert equal(
        state(job, World()),
        {k: t for group in ("model", "optimizer", "fp8") for k, t in tensors[group].items()},
    )
    want = [loss for loss, _ in ranks[0][f"{row} none"]["losses"][2:]]
    assert [loss for loss, _ in run(job, World(), 2, 4)] == pytest.approx(want, abs=2e-3)


@pytest.mark.slow
def test_weights_in_another_scaling_are_those_of_their_owners_on_all_ranks(
    two: tuple[Path, list[dict[str, Any]]],
) -> None:
    first, second = (found["other scaling"] for found in two[1])
    assert equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", SPOILED)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    name: str, shard: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    for found in (ranks[f"{name} {shard}"] for ranks in two[1]):
        assert not found["stepped"]
        assert all(
            torch.equal(bits(t), bits(found["after"][k]))
            for k, t in found["before"].items()
            if "amax_history" not in k
        )


@pytest.mark.slow
def test_bytes_on_the_wire_are_those_of_the_comm_column(
    two: tuple[Path, list[dict[str, Any]]],
) -> None:
    sent = {name: two[1][0][name]["sent"] for name in SENT}
    assert (
        sent["fp32"] == 2 * sent["bf16"] and sent["fp8"] < 0.5 * sent["fp32"]
    )  # embeddings and norms stay in float32
    for name in SENT:
        assert [loss for loss, _ in two[1][0][name]["losses"]] == pytest.approx(
            [loss for loss, _ in two[1][0]["fp32"]["losses"]], abs=1e-3
        )
