"""Products with scales of rows, of few rows: what an H100 refuses is not asked for, values are those of emulation, and compiled code of any
number of tokens is two graphs.

Runs where torch has a CUDA device of compute capability 9.x, also a fake one (tools/fake_gpu), where compiled code has no values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip(
        "no CUDA device of compute capability 9.x, not even a fake one", allow_module_level=True
    )

from fp8cfg.numerics import FP8Linear, Region, Scaling
from tests.support.layer_passes import check_passes

ROWS = Scaling("current", granularity="row")


@pytest.mark.parametrize("fp8_params", [False, True])
@pytest.mark.parametrize(("tokens", "outputs"), [(127, 384), (256, 384), (384, 128), (384, 272)])
def test_few_rows_are_not_multiplied_with_scales_of_rows(
    tokens: int, outputs: int, fp8_params: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, with_rows = torch._scaled_mm, list[int]()

    def as_an_h100(
        a: Tensor, b: Tensor, *, scale_a: Tensor, out_dtype: torch.dtype, **rest: object
    ) -> Tensor:
        if scale_a.numel() > 1:
            assert len(a) > 256, "CUBLAS_STATUS_NOT_SUPPORTED (pytorch/ao#4582)"
            with_rows.append(len(a))
        return real(a, b, scale_a=scale_a, out_dtype=out_dtype, **rest)

    monkeypatch.setattr(torch, "_scaled_mm", as_an_h100)
    check_passes(ROWS, tokens, 512, outputs, torch.bfloat16, fp8_params, False)
    assert with_rows == [tokens, tokens] * (tokens > 256) + [outputs] * (outputs > 256)


def test_compiled_code_of_any_number_of_tokens_is_two_graphs() -> None:
    torch._dynamo.reset()
    graphs = list[torch.fx.GraphModule]()

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    linear = nn.Linear(64, 384, device="cuda", dtype=torch.bfloat16)
    layer = torch.compile(
        FP8Linear.from_linear(linear, ROWS, Region(active=True), product="scaled_mm"),
        fullgraph=True,
        dynamic=True,
        backend=count,
    )
    with torch.no_grad():
        for tokens in (127, 48, 256, 257, 1000, 33, 4096):
            assert layer(torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16)).shape == (
                tokens,
                384,
            )
    assert len(graphs) == 2
