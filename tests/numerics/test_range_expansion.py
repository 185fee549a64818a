"""COAT's expanded FP8 against its formula in double precision, and at the ends of k."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import fp8cfg
from fp8cfg.numerics.codecs import (
    CODECS,
    compute_power_scales,
    decode_powers,
    encode_powers,
    get_codec,
)
from fp8cfg.numerics.formats import E4M3, random_key, square_root

GRID = torch.arange(127, dtype=torch.uint8).view(E4M3.dtype).double()
BOUND = math.log2(448**2 / 2)


def coat(x: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """k, what goes to the FP8 grid, and what comes back: fp8_adamw_expand_cuda_kernel.cu on one group, in float64; k bounded as here."""
    x = x.double()
    largest, smallest = x.abs().max(), x.abs()[x != 0].min()
    centre = (largest * smallest).sqrt()
    ratio = math.log2(largest / smallest)
    k = min(max(math.floor(BOUND / ratio * 16) / 16, 3 / 16), 16.0) if ratio else 16.0
    scale = (largest / centre) ** k / 448
    powers = (x.abs() / centre) ** k / scale
    code = GRID[(powers[:, None] - GRID).abs().argmin(1)]
    return k, powers, x.sign() * (code * scale) ** (1 / k) * centre


def normal(count: int, spread: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * torch.exp(
        spread * torch.randn(count, generator=generator)
    )


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0, 8.0])
def test_codes_and_values_are_coats(spread: float) -> None:
    for seed in range(20):
        x = normal(128, spread, seed)
        k, powers, values = coat(x)
        stored = compute_power_scales(x[None])
        codes = encode_powers(x[None], stored)[0]
        assert stored[0].tolist() == [x.abs().max().item(), k]
        gap = (powers[:, None] - (GRID[1:] + GRID[:-1]) / 2).abs().min(1)[0]
        clear = gap > 1e-5 * powers  # where rounding errors of float32 cannot decide
        assert clear.float().mean() > 0.99
        assert torch.allclose(
            decode_powers(codes.view(torch.uint8)[None], stored)[0][clear].double(),
            values[clear],
            rtol=3e-6,
            atol=0,
        )


@settings(max_examples=200, deadline=None)
@given(
    arrays.arrays(
        numpy.float32, st.integers(1, 300), elements=st.floats(-(2.0**60), 2.0**60, width=32)
    )
)
def test_any_input(x: numpy.ndarray) -> None:
    tensor = torch.from_numpy(numpy.where(abs(x) < 2.0**-50, numpy.float32(0), x))
    c = CODECS["fp8_expand"]
    back = c.decode(stored := c.encode(tensor))
    assert torch.isfinite(back).all() and torch.equal(back.sign(), tensor.sign())
    for start in range(0, len(tensor), 128):
        block, k = tensor[start : start + 128], stored[1][start // 128, 1].item()
        inside = block.abs() > block.abs().max() * (2.0**-6 / 448) ** (
            1 / k
        )  # at least the smallest normal number
        assert (
            3 / 16 <= k <= 16
            and (
                ((back[start : start + 128] / block)[inside].log2()).abs()
                <= math.log2(1 + 2.0**-4 + 1e-5) / k + 1e-6
            ).all()
        )


def test_the_ends_of_k() -> None:
    """COAT's k is infinite for equal values; below 3/16 codes would underflow."""
    assert compute_power_scales(torch.full((1, 128), -3.0))[0].tolist() == [3.0, 16.0]
    assert torch.equal(
        CODECS["fp8_expand"].decode(CODECS["fp8_expand"].encode(torch.full((128,), -3.0))),
        torch.full((128,), -3.0),
    )
    wide = torch.tensor([[1e38, 1e-37, 1e20, 0.0]])
    assert compute_power_scales(wide)[0, 1] == 3 / 16
    back = decode_powers(
        encode_powers(wide, compute_power_scales(wide)).view(torch.uint8),
        compute_power_scales(wide),
    )[0]
    assert back[0] == 1e38 and back[3] == 0 and 0.7e20 < back[2] < 1.4e20 and back[1] > 0


def test_k_is_the_largest_that_fits() -> None:
    for steps in (4, 15, 16, 17, 100):
        edge = torch.tensor((448**2 / 2) ** (16 / steps), dtype=torch.float64)
        for factor, expected in ((1 - 1e-6, steps), (1 + 1e-6, steps - 1)):
            assert (
                compute_power_scales(torch.tensor([[1.0, (edge * factor).float()]]))[0, 1] * 16
                == expected
            )


def test_what_is_not_finite_is_lost_with_its_block_alone() -> None:
    x = normal(384, 1.0)
    for bad in (math.inf, -math.inf, math.nan):
        x[130] = bad
        assert (
            CODECS["fp8_expand"].decode(CODECS["fp8_expand"].encode(x)).isnan().tolist()
            == [False] * 128 + [True] * 128 + [False] * 128
        )


def test_stochastic_rounding_keeps_the_mean() -> None:
    x = normal(128, 2.0)
    c = get_codec("fp8_expand", "stochastic")
    drawn = torch.stack([c.decode(c.encode(x, random_key(0, n))) for n in range(2000)])
    unit = drawn.amax(0) - drawn.amin(0)
    assert (unit > 0).sum() > 120 and (
        (drawn.double().mean(0) - x).abs() <= 0.05 * unit + 1e-6 * x.abs()
    ).all()


def test_moments_keep_their_step() -> None:
    """The relative error of Adam's update from stored moments, log-normal gradients: a linear FP8 second moment makes it useless."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(2 * torch.randn(128 * 64, generator=generator))
    kinds = {
        "fp32": (get_codec("fp32"), get_codec("fp32")),
        "expand": (get_codec("fp8_expand"), get_codec("fp8_expand", second_moment=True)),
        "linear": (get_codec("fp8_block"), get_codec("fp8_block")),
    }
    state = {kind: [torch.zeros_like(size), torch.zeros_like(size)] for kind in kinds}
    for step in range(100):
        g = size * torch.randn(len(size), generator=generator)
        for kind, (first, second) in kinds.items():
            m, v = state[kind]
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            key = random_key(0, step)
            state[kind] = [first.decode(first.encode(m, key)), second.decode(second.encode(v, key))]
    update = {kind: m / (square_root(v) + 1e-12) for kind, (m, v) in state.items()}
    error = {
        kind: ((u - update["fp32"]).norm() / update["fp32"].norm()).item()
        for kind, u in update.items()
    }
    assert error["expand"] < 0.2 < 5 < error["linear"], error


@pytest.mark.parametrize(
    ("column", "line"),
    [
        ("weight", "storage.weight=fp8_expand: only for moments (COAT); set it to fp8"),
        ("weight_grad", "storage.weight_grad=fp8_expand: only for moments (COAT); set it to fp8"),
        (
            "comm",
            "storage.comm=fp8_expand: cannot be sent between ranks; set it to fp16, fp8 or fp8_pow2",
        ),
        (
            "master_weight",
            "storage.master_weight=fp8_expand: FP8 master weights lose small updates; set it to fp16_scaled or fp32",
        ),
    ],
)
def test_it_is_a_codec_of_moments(column: str, line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.compose(["recipe=llama_tiny", f"storage.{column}=fp8_expand"]).check()
    assert line in e.value.problems
