"""What a script gets by the few lines that bring it to FP8: its own model and optimizer, converted ones, or those of a job."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fp8cfg
from tests.clients.gpt import STEPS

Way = Literal["plain", "converted", "built"]
LR, CLIP = 2e-3, 1.0


@functools.cache
def _recipe(*words: str) -> fp8cfg.Recipe:
    return fp8cfg.compose(
        [
            "precision=bf16_fp8",
            f"optim.lr={LR}",
            "optim.lr_decay_style=constant",
            "optim.warmup_steps=0",
            "optim.weight_decay=0",
            "optim.betas=[0.9,0.95]",
            "optim.eps=1e-8",
            f"trainer.max_steps={STEPS}",
            f"trainer.gradient_clip_val={CLIP}",
            *words,
        ]
    )


def recipe(*words: str) -> fp8cfg.Recipe:
    """The recipe of all clients, with `words`."""
    return _recipe(*words).model_copy(deep=True)


@dataclass
class Made:
    """A model and an optimizer; `context` is made once, as nanoGPT's. `step` follows the optimizer's, and does nothing where the
    model rolls its histories by itself."""

    model: nn.Module
    optimizer: Any
    context: AbstractContextManager[Any] = field(default_factory=nullcontext)
    backward: Callable[[Tensor], None] = lambda loss: loss.backward()  # type: ignore[no-untyped-call]
    step: Callable[[], None] = lambda: None
    job: fp8cfg.Job | None = None
    conversion: Any = None
    losses: list[float] = field(default_factory=list)

    def clip(self) -> None:
        """The optimizer of a job clips by itself."""
        if self.job is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
    )


def made(way: Way, model: nn.Module, autowrap: bool = False, **options: Any) -> Made:
    """`model` brought to FP8 in that way; with `autowrap` its forward enters FP8 by itself."""
    if way == "plain":
        return Made(model, adamw(model))
    if way == "converted":
        fp8 = fp8cfg.convert_model(model, recipe(), **options)
        if autowrap:
            fp8cfg.apply_fp8_autowrap(model, recipe())
            return Made(model, adamw(model), conversion=fp8)
        return Made(model, adamw(model), fp8.autocast(), step=fp8.step, conversion=fp8)
    job = fp8cfg.build(recipe(), model=model)
    if autowrap:
        fp8cfg.apply_fp8_autowrap(job.model, recipe())
        return Made(job.model, job.optimizer, backward=job.backward, job=job)
    return Made(job.model, job.optimizer, job.autocast(), job.backward, job=job)
