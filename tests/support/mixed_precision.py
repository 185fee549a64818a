"""A small transformer under a mixed-precision optimizer, and a loop written by hand that must give the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fp8cfg.models import TransformerConfig
from fp8cfg.models.transformer import Transformer
from fp8cfg.optim import LossScaler, Schedule
from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer, param_groups

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-5, fused=True),
    "adamw unfused": partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-5, foreach=False),
    "adam": partial(torch.optim.Adam, betas=(0.9, 0.95), fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "plain sgd": torch.optim.SGD,
}
SCHEDULE = Schedule(max_lr=1e-2, min_lr=1e-3, warmup_steps=3, max_steps=12)
CONFIG = TransformerConfig(1, 16, 24, 2, 1, 8, 32, 8)
CLIP, DECAY = 0.5, 0.1


def make_model(dtype: torch.dtype, seed: int = 0) -> Transformer:
    model = Transformer(CONFIG).to(dtype)
    model.init_weights(seed)
    if dtype == torch.bfloat16:
        for p in model.parameters():
            p.grad_dtype = torch.float32
    return model


def make_optimizer(
    model: nn.Module, inner: str = "adamw", **options: Any
) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(
        param_groups(model, DECAY), INNER[inner], clip_grad=CLIP, **options
    )


def scaler_for(dtype: torch.dtype) -> LossScaler | None:
    return (
        LossScaler(initial_loss_scale=2.0**18, loss_scale_window=2)
        if dtype == torch.float16
        else None
    )


def tokens_of(step: int, microbatch: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    tokens = torch.randint(CONFIG.vocab_size, (2, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def backward(model: Transformer, step: int, scale: float = 1.0) -> list[float]:
    """Two microbatches, accumulated."""
    losses = [model(*tokens_of(step, microbatch)) for microbatch in range(2)]
    for loss in losses:
        (loss * scale / 2).backward()
    return [loss.item() for loss in losses]


def train(model: Transformer, optimizer: MixedPrecisionOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        scale = 1.0 if optimizer.loss_scaler is None else optimizer.loss_scaler.scale
        losses += backward(model, step, scale)
        SCHEDULE.apply(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def hand_loop(
    model: Transformer, make_inner: Callable[..., torch.optim.Optimizer], steps: range, scale: float
) -> list[float]:
    """What `train` must do, with nothing of ours in it; a skipped step where a gradient is not finite."""
    named = list(model.named_parameters())
    masters = {name: p.detach().clone().float() for name, p in named}
    groups = [
        {"params": [masters[name] for name, p in named if p.dim() > 1], "weight_decay": DECAY},
        {"params": [masters[name] for name, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    inner, losses, good = make_inner(groups), [], 0
    forgiven = False
    for step in steps:
        losses += backward(model, step, scale)
        for name, p in named:
            masters[name].grad = p.grad.detach().float() * (1.0 / scale)
            p.grad = None
        if all(bool(m.grad.isfinite().all()) for m in masters.values()):
            ordered = [m for group in groups for m in group["params"]]
            torch.nn.utils.clip_grad_norm_(ordered, CLIP)
            for group in inner.param_groups:
                group["lr"] = SCHEDULE.lr_at(step)
            inner.step()
            with torch.no_grad():
                for name, p in named:
                    p.copy_(masters[name])
            good += 1
            if good % 2 == 0 and scale != 1.0:
                scale, forgiven = scale * 2, False
        else:
            good = 0
            scale, forgiven = (scale / 2, True) if forgiven else (scale, True)
    return losses


def save(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> tuple[bytes, bytes, str]:
    tensors = safetensors.torch.save(optimizer.state_tensors())
    return safetensors.torch.save(model.state_dict()), tensors, json.dumps(optimizer.state_json())
