"""FP8Linear under torch.compile: the numbers of eager code, and one compilation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.numerics import FP8Linear, Region, Scaling
from tests.support.fp8_net import (
    CURRENT,
    DELAYED,
    TILED,
    Net,
    convert,
    data,
    fp8_state,
    in_fp8,
    ran,
    train,
)


@pytest.mark.parametrize(
    ("scaling", "recompute", "backend"),
    [
        (CURRENT, "no", "inductor"),
        (DELAYED, "non-reentrant", "aot_eager"),
        (TILED["block"], "no", "aot_eager"),
        (TILED["mxfp8"], "non-reentrant", "aot_eager"),
        (TILED["nvfp4"], "no", "aot_eager"),
    ],
    ids=lambda v: getattr(v, "kind", v),
)
def test_compiled_agrees_and_compiles_once(scaling: Scaling, recompute: str, backend: str) -> None:
    """Inductor's code for tiles is in test_block_scaling.py, and for delayed scaling in the test below."""
    eager, compiled = convert(Net(recompute), scaling), convert(Net(recompute), scaling)
    forward = torch.compile(compiled[0], fullgraph=True, backend=backend)
    losses = train(*eager, steps=6), train(*compiled, steps=2, forward=forward)
    with torch.no_grad():
        forward(data(0))  # evaluation in high precision
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(*compiled, steps=2, forward=forward)
        with torch.no_grad():
            forward(data(0))
        train(*compiled, steps=2, forward=forward)
    assert ran(compiled[0].down) == in_fp8(scaling)
    # float32 throughout: sums are taken in another order, and now and then a value rounds to its neighbour. Compiled code
    # draws other random numbers.
    torch.testing.assert_close(
        losses[1], losses[0][:2], rtol=0.02 if scaling.kind == "nvfp4" else 1e-5, atol=0
    )


def test_compiled_scales_and_histories_are_those_of_eager() -> None:
    eager, compiled = convert(Net(), DELAYED), convert(Net(), DELAYED)
    train(*eager, steps=5, lr=0.0)
    train(*compiled, steps=5, lr=0.0, forward=torch.compile(compiled[0], fullgraph=True))
    for a, b in zip(fp8_state(eager[0]), fp8_state(compiled[0]), strict=True):
        assert torch.equal(a[..., :2], b[..., :2])  # of inputs and weights: bit for bit
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("scaling", "backend"),
    [
        (CURRENT, "inductor"),
        (TILED["row"], "aot_eager"),
        (TILED["block"], "aot_eager"),
        (TILED["mxfp8"], "aot_eager"),
    ],
    ids=["current", "row", "block", "mxfp8"],
)
def test_compiled_under_autocast(scaling: Scaling, backend: str) -> None:
    layer = FP8Linear.from_linear(nn.Linear(32, 48), scaling, Region(True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = layer(data(0)), torch.compile(layer, fullgraph=True, backend=backend)(data(0))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_compiled_incomplete_tiles_of_few_columns(name: str) -> None:
    """Bit for bit, by Inductor: 224 columns in blocks of 128, and 80 and 48 ones in those of 32."""
    widths = {"block": (224, 112), "mxfp8": (80, 48)}[name]
    passes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = FP8Linear.from_linear(
            nn.Linear(*widths, bias=False, dtype=torch.bfloat16), TILED[name], Region(active=True)
        )
        x = torch.randn(72, widths[0], dtype=torch.bfloat16, requires_grad=True)
        y = (torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer)(x)
        y.backward(torch.randn_like(y))
        assert x.grad is not None and layer.parameter.grad is not None
        passes.append((y.detach(), x.grad, layer.parameter.grad))
    for a, b in zip(*passes, strict=True):
        assert torch.equal(a, b)


class _TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


@pytest.mark.parametrize(
    "words",
    [
        ["precision=bf16_fp8"],
        ["precision=bf16_fp8_current", "fp8.granularity=row"],
        ["precision=bf16_fp8_block"],
        ["precision=bf16_mxfp8"],
    ],
    ids=["tensor", "row", "block", "mxfp8"],
)
def test_a_users_own_compiled_model_has_the_gradients_of_eager_code(words: list[str]) -> None:
    """Several layers and an activation in one graph, which Inductor fuses horizontally."""
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = _TwoLinears().bfloat16()
        recipe = fp8cfg.compose([*words, "fp8.params=false", "fp8.output_layer=true"])
        recipe.fp8.high_precision_at_start = recipe.fp8.high_precision_at_end = 0
        fp8 = fp8cfg.convert_model(model, recipe)
        x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(64, 64, dtype=torch.bfloat16) * 1e-3
        with fp8.autocast():
            (torch.compile(model) if compiled else model)(x).backward(gradient)
        gradients.append([p.grad.float() for p in model.parameters() if p.grad is not None])
    for eager, got in zip(*gradients, strict=True):
        assert (got - eager).norm() < 0.1 * eager.norm()
