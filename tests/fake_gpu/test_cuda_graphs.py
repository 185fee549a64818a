"""CUDA graphs that Inductor makes of a layer (mode="reduce-overhead", mode="max-autotune", TORCHINDUCTOR_CUDAGRAPHS=1): operators that count
overflowed values in the place of a step are in none.

Runs where torch has a CUDA device, also a fake one (tools/fake_gpu), which captures nothing: what Inductor would capture runs as it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device, not even a fake one", allow_module_level=True)

from fp8cfg.numerics import FP8Linear, Region
from tests.support.fp8_net import CURRENT

CAPTURED = re.compile(r"def partition_\d+\(.*?\n    return ", re.DOTALL)
COUNTERS = {"emulate": "count_overflow", "scaled_mm": "quantize_tensor"}


@pytest.mark.parametrize("product", COUNTERS)
def test_what_counts_is_not_captured(product: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = list[Callable[..., Any]]()

    def as_it_is(code: Callable[..., Any], *_: Any, **options: Any) -> Callable[..., Any]:
        captured.append(code)
        return code

    monkeypatch.setattr("torch._inductor.compile_fx.cudagraphify", as_it_is)
    torch._dynamo.reset()
    layer = FP8Linear.from_linear(
        nn.Linear(256, 384, device="cuda", dtype=torch.bfloat16),
        CURRENT,
        Region(active=True),
        product=product,
    )
    layer.compile(fullgraph=True, dynamic=False, options={"triton.cudagraphs": True})
    x = torch.zeros(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def both_ways() -> None:
        y = layer(x)
        y.backward(torch.zeros_like(y))

    with fresh_cache():
        codes = run_and_get_code(both_ways)[1]
    inside = [part for code in codes for part in CAPTURED.findall(code)]
    assert len(inside) == len(captured) > 0, "what Inductor captures"
    assert f"torch.ops.fp8cfg.{COUNTERS[product]}." in "".join(codes)
    assert f"torch.ops.fp8cfg.{COUNTERS[product]}." not in "".join(inside)
