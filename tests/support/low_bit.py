"""Low-bit optimizers of every combination of codecs, with parameters and gradients to train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8cfg.optim.low_bit.adam import LowBitAdamW, LowBitOptimizer
from fp8cfg.optim.low_bit.columns import Columns, named_columns

ROWS = {
    "fp32": named_columns(),
    "O1": named_columns("fp16_scaled", "none", "fp8_pow2"),
    "O2": named_columns("fp16_scaled", "none", "fp8_pow2", "fp8_pow2", "fp16_scaled"),
    "O3": named_columns("fp8_pow2", "fp16_scaled", "fp8_pow2", "fp8_pow2", "fp16_scaled"),
    "O2 exact": named_columns("fp16_scaled", "none", "fp8", "fp8", "fp16_scaled"),
    "O2 stochastic": named_columns(
        "fp16_scaled", "none", "fp8_pow2", "fp8_pow2", "fp16_scaled", "stochastic"
    ),
    "Megatron": named_columns("bf16", "fp32", "fp32", "bf16", "bf16"),
    "bf16 stochastic": named_columns("bf16", "none", "bf16", "bf16", "bf16", "stochastic"),
    "blocks": named_columns(
        "fp8_block", "fp16_scaled", "fp8_block", "fp8_block", "fp8_block", "stochastic"
    ),
    "block moments": named_columns(exp_avg="fp8_block", exp_avg_sq="fp8_block"),
    "expanded moments": named_columns(exp_avg="fp8_expand", exp_avg_sq="fp8_expand"),
}
BETAS = (0.9, 0.95)
DTYPES = {"bf16": torch.bfloat16}


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def parameters(
    c: Columns, *shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype | None = None
) -> dict[str, nn.Parameter]:
    dtype = dtype or DTYPES.get(str(c.weight), torch.float32)
    return {
        f"p{i}": nn.Parameter(normal(*s, seed=seed + i, scale=0.02).to(dtype))
        for i, s in enumerate(shapes)
    }


def build(
    c: Columns,
    params: dict[str, nn.Parameter],
    cls: type[LowBitOptimizer] = LowBitAdamW,
    **options: Any,
) -> LowBitOptimizer:
    return cls(
        params.items(), columns=c, **{"lr": 1e-3, "betas": BETAS, "weight_decay": 0.1, **options}
    )


def train(
    optimizer: LowBitOptimizer, params: dict[str, nn.Parameter], steps: range, scale: float = 1e-3
) -> None:
    for step in steps:
        for i, p in enumerate(params.values()):
            p.grad = normal(*p.shape, seed=1000 * step + i, scale=scale).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


def bits(x: torch.Tensor) -> torch.Tensor:
    return (
        x.detach()
        .contiguous()
        .view(-1)
        .view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])
    )


def everything(
    optimizer: LowBitOptimizer, params: dict[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    return {k: bits(t).clone() for k, t in {**params, **optimizer.state_tensors()}.items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
