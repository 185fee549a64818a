"""Stochastic rounding: its random numbers, its mean, and what becomes of updates below half a unit with it and without."""

from __future__ import annotations

import math

import pytest
import torch

from fp8cfg.numerics import codecs
from fp8cfg.numerics.codecs import BF16, CODECS, FP16
from fp8cfg.numerics.formats import E4M3, E5M2, random_key, round_stochastic, uniform_numbers
from tests.support.codec_values import ALL, KEY, normal, values


def test_random_numbers_are_uniform_and_depend_on_nothing_else() -> None:
    u = uniform_numbers(KEY, 0, 0, 1 << 18)
    counts = torch.histc(u, 64, 0, 1)
    assert (
        u.min() >= 0 and u.max() < 1 and ((counts - 4096) ** 2 / 4096).sum() < 110
    )  # chi squared, 63 degrees: p = 0.0002
    assert torch.equal(u[1000:1500], uniform_numbers(KEY, 0, 1000, 500))
    for other in (
        uniform_numbers(KEY, 1, 0, 1 << 18),
        uniform_numbers(random_key(0, "test", 1), 0, 0, 1 << 18),
        uniform_numbers(random_key(1, "test"), 0, 0, 1 << 18),
        u.roll(1),
        u.roll(128),
    ):
        assert abs(torch.corrcoef(torch.stack([u, other]))[0, 1]) < 0.01
    assert torch.equal(random_key(3, "a", 2), random_key(3, "a", 2)) and not torch.equal(
        random_key(3, "a", 2), random_key(3, "a", 3)
    )


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=lambda f: f.name)
def test_stochastic_rounding_keeps_the_mean_and_takes_neighbours(fmt: codecs.Format) -> None:
    x = torch.cat(
        [
            normal(50),
            2.0**fmt.min_exponent * normal(50, seed=1),
            torch.tensor([0.0, 2.0**fmt.min_exponent, -1.0, fmt.max]),
        ]
    )
    x[50:100] *= fmt is not BF16  # its subnormal numbers have no normal reciprocal
    u = uniform_numbers(KEY, 0, 0, 4096 * len(x)).view(4096, -1)
    drawn = round_stochastic(x.expand(4096, -1).contiguous(), fmt, u)
    assert torch.equal(drawn.to(fmt.dtype).float(), drawn)
    unit = torch.exp2(
        torch.floor(torch.log2(x.abs().clamp(min=2.0**fmt.min_exponent))) - fmt.mantissa_bits
    )
    assert ((drawn - x).abs() < unit).all() and (
        (drawn.double().mean(0) - x).abs() <= 0.04 * unit
    ).all()
    on_grid = x.to(fmt.dtype).float()
    assert torch.equal(round_stochastic(on_grid, fmt, u[0]), on_grid)


def test_stochastic_rounding_leaves_what_is_not_finite() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan])
    assert str(round_stochastic(x, BF16, torch.rand(3)).tolist()) == "[inf, -inf, nan]"


@pytest.mark.parametrize(
    ("name", "left"),
    [("fp16_scaled", -1.03e-4), ("fp16_scaled stochastic", -5.0e-4), ("fp32", -5.0e-4)],
)
def test_trap_updates_below_half_a_unit(name: str, left: float) -> None:
    """500 updates of -1e-6 on weights of 0.02: to nearest a fifth of it arrives."""
    c, w = ALL[name], normal(20_000, scale=0.02)
    stored = c.encode(w, random_key(0))
    start = c.decode(stored)
    for step in range(500):
        stored = c.encode(c.decode(stored) - 1e-6, random_key(0, step))
    assert (c.decode(stored) - start).mean().item() == pytest.approx(left, rel=0.03)


@pytest.mark.parametrize(
    ("spread", "update", "changed", "realised"),
    [(0.02, 1e-6, 0.156, 0.22), (0.1, 1e-5, 0.246, 0.30)],
)
def test_trap_share_of_weights_that_change(
    spread: float, update: float, changed: float, realised: float
) -> None:
    w = values(CODECS["fp16_scaled"], normal(200_000, scale=spread))
    signs = torch.where(normal(200_000, seed=1) > 0, update, -update)
    step = values(CODECS["fp16_scaled"], w + signs) - w
    assert (step != 0).float().mean().item() == pytest.approx(changed, abs=0.01)
    assert (step / signs).mean().item() == pytest.approx(realised, abs=0.01)
