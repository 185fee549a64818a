"""Compiled steps that are called without asking Dynamo: only with inputs of a signature it has seen, and to the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fp8cfg.optim.low_bit import kernel
from fp8cfg.optim.low_bit.adam_step import named_columns
from fp8cfg.optim.low_bit.optimizer import LowBitAdamW

pytestmark = pytest.mark.slow
COLUMNS = named_columns(weight="fp32", exp_avg="fp8_pow2", exp_avg_sq="fp16_scaled")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the inputs that Dynamo was asked about, by kernels that know nothing yet."""
    shapes: list[tuple[int, ...]] = []
    make = kernel.Kernel.__init__

    def listening(self: kernel.Kernel, *args: Any) -> None:
        make(self, *args)
        ask = self._ask

        def asking(slot: Any, *rest: Any) -> None:
            shapes.append(tuple(slot.source[0].shape))
            ask(slot, *rest)

        self._ask = asking

    monkeypatch.setattr(kernel.Kernel, "__init__", listening)
    kernel.kernel.cache_clear()
    yield shapes
    kernel.kernel.cache_clear()


def pair(*shapes: tuple[int, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter], LowBitAdamW, LowBitAdamW]:
    """The same parameters twice, with an eager optimizer and a compiled one."""
    eager = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    compiled = [nn.Parameter(p.detach().clone()) for p in eager]
    optimizers = [
        LowBitAdamW([{"params": [(f"p{i}", p) for i, p in enumerate(ps)], "columns": COLUMNS}], compiled=ps is compiled)
        for ps in (eager, compiled)
    ]
    return eager, compiled, *optimizers


def same(a: LowBitAdamW, b: LowBitAdamW) -> bool:
    tensors, others = a.state_tensors(), b.state_tensors()
    moments = all(torch.equal(t.view(torch.uint8) if t.dim() else t, others[k].view(torch.uint8) if t.dim() else others[k]) for k, t in tensors.items())
    return moments and all(torch.equal(p, q) for p, q in zip(a.names, b.names, strict=True))


def test_dynamo_is_asked_once_for_each_length(asked: list[tuple[int, ...]]) -> None:
    eager, compiled, by_hand, optimizer = pair((7, 100), (300,), (11, 100))
    versions = []
    for _ in range(4):
        for p, q in zip(eager, compiled, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        by_hand.step()
        optimizer.step()
        versions.append([q._version for q in compiled])
        assert same(by_hand, optimizer)
    assert asked == [(700,), (300,), (1100,)]
    assert all(before < after for one, other in itertools.pairwise(versions) for before, after in zip(one, other, strict=True))


def test_other_gradients_are_asked_about_again(asked: list[tuple[int, ...]]) -> None:
    """One of another dtype has the same shape; one that is not contiguous, in two ways here, is made so."""
    (p,), (q,), by_hand, optimizer = pair((600,))
    p.grad_dtype = q.grad_dtype = None
    grads = [torch.randn(600), torch.randn(1200)[::2], torch.randn(600), torch.randn(600).bfloat16(), torch.randn(1).expand(600), torch.randn(600)]
    for grad in grads:
        p.grad, q.grad = grad, grad
        by_hand.step()
        optimizer.step()
        assert same(by_hand, optimizer)
    assert asked == [(600,)] * 2


def test_two_sizes_that_are_equal_are_left_to_dynamo(asked: list[tuple[int, ...]]) -> None:
    """64 rows of 64: which size is which does not show."""
    eager, compiled, by_hand, optimizer = pair(*[(64,)] * 64)
    for _ in range(3):
        for p, q in zip(eager, compiled, strict=True):
            p.grad = q.grad = torch.randn(64)
        by_hand.step()
        optimizer.step()
        assert same(by_hand, optimizer)
    assert asked == [(64, 64)] * 3


def test_where_nothing_is_compiled_nothing_is_remembered(asked: list[tuple[int, ...]]) -> None:
    (p,), (q,), by_hand, optimizer = pair((500,))
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            p.grad = q.grad = torch.randn(500)
            by_hand.step()
            optimizer.step()
    assert asked == [(500,)] * 2 and same(by_hand, optimizer)
