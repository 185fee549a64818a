"""Weights of FP8Linear that are stored in float8: gradients in a wide dtype, the bits of wide masters."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8cfg.numerics import (
    E4M3,
    FP8Linear,
    Region,
    Scaling,
    discard_amax,
    fp8_linears,
    update_scales,
)
from fp8cfg.numerics.formats import cast
from fp8cfg.numerics.fp8_weights import plain
from fp8cfg.numerics.stored_state import stored_state_dict
from tests.support.fp8_net import CURRENT, KINDS, Net, convert, data, loss_of, same
from tests.support.traced import TRACE


@KINDS
def test_float8_weights_train_as_wide_masters_do_bit_for_bit(scaling: Scaling) -> None:
    (wide, wide_region), (narrow, narrow_region) = (
        convert(Net(), scaling),
        convert(Net(), scaling, fp8_params=True),
    )
    names = [name for name, _ in wide.named_parameters()]
    masters = {name: p.detach().clone() for name, p in wide.named_parameters()}
    for step in range(6):
        results = []
        for net, region in ((wide, wide_region), (narrow, narrow_region)):
            torch.manual_seed(step)
            with region.entered():
                y = net(data(step))
            loss_of(y).backward()
            results.append([y, *(net.get_parameter(name).grad for name in names)])
        assert same(*results), step
        if step == 3:  # as if the gradients were not finite
            discard_amax(fp8_linears(wide))
            discard_amax(fp8_linears(narrow))
        else:
            for name in names:
                masters[name] -= 0.1 * narrow.get_parameter(name).grad
                wide.get_parameter(name).data.copy_(masters[name])
            for net in (wide, narrow):
                update_scales(fp8_linears(net))
            for name in ("up", "down"):
                getattr(narrow, name).set_weight(masters[f"{name}.weight"])
            narrow.up.bias.data.copy_(masters["up.bias"])
        wide.zero_grad()
        narrow.zero_grad()


def test_float8_weights_take_one_byte_and_keep_no_copy() -> None:
    layer = FP8Linear.from_linear(
        nn.Linear(64, 64, bias=False), CURRENT, Region(True), fp8_params=True
    )
    kept = [t for t in (*layer.parameters(), *layer.buffers(), layer._gradient_of_weight)]
    assert sum(t.untyped_storage().nbytes() for t in kept) < 64 * 64 + 64
    y = layer(torch.randn(2, 64, requires_grad=True))
    saved = [
        t
        for t in y.grad_fn.next_functions[0][0].saved_tensors
        if t is not None and t.shape == (64, 64)
    ]  # type: ignore[union-attr]
    assert [t.dtype for t in saved] == [E4M3.dtype]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("how", ["made", "deepcopy", "save", "cast", "assigned"])
def test_gradients_of_float8_weights_are_wide_and_accumulate(traced: bool, how: str) -> None:
    wide = nn.Linear(32, 48, bias=False)
    layer = FP8Linear.from_linear(wide, CURRENT, Region(True), fp8_params=True)
    reference = FP8Linear.from_linear(wide, CURRENT, Region(True))
    if how == "deepcopy":
        layer = copy.deepcopy(layer)
    elif how == "save":
        torch.save(layer, file := io.BytesIO())  # plain pickle does not know float8
        file.seek(0)
        layer = torch.load(file, weights_only=False)
    elif how == "cast":
        layer.bfloat16()
    elif how == "assigned":
        layer.load_state_dict(stored_state_dict(layer), assign=True)
    forward = TRACE(layer) if traced else layer
    for step in range(2):
        for module in (forward, reference):
            (module(data(step)) * 1e-6).sum().backward()  # float8 gradients would flush to zero
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, reference.weight.grad, rtol=1e-5, atol=1e-11)


@pytest.mark.parametrize("traced", [False, True])
def test_the_grad_dtype_of_a_float8_weight_can_be_chosen_later_and_is_kept(traced: bool) -> None:
    layer = FP8Linear.from_linear(
        nn.Linear(32, 48, bias=False), CURRENT, Region(True), fp8_params=True
    )
    layer.weight.grad_dtype = torch.bfloat16
    for module in (layer, copy.deepcopy(layer), copy.deepcopy(layer).float()):
        forward = TRACE(module) if traced else module
        for step in range(2):
            (forward(data(step)) * 1e-6).sum().backward()
        assert module.weight.grad.dtype == torch.bfloat16
        assert module.weight.grad.count_nonzero() > 48 * 16


def test_a_frozen_float8_weight_has_no_gradient_and_computes_in_high_precision_outside() -> None:
    linear = nn.Linear(32, 48, bias=False)
    linear.weight.requires_grad_(False)
    layer = FP8Linear.from_linear(linear, CURRENT, Region(), fp8_params=True)
    x = data(0, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, F.linear(x, layer.dequantized_weight(torch.float32)))
    assert layer.weight.grad is None
    assert torch.equal(
        plain(layer.parameter).float(),
        cast(linear.weight / layer.fp8_weight_scale_inv, E4M3).float(),
    )


def test_set_weight_is_for_float8_weights() -> None:
    with pytest.raises(TypeError, match="set_weight writes float8 weights"):
        FP8Linear.from_linear(nn.Linear(16, 16), CURRENT, Region()).set_weight(torch.zeros(16, 16))


def test_casting_with_gradients_at_hand() -> None:
    net, _ = convert(Net(), CURRENT, fp8_params=True)
    net.up.region.active = True
    loss_of(net(data(0))).backward()
    assert net.bfloat16().up.weight.grad.dtype == torch.float32
