"""Planned memory of a training step on a GPU against the peak that torch's allocator counts.

Two layers of Llama 3.1 8B, one sequence of 8192 a microbatch, two of these or one alone. Runs where torch has a CUDA device, also a fake one
(tools/fake_gpu), whose allocator is real."""

from __future__ import annotations

import gc
from unittest.mock import patch

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device, not even a fake one", allow_module_level=True)

import fp8cfg
from fp8cfg.backends.te.rules import unavailable
from fp8cfg.data import Batches, Windows
from fp8cfg.models.transformer import Transformer
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.peak_memory import plan_memory
from fp8cfg.training.step import train_step
from tools.fake_gpu.recorder import is_fake
from tools.gpu_rows.proof import without_proof

SHAPE = (
    "recipe=llama_8b",
    "model.num_layers=2",
    "model.vocab_size=32000",
    "model.seq_length=8192",
    "trainer.accelerator=cuda",
    "trainer.devices=1",
    "trainer.strategy.context_parallel_size=1",
    "trainer.micro_batch_size=1",
    "trainer.global_batch_size=2",
    "optim.warmup_steps=0",
)

HOPPER = (
    "fp32",
    "bf16",
    "bf16_fp8 backend=native",
    "bf16_fp8 backend=native fp8.params=false",
    "bf16_fp8_current backend=native fp8.params=false",
    "bf16_fp8_block backend=native fp8.format=e4m3 fp8.params=false",
    "bf16_fp8 backend=native opt_level=O2",
    "bf16 trainer.global_batch_size=1",
    "bf16_fp8 backend=native fp8.params=false trainer.global_batch_size=1",
)
BLACKWELL = (
    "bf16_mxfp8 backend=native",
    "bf16_mxfp8 backend=native fp8.params=false",
    "bf16_nvfp4 backend=native",
    "bf16_nvfp4 backend=native fp8.params=false",
)
"""What is multiplied from compute capability 10.0 on."""
if not unavailable():
    HOPPER += tuple(
        f"{words} backend=te"
        for words in (
            "bf16_fp8",
            "bf16_fp8 fp8.params=false",
            "bf16_fp8_current",
            "bf16_fp8_block",
            "bf16_fp8 opt_level=O2",
        )
    )
    BLACKWELL += tuple(
        f"{words} backend=te"
        for words in (
            "bf16_mxfp8",
            "bf16_mxfp8 fp8.params=false",
            "bf16_nvfp4",
            "bf16_nvfp4 fp8.params=false",
        )
    )


def _zero(model: Transformer, seed: int, device: str = "cpu") -> None:
    """Weights that a real GPU computes finite numbers with; drawn ones would take the fake one memory of the machine."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_cuda:
                parameter.zero_()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "precision", BLACKWELL if torch.cuda.get_device_capability() >= (10, 0) else HOPPER
)
def test_the_peak_of_a_step_is_the_planned_one(precision: str, recompute: str) -> None:
    if (
        is_fake()
    ):  # a real GPU proves what it multiplies, here and in the tests that follow in this process
        without_proof()
    recipe = fp8cfg.compose(
        [*SHAPE, *f"precision={precision}".split(), f"model.recompute_granularity={recompute}"]
    )
    with patch.object(Transformer, "init_weights", _zero):
        job = fp8cfg.build(recipe)
    tokens = np.zeros(4 * recipe.model.seq_length + 1, dtype=np.int64)
    batches = Batches(
        Windows(tokens, recipe.model.seq_length, recipe.model.vocab_size),
        0,
        recipe.trainer.global_batch_size,
    )
    train_step(job, batches, 0, World())
    torch.cuda.reset_peak_memory_stats()
    train_step(job, batches, 1, World())
    planned = sum(size for kind, size in plan_memory(recipe, "cuda").items() if kind != "to start")
    peak = torch.cuda.max_memory_allocated()
    del job
    gc.collect()
    torch.cuda.empty_cache()
    assert planned == pytest.approx(peak, rel=0.05), (
        f"{planned / 2**30:.2f} planned, {peak / 2**30:.2f} GiB at the peak"
    )
