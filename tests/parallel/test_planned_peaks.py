"""Planned peaks of nineteen layouts of four gloo ranks, against measured ones. One run of the ranks measures them all.

python -m pytest -rP tests/parallel/test_planned_peaks.py          # prints them
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import fp8cfg
from fp8cfg.parallel.process_group import World
from tests.support.measured_memory import measured
from tests.support.ranks import on_ranks

STRATEGY = "trainer.strategy."
TP2, TP4 = (f"{STRATEGY}tensor_model_parallel_size={n}" for n in (2, 4))
CP2, CP4 = (f"{STRATEGY}context_parallel_size={n}" for n in (2, 4))
PP2, PP4 = (f"{STRATEGY}pipeline_model_parallel_size={n}" for n in (2, 4))
VP2 = f"{STRATEGY}virtual_pipeline_model_parallel_size=2"
SP = f"{STRATEGY}sequence_parallel=true"
GROUPS = f"{STRATEGY}data_parallel_replicate_size=2"
FSDP = "storage.shard=fsdp"
SELECTIVE, FULL = (f"model.recompute_granularity={name}" for name in ("selective", "full"))

LAYOUTS = (
    f"bf16 {TP4} {SP}",
    f"bf16_fp8 {TP4} {SP}",
    f"bf16_fp8 {TP2}",
    f"bf16_fp8 {TP2} {SP} {SELECTIVE}",
    f"bf16_fp8 {TP4} {SP} {FULL}",
    f"bf16_fp8 {TP2} {SP} {CP2}",
    f"bf16 {CP4}",
    f"bf16_fp8 {CP2} {FSDP}",
    f"bf16_fp8 {CP4} {SELECTIVE}",
    f"bf16 {PP4}",
    f"bf16_fp8 {PP2} {TP2} {SP}",
    f"bf16_fp8 {PP2} {VP2}",
    f"bf16 {PP2} {CP2}",
    f"bf16 {FSDP}",
    f"bf16_fp8 {FSDP} {GROUPS} {SELECTIVE}",
    "bf16 storage.shard=zero2",
    f"bf16_fp8_current storage.shard=none {FULL}",
    f"bf16_fp8_block {TP2} {SP} {FSDP}",
    f"bf16_mxfp8 {TP2} {SP} {SELECTIVE}",
)
SHAPE = (
    "recipe=llama_tiny",
    "data=tiny",
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=768",
    "model.num_attention_heads=8",
    "model.num_query_groups=4",
    "model.seq_length=256",
    "trainer.micro_batch_size=2",
    "trainer.global_batch_size=16",
    "trainer.devices=4",
)


def on_four(world: World) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "4"
    return {
        layout: measured(fp8cfg.compose([*SHAPE, *f"precision={layout}".split()]), world, 0.05)
        for layout in LAYOUTS
    }


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(4, on_four, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_planned_peak_is_the_measured_one(layout: str, four: list[dict[str, Any]]) -> None:
    """Of each pipeline stage, on its rank that takes most: context ranks differ by the keys that they keep."""
    most: dict[int, int] = {}
    for rank in four:
        planned, here = rank[layout]["peak"]
        most[planned] = max(most.get(planned, 0), here)
    for planned, here in most.items():
        print(f"{layout}: planned / measured = {planned / here:.3f}")
        assert planned == pytest.approx(here, rel=0.05)
