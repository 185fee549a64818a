"""The reserve that a plan keeps on a GPU for the CUDA context, NCCL's buffers and fragmentation."""

from __future__ import annotations

import pytest

import fp8cfg
from fp8cfg.planning.plan_report import PlanReport
from fp8cfg.planning.reserve import COMMUNICATOR, CONTEXT, PAIR, communicators

STRATEGY = "trainer.strategy."
LAYOUTS = {
    "": (1, []),
    " trainer.devices=2": (2, [2]),
    f" trainer.devices=4 {STRATEGY}tensor_model_parallel_size=2": (4, [2, 2, 4]),
    f" trainer.devices=4 {STRATEGY}context_parallel_size=4": (4, [4]),
    f" trainer.devices=8 {STRATEGY}context_parallel_size=2": (8, [2, 8]),
    f" trainer.devices=8 {STRATEGY}pipeline_model_parallel_size=2"
    f" {STRATEGY}tensor_model_parallel_size=2 {STRATEGY}context_parallel_size=2": (8, [2, 2, 2, 8]),
    f" trainer.devices=8 storage.shard=fsdp {STRATEGY}data_parallel_replicate_size=2": (
        8,
        [4, 2, 8],
    ),
}


def planned(words: str) -> PlanReport:
    recipe = fp8cfg.compose(
        f"recipe=llama_tiny trainer.micro_batch_size=1 trainer.global_batch_size=8{words}".split()
    )
    return fp8cfg.plan(recipe, "h100")


@pytest.mark.parametrize("words", LAYOUTS)
def test_there_is_a_communicator_for_each_axis_and_for_all_ranks(words: str) -> None:
    ranks, expected = LAYOUTS[words]
    plan = planned(words)
    part = plan.widest.part
    assert sorted(communicators(plan.recipe, part, ranks)) == sorted(expected)
    buffers = sum(PAIR if size == 2 else COMMUNICATOR for size in expected)
    assert plan.reserve == CONTEXT + buffers + int(0.05 * plan.widest.total)


def test_a_plan_that_leaves_less_than_the_reserve_is_tight() -> None:
    words = (
        f"recipe=nemotron4_340b precision=bf16_fp8 {STRATEGY}tensor_model_parallel_size=8"
        f" {STRATEGY}pipeline_model_parallel_size=8 {STRATEGY}virtual_pipeline_model_parallel_size=12"
        " model.recompute_granularity=none trainer.global_batch_size=32 trainer.num_nodes=16"
        " storage.weight_grad=bf16 storage.comm=bf16"
    )
    recipe = fp8cfg.compose(words.split())
    tight, roomy = (fp8cfg.plan(recipe, gpu, 128) for gpu in ("h100", "h200"))
    assert tight.tight and not tight.problems and tight.data()["tight"]
    assert tight.gpu and 0 < tight.gpu.memory - tight.widest.total < tight.reserve
    assert "\nfits h100, 79.1 GiB, tight: " in str(tight)
    assert not roomy.tight and not roomy.data()["tight"]
    assert "\nfits h200, 139.7 GiB: " in str(roomy)


def test_a_cpu_has_no_reserve() -> None:
    plan = fp8cfg.plan(fp8cfg.compose(["recipe=llama_tiny"]))
    assert plan.reserve == 0
    assert not plan.tight


def test_what_no_backend_multiplies_does_not_fit() -> None:
    recipe = fp8cfg.compose(["recipe=llama_8b", "precision=bf16_mxfp8"])
    plan = fp8cfg.plan(recipe, "h100", 8)
    assert plan.refusals
    assert "fits h100" not in str(plan)
