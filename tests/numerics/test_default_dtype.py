"""torch's default dtype: scales, records, histories and what is drawn are float32 whatever it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8cfg.numerics import Region, Scaling, fp8_linears, update_scales
from fp8cfg.numerics.fp8_attention import FP8Attention
from fp8cfg.numerics.stored_state import AMAX, BACKWARD_AMAX
from fp8cfg.optim.low_bit.columns import Columns
from tests.support import attention, low_bit
from tests.support.fp8_net import KINDS, Net, convert, data, fp8_state, loss_of

PACKAGE = Path(__file__).parents[2] / "fp8cfg"
MAKE_FLOATS = {
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "rand",
    "randn",
    "linspace",
    "eye",
    "scalar_tensor",
}
"""Functions of torch whose result has the default dtype, if numbers do not say otherwise."""
OF_THE_MODEL = {
    "models/norms.py": "weights of modules have the default dtype in torch's own modules too"
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def steps(
    scaling: Scaling, dtype: torch.dtype, by_default: torch.dtype, fp8_params: bool
) -> list[Tensor]:
    """Two steps of a converted model whose weights and inputs are of `dtype`: its state, records, outputs and gradients."""
    with default_dtype(torch.float32):
        net, batches = (
            Net(dtype=dtype),
            [data(step).to(dtype).requires_grad_() for step in range(2)],
        )
    with default_dtype(by_default):
        net, region = convert(net, scaling, fp8_params=fp8_params)
        found = list[Tensor]()
        for step, x in enumerate(batches):
            torch.manual_seed(step)  # nvfp4 rounds gradients at random
            with region.entered():
                y = net(x)
            loss_of(y).backward()
            assert x.grad is not None
            found += [
                y.detach(),
                x.grad,
                *(p.grad.clone() for p in net.parameters() if p.grad is not None),
            ]
            update_scales(fp8_linears(net))
        records = [
            t
            for layer in (net.up, net.down)
            for name in (AMAX, BACKWARD_AMAX)
            if (t := getattr(layer, name)) is not None
        ]
        return [*fp8_state(net), *records, *found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8_params", [False, True], ids=["wide", "fp8"])
@KINDS
def test_steps_are_the_same(scaling: Scaling, fp8_params: bool, dtype: torch.dtype) -> None:
    want, got = (
        steps(scaling, dtype, by_default, fp8_params)
        for by_default in (torch.float32, torch.bfloat16)
    )
    assert [t.dtype for t in got] == [t.dtype for t in want]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize(
    "scaling", [attention.DELAYED, attention.CURRENT], ids=["delayed", "current"]
)
def test_attention_is_the_same(scaling: Scaling) -> None:
    found, t = list[list[Tensor]](), attention.qkv(1, torch.bfloat16)
    for by_default in (torch.float32, torch.bfloat16):
        with default_dtype(by_default):
            layer = FP8Attention(scaling, Region(True))
            made = attention.both_ways(layer, *t)
            found.append([*made, *(b for b in layer.buffers() if b.dtype.is_floating_point)])
    assert [x.dtype for x in found[0]] == [x.dtype for x in found[1]] and all(
        map(torch.equal, *found)
    )


@pytest.mark.parametrize("columns", low_bit.ROWS.values(), ids=low_bit.ROWS)
def test_low_bit_steps_are_the_same(columns: Columns) -> None:
    found = list[dict[str, Tensor]]()
    for by_default in (torch.float32, torch.bfloat16):
        params = low_bit.parameters(columns, (64, 256), (256,))
        for p in params.values():
            p.grad = low_bit.normal(*p.shape).to(p.dtype)
        with default_dtype(by_default):
            optimizer = low_bit.build(columns, params)
            optimizer.step()
        found.append(low_bit.everything(optimizer, params))
    assert low_bit.equal(*found)


def made_without_dtype(source: str) -> Iterator[str]:
    """The calls in `source` that make a tensor of the default dtype."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        called = (
            (call.func.body, call.func.orelse) if isinstance(call.func, ast.IfExp) else (call.func,)
        )
        if {ast.unparse(f) for f in called} & {
            f"torch.{name}" for name in MAKE_FLOATS
        } and "dtype" not in {k.arg for k in call.keywords}:
            yield ast.unparse(call)


def test_tensors_say_their_dtype() -> None:
    sources = {
        str(p.relative_to(PACKAGE)): p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py")
    }
    found = {
        name: calls
        for name, source in sources.items()
        if (calls := list(made_without_dtype(source)))
    }
    assert found.keys() == OF_THE_MODEL.keys(), found


def test_tensors_that_do_not_are_found() -> None:
    text = "torch.zeros(2)\ntorch.ones(2, dtype=d)\n(torch.empty if a else torch.zeros)(3, device=x)\nx.zeros(2)\ntorch.zeros(2).to(y)"
    assert list(made_without_dtype(text)) == [
        "torch.zeros(2)",
        "(torch.empty if a else torch.zeros)(3, device=x)",
        "torch.zeros(2)",
    ]
