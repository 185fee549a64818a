"""Divisions of compiled code on a GPU, of emulated layers and low-bit steps: rounded to nearest, as eager code rounds them.

Runs where torch has a CUDA device, also a fake one (tools/fake_gpu): Inductor, Triton and ptxas are real there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device, not even a fake one", allow_module_level=True)

from fp8cfg.backends.compiled_layers import compile_options
from fp8cfg.numerics import FP8Linear, Region
from tests.support import low_bit
from tests.support.fp8_net import ALL


def ptx_of(compile_all: Callable[[], object], folder: Path) -> str:
    """The PTX of all kernels that are compiled."""
    torch._dynamo.reset()
    with fresh_cache(dir=str(folder), delete=False):
        compile_all()
    return "\n".join(p.read_text(encoding="utf-8") for p in folder.rglob("*.ptx"))


def check_divisions(ptx: str) -> None:
    assert "div.rn.f32" in ptx and "div.full" not in ptx and "rcp.approx" not in ptx


@pytest.mark.parametrize("name", ["current", "row", "nvfp4"])
def test_of_an_emulated_layer(name: str, tmp_path: Path) -> None:
    linear = nn.Linear(256, 384, device="cuda", dtype=torch.bfloat16)
    layer = FP8Linear.from_linear(linear, ALL[name], Region(active=True))
    layer.compile(fullgraph=True, dynamic=False, options=compile_options("cuda"))
    with torch.no_grad():
        check_divisions(
            ptx_of(
                lambda: layer(torch.zeros(128, 256, device="cuda", dtype=torch.bfloat16)), tmp_path
            )
        )


@pytest.mark.parametrize("name", ["O2 exact", "block moments"])
def test_of_a_low_bit_step(name: str, tmp_path: Path) -> None:
    columns = low_bit.ROWS[name]
    p = nn.Parameter(
        torch.zeros(
            64, 256, device="cuda", dtype=low_bit.DTYPES.get(str(columns.weight), torch.float32)
        )
    )

    def step() -> None:
        optimizer = low_bit.build(columns, {"p": p})
        p.grad = torch.zeros_like(p)
        optimizer.step()

    check_divisions(ptx_of(step, tmp_path))
