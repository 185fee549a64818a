"""Recipes of the Transformer Engine backend by scaling, weights and level, and what its tests read of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8cfg.backends.any_model.module_swap import replace_module

TE = (
    "backend=te",
    "fp8={high_precision_at_start: 0, high_precision_at_end: 0, amax_history_len: 4}",
)
DELAYED = ("precision=bf16_fp8", *TE, "fp8.first_step=te")  # as native begins there
CURRENT = (
    "precision=bf16_fp8_current",
    TE[0],
    "fp8={high_precision_at_start: 0, high_precision_at_end: 0}",
)
BLOCK = (
    "precision=bf16_fp8_block",
    TE[0],
    "fp8={high_precision_at_start: 0, high_precision_at_end: 0}",
)
MXFP8 = (
    "precision=bf16_mxfp8",
    TE[0],
    "fp8={high_precision_at_start: 0, high_precision_at_end: 0}",
)
FP16 = (
    TE[0],
    "precision.loss_scale=1024",
    "fp8={high_precision_at_start: 0, high_precision_at_end: 0}",
    "fp8.params=true",
)
NVFP4 = (
    "precision=bf16_nvfp4",
    TE[0],
    "fp8={high_precision_at_start: 0, high_precision_at_end: 0}",
)
CASES = {
    "delayed": (*DELAYED, "fp8.params=false"),
    "delayed params": (*DELAYED, "fp8.params=true"),
    "block": (*BLOCK, "fp8.params=false"),
    "block params": (*BLOCK, "fp8.params=true"),
    "nvfp4": (*NVFP4, "fp8.params=false"),
    "nvfp4 params": (*NVFP4, "fp8.params=true"),
    "delayed params fp16": (
        "precision=fp16_fp8",
        *FP16,
        "fp8.amax_history_len=4",
        "fp8.first_step=te",
    ),
    "block params fp16": ("precision=fp16_fp8_block", *FP16),
    "mxfp8": (*MXFP8, "fp8.params=false"),
    "mxfp8 params": (*MXFP8, "fp8.params=true"),
    "current O1": (*CURRENT, "opt_level=O1"),
    "current O2": (*CURRENT, "opt_level=O2"),
    "delayed O2": (*DELAYED, "opt_level=O2"),
    "current O3": (*CURRENT, "opt_level=O3"),
    "current": (*CURRENT, "fp8.params=false"),
    "current params": (*CURRENT, "fp8.params=true"),
}


def backend() -> Any:
    from fp8cfg.backends.te import backend as te

    return te


def restore(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if (plain := backend().plain(module)) is not None:
            replace_module(model, name, plain)


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
