from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8cfg.numerics.formats import E4M3, E5M2, Format, cast, round_in_steps, round_to_format

BOTH = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def oracle(v: Tensor, fmt: Format) -> Tensor:
    return v.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def ties(fmt: Format) -> Tensor:
    """Every value of the format, every midpoint of two, and the float32 neighbours of both."""
    grid = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    grid = grid[grid.isfinite()].unique()
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    inf = torch.tensor(torch.inf)
    return torch.cat([points, points.nextafter(inf), points.nextafter(-inf)])


@BOTH
def test_limits_are_those_of_the_dtype(fmt: Format) -> None:
    info = torch.finfo(fmt.dtype)
    assert (fmt.max, 2.0**fmt.min_exponent, 2.0**-fmt.mantissa_bits) == (
        info.max,
        info.smallest_normal,
        info.eps,
    )


@BOTH
@pytest.mark.parametrize("values", ["all bfloat16", "ties"])
def test_grid_and_cast_round_as_the_hardware_dtype(fmt: Format, values: str) -> None:
    v = ALL_BF16.float() if values == "all bfloat16" else ties(fmt)
    want = oracle(v, fmt)
    assert same(cast(v, fmt).float(), want.float())
    assert torch.equal(cast(v, fmt).view(torch.uint8), want.view(torch.uint8))
    assert same(round_in_steps(v, fmt), want.float())


@BOTH
def test_compiled_agrees_on_every_bfloat16_and_tie(fmt: Format) -> None:
    v = torch.cat([ALL_BF16.float(), ties(fmt)])
    values, stored = torch.compile(
        lambda v: (round_to_format(v, fmt, torch.float32), cast(v, fmt)), fullgraph=True
    )(v)
    assert same(values, oracle(v, fmt).float())
    assert same(stored.float(), oracle(v, fmt).float())


@BOTH
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_any_float32(fmt: Format, bits: list[int]) -> None:
    v = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32).copy())
    assert same(round_to_format(v, fmt, torch.float32), oracle(v, fmt).float())
    assert same(cast(v, fmt).float(), oracle(v, fmt).float())


@BOTH
@given(exponent=st.floats(-20, 20), sign=st.sampled_from([-1.0, 1.0]))
def test_float32_in_the_range_of_the_format(fmt: Format, exponent: float, sign: float) -> None:
    v = torch.tensor([sign * 2.0**exponent])
    assert same(round_to_format(v, fmt, torch.float32), oracle(v, fmt).float())


@BOTH
def test_saturates_and_keeps_nan_and_its_input(fmt: Format) -> None:
    v = torch.tensor([torch.inf, -torch.inf, 1e9, torch.nan])
    before = v.clone()
    for got in (cast(v, fmt).float(), round_to_format(v, fmt, torch.float32)):
        assert got[:3].tolist() == [fmt.max, -fmt.max, fmt.max]
        assert got[3].isnan()
    assert same(v, before)


@BOTH
def test_bfloat16_holds_all_values(fmt: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    assert same(codes.to(torch.bfloat16).float(), codes.float())


def test_compiled_code_decodes_as_eager_code() -> None:
    codes, dtypes = (
        torch.arange(256, dtype=torch.uint8),
        [torch.float32, torch.bfloat16, torch.float16, torch.float64],
    )
    every = [codes.view(fmt.dtype).view(16, 16) for fmt in (E4M3, E5M2)]
    compiled = torch.compile(
        lambda every: [codes.t().to(dtype).t() for codes in every for dtype in dtypes],
        fullgraph=True,
    )(every)
    for got, want in zip(
        compiled, [codes.to(dtype) for codes in every for dtype in dtypes], strict=True
    ):
        assert same(got, want) and torch.equal(
            got.nan_to_num().signbit(), want.nan_to_num().signbit()
        ), want.dtype
