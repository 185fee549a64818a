"""Weights held in the codec of storage.weight, whoever multiplies them."""

from __future__ import annotations

import copy

import pytest
import torch
from small import small, steps
from torch import nn

import fp8cfg
from fp8cfg.numerics.codecs import NAMES, codec
from fp8cfg.numerics.held import HeldWeight, hold

TORCHAO = ("precision=bf16_fp8_current", "backend=torchao", "fp8={params: false, high_precision_at_start: 0, high_precision_at_end: 0}")
CODECS = [name for name, codec in NAMES.items() if not codec.block]


@pytest.mark.parametrize("name", CODECS)
def test_a_layer_of_another_library_reads_decoded_values(name: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    plain = copy.deepcopy(linear)
    hold(linear, codec(name), torch.float32)
    linear.set_weight_grad_dtype(torch.float32)
    want = codec(name).decode(codec(name).encode(plain.weight.detach()))
    assert isinstance(linear, HeldWeight) and type(linear).__name__ == "Linear" and torch.equal(linear.weight, want)
    assert [n for n, _ in linear.named_parameters()] == ["weight", "bias"] and linear._parameters["weight"].dtype == NAMES[name].format.dtype
    x = torch.randn(3, 8)
    with torch.no_grad():
        plain.weight.copy_(want)
    for layer in (linear, plain):
        layer(x).square().sum().backward()
    stored = dict(linear.named_parameters())["weight"]
    assert stored.grad is not None and torch.equal(stored.grad, plain.weight.grad)


def test_its_state_reads_back_and_plain_weights_are_encoded() -> None:
    held, other = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
    plain = copy.deepcopy(other)
    for layer in (held, other):
        hold(layer, codec("fp16_scaled"), torch.float32)
    held.load_state_dict(other.state_dict())
    assert torch.equal(held.weight, other.weight)
    with torch.no_grad():
        other.set_weight(torch.full((4, 8), 3.0))
    other.load_state_dict(plain.state_dict())
    assert torch.equal(held.weight, other.weight)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_torchao_multiplies_weights_that_are_held_in_fp16(level: str) -> None:
    pytest.importorskip("torchao")
    job = fp8cfg.build(small(*TORCHAO, f"opt_level={level}"))
    layer = job.model.get_submodule("layers.0.mlp.linear_fc1")
    stored = dict(job.model.named_parameters())["layers.0.mlp.linear_fc1.weight"]
    assert "orchao" in type(layer).__name__ and stored.dtype == torch.float16 and layer.weight.dtype == torch.bfloat16
    found = [s.loss for s in steps(job, 4)]
    native = [s.loss for s in steps(fp8cfg.build(small(*TORCHAO, f"opt_level={level}", "backend=native")), 4)]
    assert found[-1] < found[0] - 0.1 and found == pytest.approx(native, abs=0.01)
    high = sum(p.numel() for n, p in job.model.named_parameters() if p.dtype == torch.float16)
    assert high == sum(m.weight.numel() for m in job.model.modules() if isinstance(m, nn.Linear))


def test_torchao_refuses_weights_in_fp8_by_name() -> None:
    with pytest.raises(fp8cfg.ConfigError, match="opt_level=O3: torchao does not multiply weights that are held in FP8"):
        fp8cfg.build(small(*TORCHAO, "opt_level=O3"))
