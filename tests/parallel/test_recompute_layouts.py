"""Selective recomputation on two gloo ranks: no number changes under any layout, and what is kept is what was planned."""

from __future__ import annotations

import os
from typing import Any

import pytest

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.parallel.process_group import World
from tests.parallel.test_tensor import sent
from tests.support.measured_memory import measured
from tests.support.rank_runs import trained
from tests.support.ranks import on_ranks
from tests.support.small import small

STRATEGY = "trainer.strategy."
SP = f"{STRATEGY}tensor_model_parallel_size=2 {STRATEGY}sequence_parallel=true"
TP, CP, PP = (
    f"{STRATEGY}{name}_parallel_size=2" for name in ("tensor_model", "context", "pipeline_model")
)
LAYOUTS = {
    "sequence": f"precision=bf16 {SP}",
    "sequence, delayed": f"precision=bf16_fp8 {SP}",
    "tensor, current": f"precision=bf16_fp8_current {TP}",
    "context": f"precision=bf16 {CP} storage.shard=none",
    "context, delayed": f"precision=bf16_fp8 {CP}",
    "pipeline, delayed": f"precision=bf16_fp8 {PP}",
    "fsdp": "precision=bf16 storage.shard=fsdp",
    "fsdp, delayed": "precision=bf16_fp8 storage.shard=fsdp",
    "zero1": "precision=bf16",
    "norms after, sequence": f"precision=bf16 {SP} model.layernorm_placement=both model.qk_layernorm=hidden",
}
MEASURED = ("sequence", "sequence, delayed", "context", "fsdp")
WIDE = ("model.hidden_size=256", "model.ffn_hidden_size=512")


def job_of(name: str, recompute: str, *words: str) -> Job:
    micro = 4 if "fsdp" in name or "zero" in name else 8 if "pipeline" not in name else 2
    return fp8cfg.build(
        small(
            *LAYOUTS[name].split(),
            "trainer.devices=2",
            f"trainer.micro_batch_size={micro}",
            f"model.recompute_granularity={recompute}",
            *words,
        )
    )


def on_two(world: World) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "2"
    found: dict[str, Any] = {}
    for name in LAYOUTS:
        for recompute in ("none", "selective"):
            found[f"{name} {recompute}"] = trained(job_of(name, recompute), world, 0, 3)
    for name in MEASURED:
        for recompute in ("none", "selective"):
            found[f"{name} {recompute} memory"] = measured(
                job_of(name, recompute, *WIDE).recipe, world, 0.09
            )
    for precision in ("bf16", "bf16_fp8"):
        found[f"{precision} sent"] = sent(
            f"precision={precision} {SP} model.recompute_granularity=selective", world
        )
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, on_two, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_number_changes(name: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        plain, selective = (rank[f"{name} {recompute}"] for recompute in ("none", "selective"))
        for key in ("losses", "norms", "val", "coverage"):
            assert plain.get(key) == selective.get(key), key
        scales = plain.get("scales", {})
        assert all(scale.equal(selective["scales"][key]) for key, scale in scales.items()) and bool(
            scales
        ) == ("delayed" in name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_planned_bytes_are_the_measured_ones(name: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        plain, selective = (
            rank[f"{name} {recompute} memory"] for recompute in ("none", "selective")
        )
        for found in (plain, selective):
            for kind, bound in {"after forward": 0.05, "peak": 0.1}.items():
                if kind in found:
                    planned, here = found[kind]
                    assert here == pytest.approx(planned, rel=bound), kind
        assert selective["after forward"][1] < 0.85 * plain["after forward"][1], "it saves little"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16_fp8"])
def test_inputs_that_are_gathered_again_are_counted(
    precision: str, two: list[dict[str, Any]]
) -> None:
    counted, handed = two[0][f"{precision} sent"]
    assert counted == handed > 0
