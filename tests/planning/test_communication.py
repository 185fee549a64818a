"""Planned communication against what gloo ranks hand to torch's collectives: bytes by axis of the layout."""

from __future__ import annotations

import os
from typing import Any

import pytest

import fp8cfg
from fp8cfg.parallel import quantized_allreduce
from fp8cfg.parallel.process_group import SENT, World
from fp8cfg.planning import zero_memory
from fp8cfg.planning.communication import Axis, merge_traffic, step_traffic
from fp8cfg.planning.layout import stage_parts
from fp8cfg.planning.peak_memory import planned_backend
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from tests.support.ranks import on_ranks
from tests.support.small import small
from tools.layout_proof.collective_counter import CollectiveCounter
from tools.layout_proof.comparison import TOLERANCE, planned_sent, wrong_axes

STRATEGY = "trainer.strategy."
TP = f"{STRATEGY}tensor_model_parallel_size=2"
WIDE = "model.hidden_size=256"
"""Scales of rows are 4 bytes for each, which a model that is less wide does not make up for."""
LAYOUTS = {
    "TP2": f"precision=bf16_fp8_current {TP} {STRATEGY}sequence_parallel=true",
    "TP2 of bf16 weights": f"precision=bf16_fp8_current fp8.params=false model.recompute_granularity=full {TP}",
    "TP2 of low-bit moments and gradients": f"precision=bf16_fp8_te_fused_adam storage.weight_grad=fp8 {TP}",
    "TP2 of rows": f"precision=bf16_fp8_current fp8.granularity=row {WIDE} {TP} {STRATEGY}sequence_parallel=true",
    "TP2 of rows of bf16 weights": f"precision=bf16_fp8_current fp8.granularity=row fp8.params=false model.recompute_granularity=full {WIDE} {TP}",
    "TP2 of nvfp4": f"precision=bf16_nvfp4 fp8.override_linear_precision.wgrad=true {TP}",
    "TP2 of nvfp4, plain": f"precision=bf16_nvfp4 fp8.params=false fp8.enable_2d_quantization=false fp8.output_layer=true model.vocab_size=288 storage.shard=fsdp {TP}",
    "TP2 of current, gathered": f"precision=bf16_fp8_current storage.shard=fsdp storage.weight_grad=fp8 storage.accumulate=stored {TP}",
    "CP2": f"precision=bf16_fp8 {STRATEGY}context_parallel_size=2",
    "PP2": f"precision=bf16_fp8 {STRATEGY}pipeline_model_parallel_size=2 model.share_embeddings_and_output_weights=true",
    "FSDP2": "precision=bf16_fp8 storage.shard=fsdp",
    "FSDP2 of blocks": "precision=bf16_fp8_block storage.shard=fsdp model.ffn_hidden_size=256",
    "FSDP2 of stored gradients": "precision=bf16 storage.weight_grad=fp8 storage.accumulate=stored storage.shard=fsdp",
    "FSDP2 by torchao": "precision=bf16_fp8_current fp8.params=false fp8.high_precision_at_start=0 fp8.high_precision_at_end=0 "
    "storage.shard=fsdp backend=torchao",
    "zero1": "precision=bf16_fp8",
    "zero2": "precision=bf16 storage.shard=zero2",
    "none": "precision=bf16 storage.shard=none",
    "none in bf16": "precision=bf16_fp8 storage.shard=none storage.comm=bf16",
    "none of rounded gradients": "precision=bf16 storage.shard=none storage.weight_grad=bf16",
    "none of blocks": "precision=bf16_fp8_block fp8.params=true storage.shard=none storage.exp_avg=fp8 storage.exp_avg_sq=fp16_scaled storage.weight_grad=fp8",
    "none, LoRA": "precision=bf16_fp8 task=lora storage.shard=none",
    "owners": "precision=bf16_fp8 storage.shard=zero1 storage.master_weight=fp16_scaled",
    "owners of rows": f"{WIDE} precision=bf16_fp8_current fp8.params=true fp8.granularity=row storage.shard=zero1 storage.master_weight=fp16_scaled",
    "owners of nvfp4": "precision=bf16_nvfp4 fp8.params=true storage.shard=zero1 storage.master_weight=fp16_scaled",
    "scales": "precision=bf16_fp8 opt_level=O2 storage.shard=zero1",
    "fp16 beside FP8": "precision=bf16_fp8 fp8.params=false storage.weight=fp16_scaled",
    "FP8 without operands": "precision=bf16 storage.weight=fp8 storage.shard=zero2",
    "two hops": "precision=bf16 opt_level=O2",
    "LoRA": "precision=bf16_fp8 task=lora storage.shard=zero2",
    "LoRA owners": "precision=bf16_fp8 storage.comm=fp8 task=lora storage.shard=zero2",
}


def words_of(name: str) -> list[str]:
    return [*LAYOUTS[name].split(), "trainer.micro_batch_size=2", "trainer.devices=2"]


def sent(world: World) -> dict[str, Any]:
    """What the second step of each layout sends, as counted and as planned, and what its message says."""
    os.environ["WORLD_SIZE"] = "2"
    found: dict[str, Any] = {}
    for name in LAYOUTS:
        job = fp8cfg.build(small(*words_of(name)))
        data = run_data(job.recipe)[0]
        train_step(job, data, 0, world)
        SENT.clear()
        with CollectiveCounter(job.recipe.trainer.strategy) as counter:
            train_step(job, data, 1, world)
        parts = stage_parts(job.recipe, 2)
        plan = planned_sent(
            job.recipe,
            parts[world.rank % len(parts)],
            job.choice.backend,
            world.rank % parts[0].shards,
        )
        found[name] = {
            "counted": dict(counter.sent),
            "planned": plan,
            "message": dict(SENT.bytes),
        }
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, sent, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_sends_what_is_planned(name: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        counted, planned = rank[name]["counted"], rank[name]["planned"]
        assert planned and not wrong_axes(counted, planned), (counted, planned)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plan_is_what_training_says_that_it_sent(name: str, two: list[dict[str, Any]]) -> None:
    recipe = small(*words_of(name))
    for number, rank in enumerate(two):
        parts = stage_parts(recipe, 2)
        kinds: dict[str, int] = {}
        for one in step_traffic(
            recipe, parts[number % len(parts)], planned_backend(recipe), number % parts[0].shards
        ):
            kinds[one.content] = kinds.get(one.content, 0) + one.bytes
        message = rank[name]["message"]
        few = TOLERANCE * sum(message.values())  # scales, and gradients of norms
        message = {kind: size for kind, size in message.items() if size > few}
        assert kinds == pytest.approx(message, rel=TOLERANCE)


def test_a_plan_says_what_the_rank_sends_that_sends_most() -> None:
    plan = fp8cfg.plan(fp8cfg.compose(["recipe=llama_70b", "precision=bf16_fp8"]), gpu="h100")
    most = max(plan.ranks, key=lambda rank: rank.sent_bytes)
    text = str(plan).split("sent by a rank in a step")[1].split("\n\n")[0]
    assert (
        f"total, {most.part.name}" in text
        and "pipeline: stage outputs" in text
        and "tensor: activations" in text
    )
    assert plan.data()["ranks"][0]["sent"][0].keys() == {"axis", "what", "bytes"}
    assert "sent by" not in str(fp8cfg.plan(fp8cfg.compose(["recipe=llama_tiny"])))


def test_four_bits_are_planned_over_split_matrices() -> None:
    recipe = fp8cfg.compose(["recipe=llama_70b", "precision=bf16_nvfp4", "trainer.num_nodes=8"])
    plan = fp8cfg.plan(recipe, gpu="b200", gpus=64)
    assert (
        not plan.problems
        and not plan.refusals
        and plan.gpu
        and plan.widest.total <= plan.gpu.memory
    )


def test_bytes_on_a_ring() -> None:
    assert zero_memory.MESSAGE == quantized_allreduce.MESSAGE
    axis = Axis("data", 4)
    every = [
        *axis.all_reduce("gradients", 400, 2),
        *axis.all_gather("weights", 100),
        *axis.reduce_scatter("gradients", 100),
    ]
    assert [each.bytes for each in every] == [1200, 300, 300]
    assert not [*Axis("data", 1).all_reduce("gradients", 400)]
    assert [(each.content, each.bytes, each.messages) for each in merge_traffic(every)] == [
        ("gradients", 1500, 3),
        ("weights", 300, 1),
    ]
