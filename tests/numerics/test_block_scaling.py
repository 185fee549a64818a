"""Scales by tile: against Transformer Engine's and torchao's own code bit for bit, and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fp8cfg.numerics import E2M1, E4M3, E5M2, GRAD_OUTPUT, INPUT, WEIGHT, Format, Scaling, quantize
from fp8cfg.numerics.amax import join_tiles, split_tiles
from fp8cfg.numerics.fp8_weights import pack, unpack
from fp8cfg.numerics.quantize import (
    HADAMARD_MATRIX,
    build_hadamard_matrix,
    hadamard_transform,
    quantize_tiles,
)
from fp8cfg.numerics.scaling import compute_global_scale, compute_tile_scales
from tests.support.kernel_values import expand_scales
from tests.support.pairs import pairwise
from tests.support.te_stub import te_module

INF, NAN = math.inf, math.nan
BLOCK, BLOCK_FP32 = (
    Scaling("block", backward=E4M3, power_2_scales=True, weights_2d=True),
    Scaling("block", weights_2d=True),
)
MX, NVFP4 = Scaling("mxfp8", backward=E4M3), Scaling("nvfp4", E2M1, E2M1, weights_2d=True)
EDGES = [0.0, -0.0, 1.0, -6.0, 448.0, 449.0, 3e38, -1e-38, 1e-40, 1e-45, INF, -INF, NAN]


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    a, b = (t.float() for t in (a, b))
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(), b.nan_to_num())


@st.composite
def matrices(draw: st.DrawFn, rows: int = 2, columns: int = 64) -> Tensor:
    """A matrix of one spread, some of its tiles of other spreads, and a few special values."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** draw(st.integers(-140, 125))
    x = x * 2.0 ** torch.randint(
        -8, 8, (rows, columns // 16), generator=generator
    ).repeat_interleave(16, 1)
    for value in draw(st.lists(st.sampled_from(EDGES) | st.floats(width=32), max_size=4)):
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = value
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


# --- MXFP8 against torchao


@given(matrices())
@settings(max_examples=300, deadline=None)
def test_mxfp8_is_torchaos_rceil_cast(x: Tensor) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    v = x.float().view(2, -1, 32).abs().amax(-1) / 448
    # torchao's log2 in float32 rounds the last units above a power of two away; the bits, and the hardware, do not.
    assume(not ((torch.frexp(v)[0] - 0.5).abs().lt(1e-5) & (torch.frexp(v)[0] != 0.5)).any())
    want_scale, want = mx.to_mx(x, torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
    got = quantize_tiles(x, (1, 32), E4M3, MX, torch.float8_e4m3fn)
    assert torch.equal(pack(got.scale_inv, MX), want_scale.view(torch.uint8))
    same(got.data, want)


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (448.0, 127),
        (448.1, 128),
        (0.0, 0),
        (INF, 254),
        (NAN, 255),
        (3.4e38, 247),
        (1e-40, 0),
        (448 * 2.0**-127, 0),
        (448 * 2.0**-126, 1),
        (448 * 2.0**-126.4, 1),
    ],
)
def test_e8m0_bytes(amax: float, byte: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = amax
    scales = compute_tile_scales(split_tiles(x, (1, 32)), E4M3, MX, None)
    packed = pack(scales.decode[:, 0, :, 0], MX)
    assert packed.item() == byte
    same(unpack(packed), scales.decode[:, 0, :, 0])
    if 0 < byte < 255:
        assert scales.encode.item() == 2.0 ** (127 - byte)


@pytest.mark.parametrize("compiling", [False, True])
def test_every_e8m0_byte_is_read(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    values = unpack(torch.arange(256, dtype=torch.uint8))
    assert (
        values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
        and values[255].isnan()
    )


# --- NVFP4 against Transformer Engine's reference


def te_nvfp4(tile: tuple[int, int], rht: bool) -> object:
    te = te_module("custom_recipes.reference_nvfp4")
    utils = te_module("custom_recipes.reference_utils")
    return te, te.NVFP4QuantizerRef(
        dtype=utils.Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=rht
    )


def from_fp4(te: object, q: Tensor) -> Tensor:
    return te.cast_from_fp4x2(q, torch.float32)


@given(matrices(32, 64), st.sampled_from([(1, 16), (16, 16)]))
@settings(max_examples=100, deadline=None)
def test_nvfp4_is_transformer_engines_reference(x: Tensor, tile: tuple[int, int]) -> None:
    te, ref = te_nvfp4(tile, rht=False)
    data, scale, *_, amax, _ = ref._quantize(x)
    whole = compute_global_scale(x)
    got = quantize_tiles(x, tile, E2M1, NVFP4, torch.float32, whole)
    decode = compute_tile_scales(split_tiles(x, tile), E2M1, NVFP4, whole).decode[:, 0, :, 0]
    same(expand_scales(decode, (32, 4), (tile[0], 1)), scale.float())
    if not x.isnan().any():  # FP4 has no NaN; the scales, NaN all over, say it
        same(got.data, from_fp4(te, data) * scale.float().repeat_interleave(16, 1))
        reference = torch.div(torch.tensor(2688.0), amax).clamp(max=torch.finfo(torch.float32).max)
        assert whole == (reference if reference != 0 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_mixes_columns_as_transformer_engine_does(dtype: torch.dtype) -> None:
    te, ref = te_nvfp4((1, 16), rht=True)
    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, _, data, scale, _, amax = ref._quantize(x)
    mixed = hadamard_transform(x.t())
    assert compute_global_scale(mixed) == torch.div(torch.tensor(2688.0), amax)
    got = quantize_tiles(mixed, (1, 16), E2M1, NVFP4, torch.float32, compute_global_scale(mixed))
    same(got.data, from_fp4(te, data) * scale.float().repeat_interleave(16, 1))


def test_the_transform_cancels_in_the_product_whatever_the_number_of_tokens() -> None:
    a, b = torch.randn(40, 8, dtype=torch.float64), torch.randn(40, 12, dtype=torch.float64)
    torch.testing.assert_close(hadamard_transform(a.t()) @ hadamard_transform(b.t()).t(), a.t() @ b)
    assert torch.equal(build_hadamard_matrix(a.device), HADAMARD_MATRIX), (
        "which compiled code makes on a GPU"
    )


# --- block scaling, worked out by hand on compute_scale_from_amax


@pytest.mark.parametrize(
    ("amax", "dtype", "scale", "power_of_2"),
    [
        (3.5, torch.float32, 128.0, 128.0),
        (3.0, torch.float32, 448 / 3, 128.0),
        (448.0, torch.bfloat16, 1.0, 1.0),
        (0.0, torch.float32, 1.0, 1.0),
        (INF, torch.float32, 1.0, 1.0),
        (NAN, torch.float32, 1.0, 1.0),  # alone in its tile: the others are zeros
        (1e-35, torch.float32, 4.48e37, 2.0**125),
        (1e-40, torch.float32, torch.finfo(torch.float32).max, 2.0**127),
        (1e-40, torch.bfloat16, torch.finfo(torch.bfloat16).max, 2.0**127),
        (6e-8, torch.float16, 448 / 5.9604645e-08, 2.0**32),
    ],
)
def test_block_scales(amax: float, dtype: torch.dtype, scale: float, power_of_2: float) -> None:
    x = torch.zeros(1, 256, dtype=dtype)
    x[0, 130] = amax
    plain, floored = (
        compute_tile_scales(split_tiles(x, (1, 128)).float(), E4M3, s, None, dtype).encode.flatten()
        for s in (BLOCK_FP32, BLOCK)
    )
    assert plain[0] == floored[0] == 1
    assert plain[1].item() == pytest.approx(scale, rel=1e-7)
    assert floored[1] == power_of_2


def test_nan_is_skipped_by_block_scaling_and_kept_by_mxfp8() -> None:
    x = torch.ones(1, 128)
    x[0, 5] = NAN
    block = quantize_tiles(x, (1, 128), E4M3, BLOCK, torch.float32)
    mx = quantize_tiles(x, (1, 32), E4M3, MX, torch.float32)
    assert block.data.isnan().sum() == 1 and block.data[0, 0] == 1
    assert mx.data.isnan().sum() == 32 and mx.data[0, 32] == 1


# --- tiles


@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1), (1, 0), (0, 1)])
@pytest.mark.parametrize("shape", [(256, 128), (100, 70), (1, 1), (3, 300)])
def test_every_tile_is_scaled_by_its_own_amax(
    shape: tuple[int, int], tile: tuple[int, int]
) -> None:
    x = torch.randn(shape)
    v = split_tiles(x, tile)
    torch.testing.assert_close(join_tiles(v, x.shape), x, rtol=0, atol=0)
    amax = torch.nn.functional.max_pool2d(
        torch.nn.functional.pad(
            x.abs(), (0, v.shape[2] * v.shape[3] - shape[1], 0, v.shape[0] * v.shape[1] - shape[0])
        )[None, None],
        (v.shape[1], v.shape[3]),
    )[0, 0]
    scaling = Scaling("current", granularity="row")
    scales = compute_tile_scales(v, E4M3, scaling, None).encode[:, 0, :, 0]
    assert torch.equal(scales, torch.div(torch.full_like(amax, 448.0), amax))
    assert expand_scales(scales, x.shape, tile).shape == x.shape


@pytest.mark.parametrize(
    ("scaling", "role", "axis", "dtype"),
    pairwise(
        [BLOCK, BLOCK_FP32, MX, NVFP4, Scaling("current", granularity="row")],
        [INPUT, WEIGHT, GRAD_OUTPUT],
        [0, 1],
        [torch.float32, torch.bfloat16],
    ),
    ids=lambda v: (
        f"{v.kind}-{v.power_2_scales}" if isinstance(v, Scaling) else str(v).removeprefix("torch.")
    ),
)
def test_compiled_as_eager(scaling: Scaling, role: int, axis: int, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    x = (torch.randn(300, 200, generator=torch.Generator().manual_seed(role)) * 1e-3).to(dtype)
    x[7], x[:, 9] = 0, x[:, 9] * 1e4
    carrier = torch.float32 if scaling is BLOCK_FP32 else torch.bfloat16
    tile, fmt, whole = (
        scaling.tile(role, axis),
        scaling.format_of(role),
        compute_global_scale(x) if scaling.kind == "nvfp4" else None,
    )

    def run() -> tuple:
        return quantize_tiles(x, tile, fmt, scaling, carrier, whole)

    one = run()
    other = torch.compile(run, fullgraph=True)()
    same(one.data, other.data)
    assert (one.scale_inv is None) == (other.scale_inv is None)
    if one.scale_inv is not None:
        same(one.scale_inv, other.scale_inv)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
def test_stochastic_rounding_is_right_on_average_and_never_leaves_the_grid(fmt: Format) -> None:
    from fp8cfg.numerics.formats import cast, round_in_steps

    torch.manual_seed(0)
    x = torch.linspace(-fmt.max, fmt.max, 31)
    draws = torch.stack([round_in_steps(x, fmt, torch.rand_like(x)) for _ in range(4000)])
    assert torch.equal(draws, cast(draws, fmt).float())
    step = draws.amax(0) - draws.amin(0)
    assert ((draws.mean(0) - x).abs() <= 0.05 * step + 1e-6 * fmt.max).all()
    assert torch.equal(
        round_in_steps(torch.tensor([NAN, INF, -INF, 0.0]), fmt, torch.rand(4)).nan_to_num(7),
        torch.tensor([7, fmt.max, -fmt.max, 0]),
    )


@given(st.lists(st.floats(width=32) | st.sampled_from(EDGES), min_size=1, max_size=64))
@settings(max_examples=200, deadline=None)
def test_steps_round_as_the_cast_does(values: list[float]) -> None:
    from fp8cfg.numerics.formats import cast, round_in_steps

    x = torch.tensor(values, dtype=torch.float32)
    for fmt in (E4M3, E5M2):
        same(round_in_steps(x, fmt), cast(x, fmt).float())


def test_the_transform_is_copied_to_a_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not where a mode of torch's sees operations, as in selective checkpoints and FakeTensorMode."""
    sent, gpu = list[torch.dtype](), torch.device("cuda", 0)
    monkeypatch.setattr(quantize, "copy_to_device", lambda t, device: sent.append(t.dtype) or t)
    quantize._cached_hadamard_matrix.cache_clear()
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32):
        assert torch.equal(quantize._hadamard_matrix(gpu, dtype), HADAMARD_MATRIX.to(dtype))
    assert sent == [torch.bfloat16, torch.float32]
    with FlopCounterMode(display=False):
        quantize._hadamard_matrix(gpu, torch.bfloat16)
    assert len(sent) == 3
    quantize._cached_hadamard_matrix.cache_clear()
