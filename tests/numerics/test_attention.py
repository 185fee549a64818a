"""FP8 attention: its values, dtypes, scales and state, eager and compiled."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8cfg.models.attention import CoreAttention
from fp8cfg.numerics import (
    GemmRecord,
    Region,
    Scaling,
    decode_gemm_record,
    discard_amax,
    high_precision_state_dict,
    update_scales,
)
from fp8cfg.numerics.fp8_attention import QKV, FP8Attention
from fp8cfg.numerics.stored_state import stored_state_dict
from tests.support.attention import CURRENT, DELAYED, both_ways, qkv

RAN = [GemmRecord("e4m3", "e4m3", "emulated")] * 2 + [GemmRecord("e5m2", "e4m3", "emulated")] * 4


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def ran(layer: FP8Attention) -> list[GemmRecord | None]:
    return [decode_gemm_record(code) for code in layer.gemms_ran.tolist()]


def state(layer: FP8Attention) -> list[Tensor]:
    return [layer.fp8_scale, layer.fp8_amax_history]


@pytest.mark.parametrize("scaling", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_attention(scaling: Scaling, dtype: torch.dtype) -> None:
    layer, t = FP8Attention(scaling, Region(True)), qkv(1, dtype)
    for got, want in zip(both_ways(layer, *t), both_ways(exact, *t), strict=True):
        assert got.dtype == dtype and 0.01 < (got - want).norm() / want.norm() < 0.2
    assert ran(layer) == RAN


@pytest.mark.parametrize("scaling", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_an_infinite_float16_gradient_is_passed_on(scaling: Scaling) -> None:
    layer = FP8Attention(scaling, Region(True))
    q, k, v, _ = qkv(1, torch.float16)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    output = layer(*inputs)
    gradient = torch.ones_like(output)
    gradient[0, 0, 0, 0] = torch.inf
    output.backward(gradient)
    for t in inputs:
        assert t.grad is not None and t.grad.isinf().all()


def test_outside_the_region_it_is_torchs() -> None:
    layer, t = FP8Attention(DELAYED, Region(True)), qkv(2)
    both_ways(layer, *t)
    before = [x.clone() for x in state(layer)]
    with layer.region.entered(False), torch.no_grad():
        layer.eval()(*t[:3])
    layer.train()
    assert ran(layer) == RAN  # of the training pass before the evaluation
    with layer.region.entered(False):
        for got, want in zip(both_ways(layer, *t), both_ways(exact, *t), strict=True):
            assert torch.equal(got, want)
    assert ran(layer) == [None] * 6 and all(map(torch.equal, state(layer), before))


def test_autocast_decides_the_dtype() -> None:
    layer, t = FP8Attention(CURRENT, Region(True)), qkv(3)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(*t[:3])
    y.backward(t[3].bfloat16())
    assert y.dtype == torch.bfloat16 and t[0].grad.dtype == torch.float32 and ran(layer) == RAN


def test_without_gradients_nothing_is_recorded_in_the_history() -> None:
    layer = FP8Attention(DELAYED, Region(True))
    with torch.no_grad():
        y = layer(*qkv(4)[:3])
    assert (
        not layer.fp8_amax_history.any()
        and torch.equal(y, layer(*qkv(4)[:3]))
        and layer.fp8_amax_history[0, :3].all()
    )


def test_microbatches_and_recomputation_leave_one_maximum() -> None:
    once, twice, again = (FP8Attention(DELAYED, Region(True)) for _ in range(3))
    for layer in (once, twice, again):
        layer.fp8_scale.copy_(torch.tensor([60.0, 300, 100, 1e5, 1e6, 2e5]))
    first, second = qkv(5), qkv(6)
    both_ways(once, *(torch.cat([a, b]) for a, b in zip(first, second, strict=True)))
    for t in (first, second):
        both_ways(twice, *t)
        both_ways(lambda *a: checkpoint(again, *a, use_reentrant=False), *t)
    assert torch.equal(once.fp8_amax_history, twice.fp8_amax_history) and torch.equal(
        twice.fp8_amax_history, again.fp8_amax_history
    )
    discard_amax([once])
    assert not once.fp8_amax_history.any()


def test_scales_move_at_their_interval_with_those_of_linear_layers() -> None:
    layer = FP8Attention(Scaling(amax_history_len=1, interval=2), Region(True))
    seen = []
    for step in range(1, 5):
        t = qkv(7)
        both_ways(layer, *(t[0] * step, *t[1:]))
        update_scales([layer], step=step)
        seen.append(layer.fp8_scale[QKV].item())
    assert seen[0] > seen[1] == seen[2] > seen[3]


def test_state_is_never_cast_and_travels() -> None:
    layer = FP8Attention(DELAYED, Region(True))
    both_ways(layer, *qkv(8))
    update_scales([layer])
    half = copy.deepcopy(layer).bfloat16()
    assert all(map(torch.equal, state(half), state(layer))) and half.region is not layer.region
    other = FP8Attention(DELAYED, Region(True))
    other.load_state_dict(stored_state_dict(layer))
    assert all(map(torch.equal, both_ways(other, *qkv(9)), both_ways(layer, *qkv(9))))
    assert high_precision_state_dict(stored_state_dict(layer)) == layer.state_dict() == {}
    other.load_state_dict({})  # new weights: what was seen is forgotten
    assert not any(t.any() for t in state(other))
    CoreAttention().load_state_dict(layer.state_dict())
    assert FP8Attention(CURRENT, Region()).state_dict() == {}


@pytest.mark.parametrize(
    "scaling",
    [Scaling("block"), Scaling("mxfp8"), Scaling("nvfp4"), Scaling("current", granularity="row")],
)
def test_scalings_with_many_scales_are_refused(scaling: Scaling) -> None:
    with pytest.raises(ValueError, match="one scale per tensor"):
        FP8Attention(scaling, Region())


@pytest.mark.parametrize(
    ("scaling", "backend"),
    [
        (DELAYED, "aot_eager"),
        (CURRENT, "aot_eager"),
        pytest.param(CURRENT, "inductor", marks=pytest.mark.slow),
    ],
    ids=["delayed-aot_eager", "current-aot_eager", "current-inductor"],
)
def test_compiled_it_agrees_with_eager(scaling: Scaling, backend: str) -> None:
    """Traced in one graph, forward and backward. Inductor's code takes a minute to compile, and under current scaling it holds the
    scales too."""
    results = []
    for compiled in (False, True):
        layer = FP8Attention(scaling, Region(True))
        forward = torch.compile(layer, fullgraph=True, backend=backend) if compiled else layer
        found = []
        for step in range(3):
            found += both_ways(forward, *qkv(step))
            update_scales([layer])
        assert ran(layer) == RAN
        results.append([*found, *(state(layer) if scaling is DELAYED else ())])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 0.01 * a.norm()
