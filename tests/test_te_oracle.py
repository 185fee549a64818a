"""Against Transformer Engine's own Python, bit for bit."""

from __future__ import annotations

import types

import pytest
import torch
from te_stub import te_module
from torch import nn

from fp8cfg.numerics import E4M3, E5M2, Format, FP8Linear, Region, Scaling, update_scales
from fp8cfg.numerics.gemm import DGRAD, FPROP, gemm
from fp8cfg.numerics.quantize import quantize
from fp8cfg.numerics.scaling import amax_of, scale_from_amax


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 4, 16])
@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_scaling_over_forty_steps(algo: str, length: int, margin: int) -> None:
    te = te_module("quantization")
    recipe = types.SimpleNamespace(amax_compute_algo=algo, scaling_factor_compute_algo=None, margin=margin)
    scaling = Scaling(margin=margin, amax_history_len=length, amax_compute_algo=algo, first_step="te")
    layers = [FP8Linear.from_linear(nn.Linear(16, 16), scaling, Region()) for _ in range(2)]
    histories = [torch.zeros(length, 3) for _ in layers]
    scales = [torch.ones(3) for _ in layers]
    generator = torch.Generator().manual_seed(length + margin)
    for _ in range(40):
        for layer, history, scale in zip(layers, histories, scales, strict=True):
            amax = torch.exp(torch.randn(3, generator=generator) * 4)
            layer.fp8_amax_history[0], history[0] = amax, amax
            for column, fp8_max in enumerate((448.0, 448.0, 57344.0)):
                # As a tensor: by a Python number torch would multiply with the reciprocal, and TE's kernels truly divide.
                one = history[:, column].clone(), scale[column].clone()
                te._amax_and_scale_update(*one, torch.tensor(fp8_max), recipe)
                history[:, column], scale[column] = one
        update_scales(layers)
        for layer, history, scale in zip(layers, histories, scales, strict=True):
            assert torch.equal(layer.fp8_scale, scale)
            assert torch.equal(layer.fp8_amax_history, history)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 3e4])
def test_current_scaling_quantizer(fmt: Format, dtype: torch.dtype, spread: float) -> None:
    te = te_module("custom_recipes.reference_current_scaling")
    x = (torch.randn(48, 64, generator=torch.Generator().manual_seed(3)) * spread).to(dtype)
    want = te.CurrentScalingQuantizerRef(fmt.dtype).quantize(x)
    scale = scale_from_amax(amax_of(x), fmt)
    real, emulated = quantize(x, scale, fmt, fmt.dtype), quantize(x, scale, fmt, torch.bfloat16)
    assert torch.equal(real.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(emulated.data.float(), want.data.float())
    assert real.scale_inv == emulated.scale_inv == want.scale


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_product(out: torch.dtype) -> None:
    te = te_module("custom_recipes.reference_current_scaling")
    generator = torch.Generator().manual_seed(4)
    g, w = torch.randn(48, 64, generator=generator) * 1e-5, torch.randn(32, 64, generator=generator)
    ours = [quantize(t, scale_from_amax(amax_of(t), fmt), fmt, fmt.dtype) for t, fmt in ((g, E5M2), (w, E4M3))]
    ref = [te.CurrentScalingQuantizerRef(fmt.dtype) for fmt in (E5M2, E4M3)]
    a, b = (q.quantize(t) for q, t in zip(ref, (g, w), strict=True))
    for slot, split in ((FPROP, False), (DGRAD, True)):
        params = types.SimpleNamespace(use_split_accumulator=split)
        want = ref[0].qgemm(a.data, b.data, params, out, a.scale, b.scale)
        assert torch.equal(gemm(*ours, out, torch.zeros(3, dtype=torch.int32), slot), want)
