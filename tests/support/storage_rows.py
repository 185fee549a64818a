"""Rows of the low-precision chart: their words, the state of a job after some steps, and whether two states have the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint.load import Tensors
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.training.data import run_data
from tests.support import whole_checkpoints
from tests.support.small import small, steps

FP8, OWN = "precision=bf16_fp8", "fp8.params=false"
CURRENT = "precision=bf16_fp8_current fp8.high_precision_at_start=0 fp8.high_precision_at_end=0"
SCALE = "precision.initial_loss_scale=65536"
ROWS = {
    "FP16 AMP": f"precision=fp16 storage.weight=fp32 {SCALE}",
    "TE": f"{FP8} {OWN} storage.weight=fp32",
    **{
        f"{level}, {name}": f"{words} opt_level={level}"
        for level in ("O1", "O2", "O3")
        for name, words in (
            ("fp32", "precision=fp32"),
            ("bf16", "precision=bf16"),
            ("delayed", FP8),
            ("current", CURRENT),
            ("block", "precision=bf16_fp8_block"),
            ("mxfp8", "precision=bf16_mxfp8"),
            ("fp16", f"precision=fp16 {SCALE}"),
        )
    },
    "O3, nvfp4": "precision=bf16_nvfp4 opt_level=O3",
    "O3, fp16_fp8": f"precision=fp16_fp8 opt_level=O3 {SCALE}",
    "O2, powers of two": f"{FP8} opt_level=O2 storage.weight_grad=fp8_pow2 storage.comm=fp8_pow2 storage.exp_avg=fp8_pow2",
    "O2, FP8 attention": f"{FP8} opt_level=O2 fp8.dot_product_attention=true",
    "O2, recomputed": f"{FP8} opt_level=O2 model.recompute_granularity=full trainer.micro_batch_size=2",
    "bf16 weights without masters": "precision=bf16 storage.master_weight=none storage.rounding=stochastic",
    "bf16 weights without masters, FP8": f"{FP8} {OWN} storage.master_weight=none storage.rounding=stochastic",
    "fp16 weights without masters": f"precision=fp16 storage.master_weight=none storage.rounding=stochastic {SCALE}",
    "bf16 moments": "precision=bf16 storage.exp_avg=bf16 storage.exp_avg_sq=bf16",
    "block moments": f"{FP8} storage.exp_avg=fp8_block storage.exp_avg_sq=fp8_block",
    "FP8 weights outside of FP8": "precision=bf16 storage.weight=fp8",
    "gradients in bf16 of float32 weights": "precision=fp32 storage.weight_grad=bf16",
    "gradients in scaled fp16": "precision=bf16 storage.weight_grad=fp16_scaled",
    "gradients in blocks": "precision=bf16 storage.weight_grad=fp8_block",
}


def words(row: str) -> list[str]:
    return [*ROWS[row].split(), "optim.lr=1e-3"]


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        t.dtype == b[k].dtype and torch.equal(bits(t), bits(b[k])) for k, t in a.items()
    )


def everything(job: Job) -> dict[str, Tensor]:
    state = {f"state {k}": t for k, t in job.optimizer.state_tensors().items()}
    return {k: t.clone() for k, t in {**stored_state_dict(job.model), **state}.items()}


def after(row: str, done: int) -> tuple[Job, Tensors, dict[str, Any]]:
    torch.manual_seed(0)
    job = fp8cfg.build(small(*words(row)))
    list(steps(job, done))
    return job, *whole_checkpoints.collect(job, run_data(job.recipe)[0], done)
