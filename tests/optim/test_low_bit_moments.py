"""Formats of an optimizer's moments: 200 steps, a log-normal size of gradients for each element, beside float32 moments."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fp8cfg.numerics.codecs import Codec, get_codec
from fp8cfg.numerics.formats import E5M2
from fp8cfg.optim.low_bit.adam import LowBitAdamW
from fp8cfg.optim.low_bit.columns import Columns, named_columns
from tests.support.low_bit import normal


def update_error(exp_avg: Codec, exp_avg_sq: Codec) -> float:
    size = torch.exp(normal(64, 256, seed=7, scale=1.5)) * 1e-4
    runs = []
    for c in (Columns(), Columns(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)):
        p = {"w": nn.Parameter(torch.zeros(64, 256))}
        optimizer = LowBitAdamW(p.items(), columns=c, lr=1.0, betas=(0.9, 0.999), weight_decay=0.0)
        for step in range(200):
            before = p["w"].detach().clone()
            p["w"].grad = normal(64, 256, seed=step) * size
            optimizer.step()
        runs.append(p["w"].detach() - before)
    return ((runs[1] - runs[0]).norm() / runs[0].norm()).item()


@pytest.mark.parametrize(
    ("exp_avg", "exp_avg_sq", "low", "high"),
    [
        (get_codec("fp8_pow2"), get_codec("fp16_scaled"), 0.05, 0.07),
        (get_codec("fp8"), get_codec("fp16_scaled"), 0.05, 0.07),
        (get_codec("bf16"), get_codec("bf16"), 0.005, 0.01),
        (replace(get_codec("fp8_pow2"), format=E5M2), get_codec("fp16_scaled"), 0.1, 0.12),
        (get_codec("fp8_block"), get_codec("fp16_scaled"), 0.05, 0.06),
        (get_codec("fp8_block"), get_codec("fp8_block", second_moment=True), 0.1, 0.2),
        (get_codec("fp8_pow2"), get_codec("fp8_pow2"), 50.0, math.inf),
        (get_codec("fp8_block"), get_codec("fp8_block"), 10.0, math.inf),
    ],
    ids=[
        "O2",
        "exact",
        "bf16",
        "e5m2",
        "block+fp16",
        "blocks",
        "per-tensor second moment",
        "linear block second moment",
    ],
)
def test_error_of_an_update(exp_avg: Codec, exp_avg_sq: Codec, low: float, high: float) -> None:
    assert low < update_error(exp_avg, exp_avg_sq) < high


@pytest.mark.parametrize(
    ("exp_avg_sq", "diverges"),
    [
        ("fp16_scaled", False),
        ("bf16", False),
        ("fp8_block", False),
        ("fp8", True),
        ("fp8_pow2", True),
    ],
)
def test_second_moments_in_fp8_under_one_scale_diverge(exp_avg_sq: str, diverges: bool) -> None:
    """A token that is not in the batch has gradient 0, and moves by lr m / eps where its second moment was rounded to 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64, bias=False))
    optimizer = LowBitAdamW(
        model.named_parameters(),
        columns=named_columns(exp_avg="fp8_pow2", exp_avg_sq=exp_avg_sq),
        lr=1e-2,
        betas=(0.9, 0.999),
    )
    for _ in range(100):
        x = torch.multinomial(torch.arange(1, 65.0) ** -1.5, 64, True)
        loss = nn.functional.cross_entropy(model(x), (7 * x + 3) % 64)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not loss < 1e6 if diverges else loss < 0.5


def stuck(c: Codec, beta: float, noise: float) -> float:
    """The error of first moments, relative to what they should be, after 300 steps of gradients of 1 and then as many of `noise`."""
    exact, stored = torch.zeros(4096), c.zeros(torch.Size([4096]), torch.device("cpu"))
    for step in range(600):
        g = (
            1.0 + normal(4096, seed=step, scale=noise)
            if noise
            else torch.full((4096,), 1.0 if step < 300 else 0.0)
        )
        exact = beta * exact + (1 - beta) * g
        stored = c.encode(beta * c.decode(stored) + (1 - beta) * g)
    return ((c.decode(stored) - exact).abs().mean() / exact.abs().mean().clamp(min=0.02)).item()


@pytest.mark.parametrize(
    ("name", "beta", "low", "high"),
    [
        ("fp8_pow2", 0.9, 0.0, 0.1),
        ("fp8_pow2", 0.95, 10.0, 100.0),
        ("fp8_pow2", 0.98, 10.0, 100.0),
        ("fp8", 0.95, 0.0, 0.1),
        ("fp8", 0.98, 0.0, 0.1),
        ("fp8_block", 0.98, 0.0, 0.1),
        ("bf16", 0.98, 0.0, 0.1),
    ],
)
def test_averages_under_a_power_of_two_freeze(
    name: str, beta: float, low: float, high: float
) -> None:
    """With gradients gone: an exact scale follows the amax down, a power of two stands still."""
    assert low <= stuck(get_codec(name), beta, 0.0) <= high


def test_noise_does_not_free_a_power_of_two() -> None:
    assert stuck(get_codec("fp8_pow2"), 0.98, 0.1) > 5 * stuck(get_codec("fp8"), 0.98, 0.1)
