"""One training of a library's model: plain, converted or built, with the same data and the same optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fp8cfg

STEPS, LR, CLIP = 20, 2e-3, 1.0
WAYS = ("converted", "built")


class Trained(NamedTuple):
    """Losses, the trained model, how many linear layers ran in FP8, and the names of those that did not."""

    losses: list[float]
    model: nn.Module
    layers: int
    left_out: list[str]


def recipe() -> fp8cfg.Recipe:
    """bf16_fp8 with the optimizer of the plain script."""
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
            "trainer.accelerator=cpu",
        ]
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
    )


def train(way: str, model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> Trained:
    """`STEPS` steps of `loss_of(model, step)`. Raises NotFP8Error where a converted model did not run in FP8."""
    fp8 = fp8cfg.convert_model(model, recipe()) if way == "converted" else None
    job = fp8cfg.build(recipe(), model=model) if way == "built" else None
    optimizer: Any = job.optimizer if job else adamw(model)
    losses = []
    for _ in range(STEPS):
        with (fp8 or job).autocast() if fp8 or job else nullcontext():  # type: ignore[union-attr]
            loss = loss_of(model, len(losses))
            job.backward(loss) if job else loss.backward()  # type: ignore[no-untyped-call]
        if not job:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if fp8:
            fp8.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for proof in filter(None, (fp8, job)):
        proof.prove()
    return looked_at(losses, model)


def looked_at(losses: list[float], model: nn.Module) -> Trained:
    """What the layers of a trained model did."""
    seen = fp8cfg.coverage(model)
    return Trained(losses, model, seen.layers_in_fp8, [p.name for p in seen.linears if not p.fp8])


def compared(plain: Trained, ours: Trained, head: str, within: float = 0.01) -> str:
    """The row of the table. Raises AssertionError, with the reason, where losses differ by more than `within` in the last steps, the
    head ran in FP8, or the weights do not load into the plain model."""
    gap = max(abs(a - b) for a, b in zip(plain.losses[-5:], ours.losses[-5:], strict=True))
    assert plain.losses[-1] < plain.losses[0], (
        f"the plain script does not learn: {plain.losses[0]:.4f}, {plain.losses[-1]:.4f}"
    )
    assert ours.layers, "no layer ran in FP8"
    assert not head or any(head in name for name in ours.left_out), (
        f"the output layer {head} is in FP8; left out: {ours.left_out}"
    )
    assert gap < within, (
        f"losses differ by {gap:.4f}: {plain.losses[-1]:.4f} plain, {ours.losses[-1]:.4f} here"
    )
    reader = copy.deepcopy(plain.model)
    reader.load_state_dict(ours.model.state_dict(), strict=True)
    ours.model.load_state_dict(reader.state_dict(), strict=True)
    return f"loss {plain.losses[0]:.3f} -> {ours.losses[-1]:.4f}, {gap:.4f} from plain; {ours.layers} layers in FP8"
