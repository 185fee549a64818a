"""Storage codecs against MS-AMP's documented numbers, torchao's quantizer, and what each promises."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8cfg.numerics import codecs
from fp8cfg.numerics.amax import compute_amax_or_nan
from fp8cfg.numerics.codecs import BF16, CODECS, FP32, Codec, get_codec
from fp8cfg.numerics.formats import E4M3, random_key, square_root
from fp8cfg.schema.precision import Codec as CodecName
from tests.support.codec_values import ALL, KEY, normal, values

CPU = torch.device("cpu")


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True)
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    return (
        x.contiguous()
        .view(-1)
        .view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])
    )


def test_names_are_those_of_the_storage_keys() -> None:
    assert set(CODECS) == set(get_args(CodecName)) - {"auto", "none"}


def test_what_is_refused() -> None:
    for call, words in (
        (lambda: get_codec("fp9"), "codec 'fp9'; choose from fp32, bf16"),
        (
            lambda: get_codec("fp32", "stochastic"),
            "codec fp32: float32 values are not rounded",
        ),
        (lambda: Codec(E4M3, "exact", block=96), "block=96: needs a scale, and a power of two"),
        (lambda: Codec(BF16, block=128), "block=128: needs a scale"),
        (
            lambda: get_codec("bf16", "stochastic").encode(normal(3)),
            "codec bf16: stochastic rounding needs a key",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()


# Extremes: the first two are traps of MS-AMP.


@pytest.mark.parametrize("name", ["fp16_scaled", "fp8_pow2", "fp8", "fp8_block"])
@pytest.mark.parametrize("amax", [1e-30, 1e-36, 1.2e-38, 1e-40, 1e-45])
def test_trap_tiny_amax_gives_no_infinite_scale(name: str, amax: float) -> None:
    x = torch.tensor([amax, -amax / 2, 0.0])
    data, scale_inv = get_codec(name).encode(x)
    decoded = get_codec(name).decode((data, scale_inv))
    assert (
        torch.isfinite(scale_inv).all()
        and (scale_inv > 0).all()
        and torch.isfinite(1 / scale_inv).all()
    )
    assert torch.allclose(decoded, x, rtol=0.07, atol=2.0**-135)


@pytest.mark.parametrize("name", ["fp16_scaled", "fp8_pow2", "fp8"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_trap_non_finite_values_show(name: str, bad: float) -> None:
    """MS-AMP divides 1 by the old scale and clamps infinity to the largest value."""
    stored = get_codec(name).encode(torch.tensor([1.0, bad, 2.0]))
    assert not torch.isfinite(stored[1]) and get_codec(name).decode(stored).isnan().all()


@pytest.mark.parametrize("second_moment", [False, True])
def test_non_finite_values_are_lost_with_their_block_alone(second_moment: bool) -> None:
    x = normal(384).abs()
    x[130] = math.inf
    decoded = values(get_codec("fp8_block", second_moment=second_moment), x)
    assert decoded.isnan().tolist() == [False] * 128 + [True] * 128 + [False] * 128


def test_unscaled_codecs_do_as_torch_does() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e5, 1.0])
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        assert torch.equal(values(get_codec(name), x), x.to(dtype).float()) or torch.allclose(
            values(get_codec(name), x), x.to(dtype).float(), equal_nan=True
        )


@pytest.mark.parametrize("c", ALL.values(), ids=ALL)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1,), (3, 5), (2, 128), (129,)])
def test_shapes_zeros_and_bytes(c: Codec, shape: tuple[int, ...]) -> None:
    stored, fresh = c.encode(torch.zeros(shape), KEY), c.zeros(torch.Size(shape), CPU)
    assert [s.shape for s in stored] == [s.shape for s in fresh] and [s.dtype for s in stored] == [
        s.dtype for s in fresh
    ]
    assert (
        stored[0].shape == shape
        and not c.decode(stored).any()
        and not c.decode(fresh).any()
        and c.decode(fresh).shape == shape
    )
    assert torch.isfinite(torch.cat([s.float().view(-1) for s in stored])).all()
    count, blocks = (
        stored[0].numel(),
        math.ceil(stored[0].numel() / c.block) if c.block else int(c.per_tensor),
    )
    scale = 8 if c.expand else 4
    assert sum(s.nbytes for s in stored) == count * c.format.dtype.itemsize + scale * blocks
    assert c.bytes_per_element == {"fp32": 4, "bf16": 2, "fp16": 2}.get(c.format.name, 1) + (
        scale / 128 if c.block else 0
    )


LARGEST_ERROR = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "e4m3": 2.0**-4, "e5m2": 2.0**-3}


@pytest.mark.parametrize("c", [c for c in ALL.values() if not c.expand], ids=str)
def test_error_is_half_a_unit_or_a_whole_one(c: Codec) -> None:
    x = normal(5, 400, scale=3.0) + 4.0 if not c.root else normal(5, 400).square() + 0.1
    x = x.clamp(min=0.1)  # of which none is below the smallest normal number
    bound = (
        LARGEST_ERROR[c.format.name]
        * (2 if c.rounding == "stochastic" else 1)
        * (2.2 if c.root else 1.001)
    )
    assert ((values(c, x) - x).abs() / x).max() <= bound


@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
def test_exact_scales_bring_the_amax_to_the_maximum(name: str) -> None:
    x = normal(128, scale=1e-3)
    data, _ = get_codec(name).encode(x)
    assert data.float().abs().max() == 448.0 and torch.allclose(
        values(get_codec(name), x).abs().max(), x.abs().max(), rtol=1e-6
    )


def test_blocks_are_torchaos() -> None:
    quantize = pytest.importorskip("torchao.optim.subclass_fp8").quantize_fp8
    for seed, scale in enumerate((1.0, 1e-4, 100.0)):
        x = normal(8, 512, seed=seed, scale=scale) * torch.exp(normal(8, 512, seed=9, scale=4.0))
        assert same(Codec(E4M3, "exact", block=256).encode(x), quantize(x, 256))


def test_roots_keep_small_second_moments() -> None:
    """Over 2^36 of range within a block; on a linear grid what is 2^-18 below the largest is 0."""
    v = torch.exp2(torch.linspace(-40.0, 0.0, 128))
    root, linear = values(ALL["root"], v), values(get_codec("fp8_block"), v)
    assert (linear[v < 2.0**-19] == 0).all() and (root > 0).all()
    assert (
        (root / v)[v > 2.0**-29].log2().abs() < 0.4
    ).all()  # 2^-29 is the square of the smallest normal number, 2^-6 / 448
    assert values(ALL["root"], torch.tensor([1.0, 1e-30, 0.0])).tolist()[1:] == [
        pytest.approx((2.0**-9 / 448) ** 2),
        0.0,
    ]


def test_second_moments_come_down_again_only_when_rounded_stochastically() -> None:
    """Half of the gradients shrink by 33; beta 0.99, 750 steps: exp(-7.5) of what was there is left to forget."""

    def ratio(c: Codec) -> torch.Tensor:
        v, exact, generator = torch.zeros(4096), torch.zeros(4096), torch.Generator().manual_seed(0)
        size = torch.exp(torch.randn(4096, generator=generator))
        for step in range(1500):
            if step == 750:
                size[::2] /= 33
            g = size * torch.randn(4096, generator=generator)
            exact = 0.99 * exact + 0.01 * g * g
            v = c.decode(c.encode(0.99 * v + 0.01 * g * g, random_key(0, step)))
        return v / exact

    stochastic, nearest = ratio(ALL["root"]), ratio(replace(ALL["root"], rounding="nearest"))
    assert 0.97 < stochastic.log().mean().exp() < 1.03 and stochastic.max() < 30
    assert nearest.log().mean().exp() > 10 and nearest.max() > 1000


# Pieces and compilers.


@pytest.mark.parametrize("c", ALL.values(), ids=ALL)
def test_store_gives_the_bits_of_encode_whatever_the_pieces(
    c: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(3, 1000).abs()
    for dtype, chunk in ((torch.float32, 1 << 16), (torch.float32, 1024), (torch.bfloat16, 256)):
        monkeypatch.setattr(codecs, "CHUNK", chunk)
        stored = c.zeros(x.shape, CPU)
        c.store(x.to(dtype), stored, KEY)
        assert same(stored, c.encode(x.to(dtype).float(), KEY))


def test_compiled_code_gives_the_same_bits() -> None:
    def all_of_them(x: torch.Tensor, key: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        found = []
        for c in ALL.values():
            stored = c.encode(x, key)
            into = c.zeros(x.shape, x.device)
            c.store(x, into, key)
            found += [stored, (c.decode(stored),), into]
        return found

    x = (normal(40, 33) * torch.exp(normal(40, 33, seed=1, scale=6.0))).abs()
    compiled = torch.compile(all_of_them, fullgraph=True, options={"emulate_precision_casts": True})
    for a, b in zip(all_of_them(x, KEY), compiled(x, KEY), strict=True):
        assert same(a, b)


def test_square_root_is_the_nearest() -> None:
    x = torch.exp(normal(100_000, scale=20.0))
    assert torch.equal(square_root(x), x.double().sqrt().float())


@pytest.mark.parametrize(
    ("x", "amax"),
    [([], 0.0), ([0.0, -3.0, 2.0], 3.0), ([1.0, math.nan], math.nan), ([-math.inf, 1.0], math.inf)],
)
def test_amax_or_nan(x: list[float], amax: float) -> None:
    assert compute_amax_or_nan(torch.tensor(x)).item() == pytest.approx(amax, nan_ok=True)


def test_safetensors_round_trip(tmp_path: Path) -> None:
    stored = {
        f"w.{name}.{i}": t
        for name, c in ALL.items()
        for i, t in enumerate(c.encode(normal(7, 130).abs(), KEY))
    }
    save_file(stored, tmp_path / "state.safetensors")
    read = load_file(tmp_path / "state.safetensors")
    assert all(same((stored[k],), (read[k],)) for k in stored)


def test_str_says_what_the_bytes_mean() -> None:
    assert [
        str(ALL[n])
        for n in ("fp32", "fp16_scaled", "fp8_block", "root", "fp8 e5m2", "bf16 stochastic")
    ] == ["fp32", "fp16 pow2", "e4m3 exact 128", "e4m3 exact 128 root", "e5m2 exact", "bf16"]
    assert CODECS["fp32"].format == FP32
