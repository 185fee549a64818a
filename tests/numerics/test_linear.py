"""FP8Linear: its three products against float64 of the dequantized operands, and the layouts that the hardware's want."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.numerics import (
    E4M3,
    E5M2,
    FPROP,
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    FP8Linear,
    Region,
    Scaling,
)
from fp8cfg.numerics.amax import compute_amax
from fp8cfg.numerics.gemm import gemm
from fp8cfg.numerics.quantize import hadamard_transform, quantize, quantize_tiles
from fp8cfg.numerics.scaling import compute_global_scale, compute_scale
from fp8cfg.numerics.stored_state import fold_backward
from tests.support.fp8_net import (
    ALL,
    CURRENT,
    DELAYED,
    KINDS,
    TILED,
    dequantized,
    in_fp8,
    loss_of,
    ran,
)


def read_back(t: Tensor, role: int, axis: int, scaling: Scaling) -> Tensor:
    """`t` quantized and dequantized in float64; tiles by the code that test_block_scaling.py holds against others'."""
    tile, fmt = scaling.tile(role, axis), scaling.format_of(role)
    if tile is None:
        return dequantized(t, fmt)
    q = quantize_tiles(
        t,
        tile,
        fmt,
        scaling,
        torch.float32,
        compute_global_scale(t) if scaling.kind == "nvfp4" else None,
    )
    return q.data.double() if q.scale_inv is None else q.data.double() * q.scale_inv.double()


def skip_rows_on_2_11(rows: bool) -> None:
    """Skips a test that multiplies rows by torch._scaled_mm on a CPU, which torch 2.11 does not; runs on a CPU emulate."""
    if rows and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 multiplies rows on a GPU alone")


@pytest.mark.parametrize(
    ("scaling", "product"),
    [
        (s, p)
        for name, s in ALL.items()
        for p in ("emulate", "scaled_mm")
        if name != "nvfp4" and (p == "emulate" or s.kind in ("delayed", "current"))
    ],
    ids=lambda v: (
        v if isinstance(v, str) else f"{v.kind}-{v.granularity}-{v.power_2_scales}-{v.weights_2d}"
    ),
)
@pytest.mark.parametrize("rows", [16, 21, 150])  # tokens in any number
def test_against_float64_of_the_dequantized_operands(
    scaling: Scaling, product: str, rows: int
) -> None:
    skip_rows_on_2_11(product == "scaled_mm" and scaling.granularity == "row")
    linear = nn.Linear(160, 48)
    layer = FP8Linear.from_linear(linear, scaling, Region(True), product=product)  # type: ignore[arg-type]
    x, g = torch.randn(rows, 160), torch.randn(rows, 48) * 1e-6  # a scale of 1 would flush these
    x[:, 3] *= 100
    x.requires_grad_()
    y = layer(x)
    y.backward(g)
    w = linear.weight.detach()
    x1, x0, w1, w0, g1, g0 = (
        read_back(t.detach(), role, axis, scaling)
        for t, role in ((x, INPUT), (w, WEIGHT), (g, GRAD_OUTPUT))
        for axis in (1, 0)
    )
    want = (x1 @ w1.t() + linear.bias.double(), g1 @ w0, g0.t() @ x0, g.double().sum(0))
    for got, exact in zip((y, x.grad, linear.weight.grad, linear.bias.grad), want, strict=True):
        assert (got - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("mixes", [True, False])
def test_nvfp4_multiplies_what_its_parts_say(mixes: bool) -> None:
    """400 draws; without its transform the same of the plain tensors."""
    scaling, (x, w, g) = (
        replace(TILED["nvfp4"], hadamard=mixes),
        (torch.randn(40, 64), torch.randn(48, 64), torch.randn(40, 48) * 1e-6),
    )
    layer = FP8Linear.from_linear(nn.Linear(64, 48, bias=False), scaling, Region(True))
    layer.weight.data.copy_(w)
    x.requires_grad_()
    sums = torch.zeros(48, 64), torch.zeros(40, 64)
    for draw in range(400):
        torch.manual_seed(draw)
        layer.zero_grad()
        x.grad = None
        y = layer(x)
        y.backward(g)
        for total, grad in zip(sums, (layer.weight.grad, x.grad), strict=True):
            total += grad / 400
    w_read = read_back(w, WEIGHT, 0, scaling)
    mix = hadamard_transform if mixes else torch.Tensor.contiguous
    mixed = read_back(mix(x.detach().t()), INPUT, 1, scaling)
    torch.testing.assert_close(
        y.double(), read_back(x.detach(), INPUT, 1, scaling) @ w_read.t(), rtol=1e-5, atol=1e-5
    )
    # gradients are rounded at random; their mean is that of unrounded gradients
    for got, exact in zip(
        sums, (mix(g.t()).double() @ mixed.t(), g.double() @ w_read), strict=True
    ):
        assert (got - exact).norm() < 0.02 * exact.norm()
    assert ran(layer) == in_fp8(scaling)


def test_scale_of_one_flushes_small_first_gradients_as_transformer_engine_does() -> None:
    layer = FP8Linear.from_linear(
        nn.Linear(16, 16, bias=False), Scaling(first_step="te"), Region(True)
    )
    layer(torch.randn(16, 16)).backward(torch.full((16, 16), 1e-6))
    assert layer.weight.grad.count_nonzero() == 0
    fold_backward([layer])
    assert layer.fp8_amax_history[0, 2] == torch.tensor(1e-6)


@pytest.mark.parametrize("out", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "formats",
    [*itertools.product((E4M3, E5M2), repeat=2)],
    ids=lambda f: f"{f[0].name}-{f[1].name}",
)
@pytest.mark.parametrize("rows", [False, True])
def test_emulation_is_the_scaled_product(out: torch.dtype, formats: tuple, rows: bool) -> None:
    tensors = torch.randn(48, 256), torch.randn(32, 256)
    scales = [
        compute_scale(compute_amax(t), fmt.max) for t, fmt in zip(tensors, formats, strict=True)
    ]
    skip_rows_on_2_11(rows)
    results = []
    for carrier in (torch.bfloat16 if out == torch.bfloat16 else torch.float32, None):
        if rows:
            a, b = (
                quantize_tiles(t, (1, 0), f, TILED["row"], carrier or f.dtype)
                for t, f in zip(tensors, formats, strict=True)
            )
        else:
            a, b = (
                quantize(t, s, f, carrier or f.dtype)
                for t, s, f in zip(tensors, scales, formats, strict=True)
            )
        results.append(gemm(a, b, out, torch.zeros(3, dtype=torch.int32), FPROP).double())
    limit = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[
        out
    ]  # the last: rounded twice
    assert (results[0] - results[1]).norm() <= limit * results[1].norm()


def test_bfloat16_emulation_is_exact_where_scales_are_powers_of_two() -> None:
    a, b = torch.randn(48, 256), torch.randn(32, 256)
    pairs = [
        (quantize(t, torch.tensor(64.0), E4M3, c) for t in (a, b))
        for c in (torch.bfloat16, E4M3.dtype)
    ]
    emulated, real = (
        gemm(*pair, torch.bfloat16, torch.zeros(3, dtype=torch.int32), FPROP) for pair in pairs
    )
    assert (emulated == real).float().mean() > 0.99  # the order of summation remains


def test_quantizes_from_float32_and_not_from_a_rounded_product() -> None:
    x, scale = torch.randn(64, 4096).bfloat16(), torch.tensor(37.3)
    want = (x.float() * scale).clamp(-448, 448).to(E4M3.dtype).float()
    assert torch.equal(quantize(x, scale, E4M3, torch.bfloat16).data.float(), want)
    assert torch.equal(
        torch.compile(quantize, fullgraph=True)(x, scale, E4M3, torch.bfloat16).data.float(), want
    )
    assert not torch.equal((x * scale).clamp(-448, 448).to(E4M3.dtype).float(), want)


def test_nan_reaches_the_result() -> None:
    layer, x = FP8Linear.from_linear(nn.Linear(16, 16), CURRENT, Region(True)), torch.randn(4, 16)
    x[1, 2] = torch.nan
    assert layer(x).isnan().any(1).tolist() == [False, True, False, False]


@KINDS
def test_odd_shapes_and_no_rows(scaling: Scaling) -> None:
    layer = FP8Linear.from_linear(nn.Linear(7, 5), scaling, Region(True))
    for shape in ((7,), (3, 7), (2, 3, 7), (0, 7)):
        layer.zero_grad()
        x = torch.randn(shape, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert (y.shape, x.grad.shape, layer.weight.grad.shape) == ((*shape[:-1], 5), shape, (5, 7))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_infinite_float16_gradient_is_passed_on(frozen: bool, compiled: bool) -> None:
    """FP8 would saturate it. Behind a frozen weight the gradient of the input tells GradScaler."""
    linear = nn.Linear(32, 16, bias=False).half().requires_grad_(not frozen)
    layer = FP8Linear.from_linear(linear, DELAYED, Region(True))
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    x = torch.randn(8, 32).half().requires_grad_()
    gradient = torch.randn(8, 16).half()
    run(x).backward(gradient)
    assert x.grad is not None and x.grad.isfinite().all()
    layer.zero_grad()
    gradient[3, 3] = -torch.inf
    run(x).backward(gradient)
    told = x if frozen else layer.weight
    assert told.grad is not None and not told.grad.isfinite().any()


@pytest.mark.parametrize("shape", [(4, 64), (64,), (4, 33), ()])
def test_inputs_of_another_width_are_refused_and_not_recorded(shape: tuple[int, ...]) -> None:
    layer = FP8Linear.from_linear(nn.Linear(32, 16), DELAYED, Region(True))
    with pytest.raises(RuntimeError, match=r"expected 32 columns \(in_features\)"):
        layer(torch.ones(shape))
    assert layer.fp8_amax_history is not None
    assert not layer.fp8_amax_history.any()


def test_the_hardware_product_refuses_odd_features() -> None:
    with pytest.raises(
        ValueError, match="in_features=16 and out_features=10: scaled_mm needs both divisible by 16"
    ):
        FP8Linear.from_linear(nn.Linear(16, 10), CURRENT, Region(), product="scaled_mm")
    layer = FP8Linear.from_linear(nn.Linear(16, 16), CURRENT, Region(True), product="scaled_mm")
    layer(torch.randn(0, 16)).sum().backward()
    assert layer.weight.grad.count_nonzero() == 0


def test_the_hardware_product_gets_the_layout_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    real, fast = torch._scaled_mm, []

    def picky(a: Tensor, b: Tensor, **options: object) -> Tensor:
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        fast.append(options["use_fast_accum"])
        return real(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", picky)
    layer = FP8Linear.from_linear(nn.Linear(32, 48), DELAYED, Region(True), product="scaled_mm")
    loss_of(layer(torch.randn(21, 32, requires_grad=True))).backward()
    assert fast == [True, False, False]


E4M3_BLOCKS = Scaling("block", backward=E4M3, power_2_scales=True, weights_2d=True)


def test_block_products_get_the_layout_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the CUDA operation: it holds shapes and strides against cuBLAS's rules, and multiplies what was meant."""

    def dequantized_operand(t: Tensor, scale: Tensor, recipe: F.ScalingType) -> Tensor:
        assert t.shape[1] % 128 == 0 and t.is_contiguous() and t.dtype == torch.float8_e4m3fn
        if recipe is F.ScalingType.BlockWise1x128:
            assert (
                len(t) % 4 == 0
                and scale.shape == (len(t), t.shape[1] // 128)
                and scale.stride() == (1, len(t))
            )
            return t.float() * scale.repeat_interleave(128, 1)
        assert recipe is F.ScalingType.BlockWise128x128 and scale.shape == (
            -(-t.shape[1] // 128 // 4) * 4,
            -(-len(t) // 128),
        )
        assert scale.stride(0) == 1
        return t.float() * scale.t()[:, : t.shape[1] // 128].repeat_interleave(128, 0)[
            : len(t)
        ].repeat_interleave(128, 1)

    def picky(
        a: Tensor,
        b: Tensor,
        *,
        scale_a: Tensor,
        scale_recipe_a: object,
        scale_b: Tensor,
        scale_recipe_b: object,
        output_dtype: torch.dtype,
    ) -> Tensor:
        x, w = (
            dequantized_operand(a, scale_a, scale_recipe_a),
            dequantized_operand(b.t(), scale_b, scale_recipe_b),
        )
        return (x @ w.t()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", picky)
    for shape, scaling in (
        ((21, 160, 48), E4M3_BLOCKS),
        ((130, 256, 384), E4M3_BLOCKS),
        ((21, 160, 48), replace(E4M3_BLOCKS, weights_2d=False)),
    ):
        linear = nn.Linear(*shape[1:], bias=False)
        found = []
        for product in ("emulate", "scaled_mm"):
            layer = FP8Linear.from_linear(
                copy.deepcopy(linear), scaling, Region(True), product=product
            )
            x = torch.randn(
                shape[0], shape[1], generator=torch.Generator().manual_seed(0)
            ).requires_grad_()
            # traced, and not compiled for the CPU: inductor's loop splitting (torch 2.13) fails on float8 tiles there
            y = (
                torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
                if product == "scaled_mm"
                else layer(x)
            )
            loss_of(y).backward()
            found.append([y, x.grad, layer.weight.grad])
        for a, b in zip(*found, strict=True):
            assert (a - b).norm() <= 1e-6 * a.norm()
        assert ran(layer) == in_fp8(scaling, "scaled_mm")


def test_e5m2_gradients_in_blocks_are_no_product_of_the_hardware() -> None:
    """ATen takes E4M3 x E4M3 alone with scales of blocks: refused where the layer is made, unless both gradients' products are not in FP8."""
    linear = nn.Linear(32, 48)
    with pytest.raises(
        ValueError, match="scaled_mm multiplies block scaling only in E4M3, but gradients are E5M2"
    ):
        FP8Linear.from_linear(linear, TILED["block"], Region(), product="scaled_mm")
    FP8Linear.from_linear(
        linear, TILED["block"], Region(), product="scaled_mm", high_precision=(False, True, True)
    )
    FP8Linear.from_linear(linear, E4M3_BLOCKS, Region(), product="scaled_mm")


@pytest.mark.parametrize("name", ALL)
def test_float64_input_and_weights(name: str) -> None:
    layer = FP8Linear.from_linear(nn.Linear(32, 48).double(), ALL[name], Region(True))
    assert layer(torch.randn(5, 32, dtype=torch.float64)).isfinite().all()
