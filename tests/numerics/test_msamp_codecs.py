"""Storage codecs against what MS-AMP's tests state: common/dtype, common/tensor/test_meta, test_cast, test_tensor of Azure/MS-AMP."""

from __future__ import annotations

import pytest
import torch

from fp8cfg.numerics.codecs import CODECS, FP16, Codec, get_codec
from fp8cfg.numerics.formats import E4M3, E5M2, pow2_scale
from tests.support.codec_values import ALL, normal, values


def test_msamp_largest_values() -> None:
    assert [f.max for f in (E4M3, E5M2, FP16)] == [448.0, 57344.0, 65504.0]


def test_msamp_scales() -> None:
    assert pow2_scale(torch.tensor([0.0, 10.0, 10000.0]), 448.0).tolist() == [1.0, 32.0, 1 / 32]


@pytest.mark.parametrize("top", [448.0, 57344.0, 65504.0])
def test_pow2_scale_is_msamps_formula(top: float) -> None:
    """Always in double precision. In float32 the logarithm of a quotient just below a power of two is rounded up to it."""
    amax = torch.cat(
        [
            torch.exp(normal(500_000, scale=16.0)),
            top * torch.exp2(torch.arange(-60.0, 60.0)),
            torch.exp2(torch.arange(-60.0, 60.0)),
        ]
    )
    scale = pow2_scale(amax, top)
    assert torch.equal(scale, torch.exp2(torch.floor(torch.log2(top / amax.double()))).float())
    exponent = torch.floor(torch.log2(top / amax))
    in_float32 = torch.where(
        exponent < 0, 1 / torch.round(torch.exp2(-exponent)), torch.round(torch.exp2(exponent))
    )
    assert (scale != in_float32).float().mean() < 1e-5 and ((in_float32 / scale) <= 2).all()


def test_msamp_cast() -> None:
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(100))
    half = x.half().float()
    assert torch.allclose(values(CODECS["fp8_pow2"], half), half, rtol=0, atol=0.1)
    assert torch.allclose(values(CODECS["fp16_scaled"], x), x, rtol=0, atol=1e-3)


MSAMP_TYPES = [
    CODECS["fp8_pow2"],
    ALL["fp8_pow2 e5m2"],
    CODECS["fp16_scaled"],
    CODECS["bf16"],
    CODECS["fp32"],
]


@pytest.mark.parametrize("first", MSAMP_TYPES, ids=str)
@pytest.mark.parametrize("second", MSAMP_TYPES, ids=str)
def test_msamp_every_pair_of_types(first: Codec, second: Codec) -> None:
    x = normal(4, 4)
    tolerance = (
        0.15 if E5M2 in (first.format, second.format) else 0.1
    )  # half a unit of E5M2 is an eighth
    assert torch.allclose(values(second, values(first, x)), x, rtol=tolerance, atol=tolerance)


def test_msamp_small_values() -> None:
    assert values(CODECS["bf16"], torch.tensor([1 / 512])).item() == 1 / 512
    through = values(
        CODECS["fp8_pow2"], values(CODECS["fp16_scaled"], torch.full((4, 4), 2.0**-17))
    )
    assert torch.allclose(through, torch.full((4, 4), 2.0**-17))


def test_msamp_mul_and_div_touch_the_scale_alone() -> None:
    for name in ("fp16_scaled", "fp8_pow2", "fp8", "fp8_block"):
        data, scale_inv = get_codec(name).encode(normal(300))
        value = get_codec(name).decode((data, scale_inv))
        assert torch.equal(get_codec(name).decode((data, scale_inv * 2)), value * 2)
        assert torch.equal(get_codec(name).decode((data, scale_inv * 0.25)), value * 0.25)
