"""Against code that we did not write: Transformer Engine's own Python, bit for bit, and torchao's training step."""

from __future__ import annotations

import copy
import dataclasses
import types

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fp8cfg.numerics import E4M3, E5M2, INPUT, Format, FP8Linear, Region, Scaling, update_scales
from fp8cfg.numerics.amax import compute_amax
from fp8cfg.numerics.gemm import DGRAD, FPROP, gemm
from fp8cfg.numerics.quantize import quantize
from fp8cfg.numerics.scaling import choose_tensor_scale, compute_scale
from tests.numerics.test_block_scaling import matrices
from tests.support.te_stub import te_module

POSITIVE = st.floats(2.0**-149, width=32, allow_infinity=False)  # denormals too


@given(
    st.lists(POSITIVE, max_size=12),
    st.sampled_from(["max", "most_recent"]),
    st.sampled_from([1, 2, 4, 16]),
    st.sampled_from([0, 2]),
)
@settings(max_examples=20, deadline=None)
def test_delayed_scaling_over_forty_steps(
    special: list[float], algo: str, length: int, margin: int
) -> None:
    te = te_module("quantization")
    recipe = types.SimpleNamespace(
        amax_compute_algo=algo, scaling_factor_compute_algo=None, margin=margin
    )
    scaling = Scaling(
        margin=margin, amax_history_len=length, amax_compute_algo=algo, first_step="te"
    )
    layers = [FP8Linear.from_linear(nn.Linear(16, 16), scaling, Region()) for _ in range(2)]
    histories = [torch.zeros(length, 3) for _ in layers]
    scales = [torch.ones(3) for _ in layers]
    generator = torch.Generator().manual_seed(length + margin)
    for step in range(40):
        for layer, history, scale in zip(layers, histories, scales, strict=True):
            amax = torch.exp(torch.randn(3, generator=generator) * 4)
            if step < len(special):
                amax[step % 3] = special[step]
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


@given(matrices(16, 64), st.sampled_from([E4M3, E5M2]), st.booleans())
@settings(max_examples=300, deadline=None)
def test_current_scaling_quantizer(x: Tensor, fmt: Format, power_2: bool) -> None:
    """The reference lets a NaN or an infinity through to its scale, and takes the largest bfloat16 where the kernels take the
    largest float32: there native follows the kernels (test_scaling.py, by hand)."""
    amax = x.float().abs().amax()
    assume(
        amax.isfinite() and (amax == 0 or (fmt.max / amax).isfinite() or x.dtype == torch.float32)
    )
    te = te_module("custom_recipes.reference_current_scaling")
    want = te.CurrentScalingQuantizerRef(fmt.dtype, pow_2_scales=power_2).quantize(x)
    scale = choose_tensor_scale(
        x, INPUT, Scaling("current", forward=fmt, power_2_scales=power_2), None, None, record=False
    )
    real, emulated = quantize(x, scale, fmt, fmt.dtype), quantize(x, scale, fmt, torch.bfloat16)
    assert torch.equal(real.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(emulated.data.float(), want.data.float())
    assert real.scale_inv == emulated.scale_inv == want.scale


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("emulate", [True, False])
def test_torchaos_training_step_gives_the_same_gradients(granularity: str, emulate: bool) -> None:
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(granularity + "wise")
    config = dataclasses.replace(config, emulate=emulate)
    dtype = (
        torch.float32 if emulate else torch.bfloat16
    )  # torchao's rowwise product comes out in bfloat16 whatever it is given
    torch.manual_seed(0)
    ours = nn.Sequential(
        nn.Linear(64, 96, bias=False), nn.SiLU(), nn.Linear(96, 32, bias=False)
    ).to(dtype)
    theirs = copy.deepcopy(ours)
    float8.convert_to_float8_training(theirs, config=config)
    row = granularity == "row"  # torchao's rowwise: E4M3 everywhere, scales powers of two
    scaling = Scaling(
        "current", backward=E4M3 if row else E5M2, granularity=granularity, power_2_scales=row
    )
    for i in (0, 2):
        ours[i] = FP8Linear.from_linear(
            ours[i], scaling, Region(True), product="emulate" if emulate else "scaled_mm"
        )
    x = torch.randn(48, 64, dtype=dtype)
    found = []
    for model in (theirs, ours):
        given = x.clone().requires_grad_()
        y = model(given)
        y.float().pow(2).mean().backward()
        found.append([y, given.grad, *(p.grad for p in model.parameters())])
    limit = 2e-6 if emulate else 0  # the order of float32 sums
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= limit * want.norm()


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_product(out: torch.dtype) -> None:
    te = te_module("custom_recipes.reference_current_scaling")
    generator = torch.Generator().manual_seed(4)
    g, w = torch.randn(48, 64, generator=generator) * 1e-5, torch.randn(32, 64, generator=generator)
    ours = [
        quantize(t, compute_scale(compute_amax(t), fmt.max), fmt, fmt.dtype)
        for t, fmt in ((g, E5M2), (w, E4M3))
    ]
    ref = [te.CurrentScalingQuantizerRef(fmt.dtype) for fmt in (E5M2, E4M3)]
    a, b = (q.quantize(t) for q, t in zip(ref, (g, w), strict=True))
    for slot, split in ((FPROP, False), (DGRAD, True)):
        params = types.SimpleNamespace(use_split_accumulator=split)
        want = ref[0].qgemm(a.data, b.data, params, out, a.scale, b.scale)
        assert torch.equal(gemm(*ours, out, torch.zeros(3, dtype=torch.int32), slot), want)
