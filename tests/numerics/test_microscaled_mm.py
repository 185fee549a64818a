"""MXFP8 and NVFP4 as Blackwell multiplies them: layouts against torchao's, and layers whose products read these layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.numerics import (
    E2M1,
    E4M3,
    FP8Linear,
    Region,
    Scaling,
    decode_gemm_record,
    seed_rounding,
)
from fp8cfg.numerics.gemm import pack_e2m1, swizzle_scales

kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
blocked = pytest.importorskip("torchao.prototype.mx_formats.utils")

SCALINGS = {
    "mxfp8": Scaling("mxfp8", backward=E4M3),
    "mxfp8 squares": Scaling("mxfp8", backward=E4M3, weights_2d=True),
    "nvfp4": Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True),
    "nvfp4 rows": Scaling("nvfp4", forward=E2M1, backward=E2M1, hadamard=False, stochastic=False),
}


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (77, 3), (300, 9), (256, 8)])
def test_scales_are_in_the_order_of_torchao(shape: tuple[int, int]) -> None:
    scales = torch.randint(1, 120, shape, dtype=torch.uint8)
    assert torch.equal(swizzle_scales(scales), blocked.to_blocked(scales))


def test_four_bits_are_torchaos() -> None:
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    t = torch.cat([values, -values])[torch.randint(16, (6, 64))]
    assert torch.equal(
        pack_e2m1(t.to(E4M3.dtype).view(torch.uint8)),
        kernels.pack_uint4(kernels.f32_to_f4_unpacked(t)),
    )


def reference(
    a: Tensor,
    b: Tensor,
    scale_a: Any,
    recipe_a: Any,
    scale_b: Any,
    recipe_b: Any,
    swizzle_a: Any,
    swizzle_b: Any,
    output_dtype: torch.dtype,
) -> Tensor:
    """The product that cuBLAS takes, of values that torchao's inverses read from the layouts; with ATen's checks of them."""
    wide = [
        _read(t, scale, recipe, swizzle)
        for t, scale, recipe, swizzle in (
            (a, scale_a, recipe_a, swizzle_a),
            (b.t(), scale_b, recipe_b, swizzle_b),
        )
    ]
    return (wide[0] @ wide[1].T).to(output_dtype)


def _read(t: Tensor, scale: Any, recipe: Any, swizzle: Any) -> Tensor:
    assert t.is_contiguous() and t.stride(0) * t.element_size() % 16 == 0
    whole, four = 1.0, isinstance(scale, list)
    if four:
        assert recipe == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise] and swizzle == [
            F.SwizzleType.SWIZZLE_32_4_4,
            F.SwizzleType.NO_SWIZZLE,
        ]
        scale, whole = scale
        assert (
            t.dtype == torch.float4_e2m1fn_x2
            and scale.dtype == torch.float8_e4m3fn
            and whole.dtype == torch.float32
        )
        values = kernels.f4_unpacked_to_f32(kernels.unpack_uint4(t.view(torch.uint8)))
    else:
        assert recipe == F.ScalingType.BlockWise1x32 and swizzle == F.SwizzleType.SWIZZLE_32_4_4
        assert t.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu
        values = t.float()
    block, (rows, columns) = 16 if four else 32, values.shape
    per = -(-columns // block)
    assert scale.is_contiguous() and scale.numel() == -(-rows // 128) * 128 * -(-per // 4) * 4
    each = blocked.from_blocked(scale.view(torch.uint8), rows, per).view(scale.dtype).float()
    return values * each.repeat_interleave(block, 1)[:, :columns] * whole


def layer(scaling: Scaling, product: Any, fp8_params: bool, dtype: torch.dtype) -> FP8Linear:
    torch.manual_seed(3)
    made = FP8Linear.from_linear(
        nn.Linear(80, 48, dtype=dtype),
        scaling,
        Region(active=True),
        product=product,
        fp8_params=fp8_params,
    )
    seed_rounding(made, 1)
    return made


@pytest.mark.parametrize("fp8_params", [False, True])
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 37), (torch.bfloat16, 64)])
@pytest.mark.parametrize("name", SCALINGS)
def test_forward_and_gradients_are_those_of_emulation(
    name: str, dtype: torch.dtype, tokens: int, fp8_params: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both multiply the same values and differ by the order of sums: 80 inputs and 37 tokens are no whole tiles of 32."""
    monkeypatch.setattr(F, "scaled_mm", reference)
    generator = torch.Generator().manual_seed(7)
    x0, dy = (torch.randn(tokens, n, generator=generator).to(dtype) for n in (80, 48))
    found = []
    for product in ("emulate", "scaled_mm"):
        linear, x = layer(SCALINGS[name], product, fp8_params, dtype), x0.clone().requires_grad_()
        y = linear(x)
        y.backward(dy)
        ran = [decode_gemm_record(int(code)) for code in linear.gemms_ran]
        kind = "e2m1" if "nvfp4" in name else "e4m3"
        assert all(
            r is not None and r == (kind, kind, "emulated" if product == "emulate" else "scaled_mm")
            for r in ran
        )
        found.append((y.detach(), x.grad, linear.parameter.grad, linear.bias.grad))
    for want, got in zip(*found, strict=True):
        bound = (
            {"rtol": 1e-5, "atol": 2e-5}
            if dtype == torch.float32
            else {"rtol": 2**-7, "atol": 2**-5}
        )
        torch.testing.assert_close(got, want, **bound)


def test_a_broken_layout_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of the test above fails on scales that stand in rows."""
    monkeypatch.setattr(F, "scaled_mm", reference)
    monkeypatch.setattr(
        "fp8cfg.numerics.gemm.swizzle_scales",
        lambda scales: F.pad(scales, (0, -scales.shape[1] % 4, 0, -len(scales) % 128)).flatten(),
    )
    x = torch.randn(64, 80)
    want, got = (
        layer(SCALINGS["mxfp8"], product, False, torch.float32)(x)
        for product in ("emulate", "scaled_mm")
    )
    assert (want - got).abs().max() > 0.1
