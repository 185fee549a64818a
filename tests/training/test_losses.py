"""Every scaling tracks fp32 while runs have not yet diverged by chance. tools/compare_losses.py has the long comparison."""

from __future__ import annotations

from functools import cache
from statistics import mean

import pytest
import torch

from tests.support.small import losses

EVERYWHERE = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
STEPS = 10
SCALINGS = {
    "delayed": ("precision=bf16_fp8",),
    "delayed, first scales of te": ("precision=bf16_fp8", "fp8.first_step=te"),
    "current": ("precision=bf16_fp8_current", EVERYWHERE),
    "row": ("precision=bf16_fp8_current", EVERYWHERE, "fp8.granularity=row"),
    "block": ("precision=bf16_fp8_block",),
    "mxfp8": ("precision=bf16_mxfp8",),
    "nvfp4": ("precision=bf16_nvfp4",),
}


@cache
def trained(*words: str) -> list[float]:
    torch.manual_seed(0)  # nvfp4 rounds gradients at random
    return losses(
        *words,
        "data=stdlib",
        "optim.lr=1e-3",
        "model.num_layers=4",
        "model.hidden_size=128",
        "model.ffn_hidden_size=256",
        "model.seq_length=64",
        f"trainer.max_steps={STEPS}",
        count=STEPS,
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", SCALINGS.values(), ids=SCALINGS)
def test_the_first_ten_steps_track_fp32(words: tuple[str, ...]) -> None:
    exact, rounded = trained("precision=fp32"), trained(*words)
    assert exact[0] - exact[-1] > 1, "the model learns something that could be lost"
    off = mean(abs(a - b) for a, b in zip(exact, rounded, strict=True))
    assert 0 < off < 0.02
