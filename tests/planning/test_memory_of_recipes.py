"""Planned memory of the large recipes: FP8 takes no more than BF16, and layouts that ran on 80 GB fit."""

from __future__ import annotations

import functools

import pytest

import fp8cfg
from fp8cfg.planning.peak_memory import plan_memory, widest_part
from fp8cfg.schema.presets import precision_preset
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import recipes

STRATEGY = "trainer.strategy."


def ranks_of(recipe: Recipe) -> int:
    return recipe.trainer.num_nodes * recipe.trainer.devices


LARGE = [
    name for name, recipe in recipes().items() if name != "from_hf" and ranks_of(recipe()) >= 8
]
ONCE = [name for name in LARGE if not name.startswith(("llama_", "qwen25_72b"))]
"""Without names that stand for another recipe, or for the same shape."""


@functools.cache
def peak(name: str, precision: str) -> int:
    recipe = recipes()[name]()
    recipe.trainer.plugins = precision_preset(precision)
    part = widest_part(recipe, "cuda", ranks_of(recipe), "native")
    return sum(plan_memory(recipe, "cuda", part, "native").values())


@pytest.mark.parametrize("precision", ["bf16_fp8", "bf16_fp8_current"])
@pytest.mark.parametrize("name", ONCE)
def test_fp8_needs_no_more_memory_than_bf16(name: str, precision: str) -> None:
    assert peak(name, precision) <= peak(name, "bf16")


PUBLISHED = {
    # Megatron-Bridge, docs/performance-summary.md (26.02)
    "70B": ("llama3_70b", "bf16_fp8_current", 64, (4, 8, 1, 5), 1, 128, ""),
    "405B": ("llama31_405b", "bf16_fp8_current", 1024, (8, 8, 2, 8), 1, 1536, ""),
    # NeMo, docs/source/performance/performance_summary.md (24.07), whose runs reduce gradients in BF16
    "340B": (
        "nemotron4_340b",
        "bf16_fp8",
        128,
        (8, 8, 1, 12),
        1,
        32,
        "storage.weight_grad=bf16 storage.comm=bf16",
    ),
    "175B": ("gpt3_175b", "bf16_fp8", 512, (4, 8, 1, 6), 2, 2048, ""),
}
"""Runs on H100 of 80 GB: recipe, precision, GPUs, tensor x pipeline x context parallel and chunks, micro batch, global batch, more."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_layout_fits(name: str) -> None:
    recipe, precision, gpus, (tensor, pipeline, context, chunks), micro, batch, more = PUBLISHED[
        name
    ]
    words = [
        f"recipe={recipe}",
        f"precision={precision}",
        f"{STRATEGY}tensor_model_parallel_size={tensor}",
        f"{STRATEGY}pipeline_model_parallel_size={pipeline}",
        f"{STRATEGY}context_parallel_size={context}",
        f"{STRATEGY}virtual_pipeline_model_parallel_size={chunks}",
        f"{STRATEGY}sequence_parallel=true",
        f"trainer.micro_batch_size={micro}",
        f"trainer.global_batch_size={batch}",
        f"trainer.num_nodes={gpus // 8}",
        "model.recompute_granularity=none",
        *more.split(),
    ]
    if precision == "bf16_fp8_current":
        words += ["fp8.high_precision_at_start=0", "fp8.high_precision_at_end=0"]
    plan = fp8cfg.plan(fp8cfg.compose(words), "h100", gpus)
    assert not plan.problems
    assert "fits h100" in str(plan)
