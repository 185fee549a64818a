"""Selective recomputation: the same bits as without, no product twice, and only inputs of what is recomputed are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8cfg.models.recompute import discard_output, recompute_in_backward
from tests.models.test_packed_documents import FAMILIES, model_of, numbered, tokens_of

KINDS = {
    **FAMILIES,
    "norms after": {"layernorm_placement": "post", "qk_layernorm": "hidden"},
    "squared relu": {
        "activation": "squared_relu",
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
    },
}


def gradients(
    changes: dict[str, Any], recompute: str, packed: bool, dtype: torch.dtype, frozen: str = ""
) -> list[Tensor]:
    model, documents = (
        model_of(changes, recompute=recompute, reset_attention_mask=packed).to(dtype),
        numbered(),
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    tokens = tokens_of(documents)
    loss = model(tokens, tokens.roll(1, 1), documents=documents if packed else None)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", KINDS)
def test_no_bit_changes(name: str) -> None:
    for packed, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        plain, selective = (gradients(KINDS[name], g, packed, dtype) for g in ("none", "selective"))
        assert all(map(torch.equal, plain, selective)) and len(plain) == len(selective) > 10


@pytest.mark.parametrize("frozen", ["layernorm", "linear", "embedding", "layers.0"])
def test_frozen_parts_change_no_bit(frozen: str) -> None:
    plain, selective = (
        gradients({}, g, False, torch.bfloat16, frozen) for g in ("none", "selective")
    )
    assert all(map(torch.equal, plain, selective)) and len(plain) == len(selective)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.full((4,), 2.0)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x * self.weight).sin()


@pytest.mark.parametrize("trained", [True, False])
def test_a_part_is_computed_once_more_for_its_reader_and_itself(trained: bool) -> None:
    x, part, reader = (
        torch.randn(3, 4, requires_grad=True),
        Counted(),
        nn.Linear(4, 2).requires_grad_(trained),
    )
    y = recompute_in_backward(part, part, x)
    with discard_output(y):
        out = reader(y)
    kept = [t for t in (getattr(y.grad_fn, "saved_tensors", ())) if t is not x]
    assert part.calls == 1 and kept == [] and y.grad_fn is not None
    del y
    out.sum().backward(retain_graph=True)
    assert part.calls == 2
    first = [t.grad.clone() for t in (x, part.weight) if t.grad is not None]
    out.sum().backward()
    assert part.calls == 3, "a second backward pass makes it again"
    for twice, once in zip((x, part.weight), first, strict=True):
        assert twice.grad is not None and torch.equal(twice.grad, 2 * once)


def test_a_view_of_what_is_discarded_is_made_again() -> None:
    x, part = torch.randn(2, 3, 4, requires_grad=True), Counted()
    weight = torch.randn(5, 2, requires_grad=True)
    y = recompute_in_backward(part, part, x)
    with discard_output(y):
        out = y.flatten(0, 1)[1:, 2:] @ weight.mT
    out.sum().backward()
    want = torch.autograd.grad((part(x).flatten(0, 1)[1:, 2:] @ weight.mT).sum(), (x, weight))
    assert torch.equal(want[0], x.grad) and torch.equal(want[1], weight.grad)  # type: ignore[arg-type]


def test_nothing_is_recorded_where_no_gradient_is_wanted() -> None:
    x, part = torch.randn(3, 4), Counted()
    with torch.no_grad():
        assert recompute_in_backward(part, part, x).grad_fn is None
    part.requires_grad_(False)
    assert recompute_in_backward(part, part, x).grad_fn is None
