"""FP8 attention against Transformer Engine's own emulation, from the Python of its wheel."""

from __future__ import annotations

import ast
import importlib.util
import types
import typing
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.numerics import E4M3, E5M2, Format, Region, Scaling, update_scales
from fp8cfg.numerics.amax import compute_amax
from fp8cfg.numerics.formats import cast
from fp8cfg.numerics.fp8_attention import DOUT, DP, DQKV, OUT, QKV, FP8Attention, S
from fp8cfg.numerics.scaling import compute_scale, floor_to_power_of_2
from tests.support.attention import CURRENT, both_ways, qkv

# Its functions and classes are read out of the source files, because the modules around them ask for triton and the compiled part
# when they are imported. What stands in for that part: a quantizer of torch casts, and the names that the code looks up.

FILES = {
    "backends.py": ("FP8EmulationFunc", "UnfusedDotProductAttention"),
    "softmax.py": ("FusedScaleMaskSoftmax",),
    "utils.py": ("combine_and_quantize", "combine_and_dequantize"),
}


@dataclass
class Float8Tensor:
    _data: Tensor
    scale_inv: Tensor
    dtype: torch.dtype

    @classmethod
    def make_like(cls, other: Float8Tensor, data: Tensor, dtype: torch.dtype) -> Float8Tensor:
        return cls(data, other.scale_inv, dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self._data.float() * self.scale_inv).to(dtype)


class Quantizer:
    """Quantizes with its `scale` (delayed scaling), or with the tensor's own; keeps the amax that it saw."""

    def __init__(
        self, fp8_dtype: Format, scale: Tensor | None = None, pow2: bool = False, device: str = ""
    ) -> None:
        self.dtype, self.scale, self.pow2, self.amax = fp8_dtype, scale, pow2, torch.zeros(())

    def __call__(self, t: Tensor) -> Float8Tensor:
        self.amax = compute_amax(t)
        scale = compute_scale(self.amax, self.dtype.max) if self.scale is None else self.scale
        scale = floor_to_power_of_2(scale) if self.pow2 else scale
        return Float8Tensor(cast(t.float() * scale, self.dtype), scale.reciprocal(), t.dtype)


def te_attention(quantizers: list[Quantizer]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Transformer Engine's emulated attention with quantizers in the order of our columns."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("transformer-engine is not installed")
    in_its_order = [quantizers[column] for column in (QKV, OUT, S, DQKV, DOUT, DP)]
    current = types.SimpleNamespace(float8_current_scaling=lambda: quantizers[0].scale is None)
    found: dict[str, Any] = {
        **{
            name: getattr(typing, name)
            for name in ("Any", "Callable", "Dict", "List", "Optional", "Tuple", "Union")
        },
        "torch": torch,
        "F": F,
        "nn": nn,
        "os": mock.Mock(getenv=lambda *_: "0"),
        "nullcontext": nullcontext,
        "export": mock.Mock(),
        "is_in_onnx_export_mode": lambda: False,
        "no_torch_dynamo": lambda: lambda f: f,
        "InferenceParams": object,
        "QKVLayouts": ["bshd_bshd_bshd"],
        "attention_mask_func": lambda x, mask: x.masked_fill(mask, -10000.0),
        "Float8Tensor": Float8Tensor,
        "QuantizedTensorStorage": Float8Tensor,
        "Float8CurrentScalingQuantizer": Quantizer,
        **dict.fromkeys(
            ("MXFP8Quantizer", "MXFP8Tensor", "MXFP8TensorStorage"), type("Absent", (), {})
        ),
        "FP8GlobalStateManager": types.SimpleNamespace(get_fp8_recipe=lambda: current),
        "dpa_utils": types.SimpleNamespace(
            get_qkv_format=lambda *_: ("bshd", "bshd", "bshd"),
            get_attention_quantizers=lambda *_: in_its_order,
            get_full_mask=lambda *_, attn_mask_type, attention_mask, **__: (
                attn_mask_type,
                attention_mask,
                None,
                None,
            ),
        ),
    }
    for file, names in FILES.items():
        source = (
            Path(spec.origin)
            .parent.joinpath("pytorch/attention/dot_product_attention", file)
            .read_text(encoding="utf-8")
        )
        wanted = [node for node in ast.parse(source).body if getattr(node, "name", "") in names]
        exec(compile(ast.Module(wanted, []), file, "exec"), found)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        te = found["UnfusedDotProductAttention"](q.shape[-1] ** -0.5)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)[None, None]
        with mock.patch("torch.cuda.current_device", return_value="cpu"):
            y = te(
                {},
                *(t.transpose(1, 2) for t in (q, k, v)),
                qkv_layout="bshd_bshd_bshd",
                attn_mask_type="arbitrary",
                attention_mask=mask,
                fp8=True,
            )
        return y.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

    return attend


def quantizers(scaling: Scaling, scales: Tensor | None = None) -> list[Quantizer]:
    formats = [scaling.forward] * 3 + [scaling.backward] * 3
    return [
        Quantizer(f, None if scales is None else scales[i], scaling.power_2_scales)
        for i, f in enumerate(formats)
    ]


def assert_same_but_for_ties(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """float32 sums of another order move a value across a rounding boundary now and then: less than one in a hundred."""
    for a, b in zip(ours, theirs, strict=True):
        assert ((a - b).abs() > 1e-5 * b.abs().max()).double().mean() < 0.01


@pytest.mark.parametrize(
    "scaling",
    [CURRENT, Scaling("current", backward=E4M3), Scaling("current", power_2_scales=True)],
    ids=["hybrid", "e4m3", "pow2"],
)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_current_scaling_is_transformer_engines(scaling: Scaling, heads: int, groups: int) -> None:
    t = qkv(heads, heads=heads, groups=groups)
    assert_same_but_for_ties(
        both_ways(FP8Attention(scaling, Region(True)), *t),
        both_ways(te_attention(quantizers(scaling)), *t),
    )


@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_scaling_is_transformer_engines_step_by_step(margin: int) -> None:
    scaling = Scaling(amax_history_len=8, margin=margin, first_step="te")
    layer = FP8Attention(scaling, Region(True))
    for step in range(4):
        theirs, t = quantizers(scaling, layer.fp8_scale.clone()), qkv(step)
        with torch.no_grad():
            t[3] *= 1e4  # or the scale 1 of the first step flushes the gradients
        assert_same_but_for_ties(both_ways(layer, *t), both_ways(te_attention(theirs), *t))
        amaxes = torch.stack([q.amax for q in theirs])
        torch.testing.assert_close(layer.fp8_amax_history[0], amaxes, rtol=0.02, atol=0)
        update_scales([layer])
        assert (layer.fp8_amax_history[-1] > 0).all() and not layer.fp8_amax_history[0].any()
    top = torch.tensor([E4M3.max] * 3 + [E5M2.max] * 3) / 2**margin
    assert torch.equal(layer.fp8_scale, top / layer.fp8_amax_history.amax(0))


def test_in_bfloat16_it_is_as_near_to_its_float32_self_as_transformer_engines() -> None:
    """What differs is that its emulation rounds to bfloat16 between any two operations, ours only what a product returns."""
    wide, narrow = qkv(0), qkv(0, torch.bfloat16)
    with torch.no_grad():
        for a, b in zip(wide, narrow, strict=True):
            a.copy_(b)
    want = both_ways(FP8Attention(CURRENT, Region(True)), *wide)
    ours, theirs = (
        both_ways(FP8Attention(CURRENT, Region(True)), *narrow),
        both_ways(te_attention(quantizers(CURRENT)), *narrow),
    )
    for w, a, b in zip(want, ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16 and (a - w).norm() < 1.2 * (b - w).norm()
