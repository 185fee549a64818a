"""State of FP8Linear: saving, loading into other scalings and into high precision, casting and moving."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from fp8cfg.numerics import (
    E4M3,
    FP8Linear,
    Region,
    Scaling,
    fp8_linears,
    high_precision_state_dict,
    update_scales,
)
from fp8cfg.numerics.stored_state import stored_state_dict
from tests.support.fp8_net import (
    ALL,
    CURRENT,
    DELAYED,
    KINDS,
    Net,
    convert,
    data,
    fp8_state,
    loss_of,
    same,
    train,
)


def test_state_survives_a_save_and_a_load() -> None:
    net, region = convert(Net(), DELAYED)
    train(net, region, steps=3)
    other, other_region = convert(Net(), DELAYED)
    other.load_state_dict(copy.deepcopy(stored_state_dict(net)))
    assert train(net, region) == train(other, other_region)
    assert [k for k in stored_state_dict(net) if "fp8" in k] == [
        f"{name}.{leaf}" for name in ("up", "down") for leaf in ("fp8_scale", "fp8_amax_history")
    ]
    assert not [k for k in stored_state_dict(convert(Net(), CURRENT)[0]) if "fp8" in k]


@pytest.mark.parametrize("fp8_params", [False, True])
@KINDS
def test_high_precision_state_loads_strictly_and_forgets_the_old_weights(
    scaling: Scaling, fp8_params: bool
) -> None:
    net, region = convert(Net(), scaling, fp8_params=fp8_params)
    if not fp8_params:
        train(net, region)
    source = Net().state_dict()
    source["up.weight"] = source["up.weight"] * 3
    net.load_state_dict(source)
    fresh = Net()
    fresh.load_state_dict(source)
    fresh, _ = convert(fresh, scaling, fp8_params=fp8_params)
    assert same(
        [t.float() for t in stored_state_dict(net).values()],
        [t.float() for t in stored_state_dict(fresh).values()],
    )


@pytest.mark.parametrize("fp8_params", [False, True])
def test_fp8_state_loads_into_a_high_precision_model(fp8_params: bool) -> None:
    net, _ = convert(Net(), DELAYED, fp8_params=fp8_params)
    plain = Net()
    plain.load_state_dict(high_precision_state_dict(stored_state_dict(net)))
    assert torch.equal(plain.up.weight, net.up.dequantized_weight(torch.float32))
    assert torch.equal(plain.up.weight, Net().up.weight) is not fp8_params


def test_state_of_float8_weights_loads_into_wide_ones() -> None:
    stored, wide = convert(Net(), DELAYED, fp8_params=True)[0], convert(Net(), DELAYED)[0]
    wide.load_state_dict(stored_state_dict(stored))
    assert torch.equal(wide.up.weight, stored.up.dequantized_weight(torch.float32))


def test_the_parameters_stay_the_very_objects() -> None:
    embedding, head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
    head.weight = embedding.weight
    assert FP8Linear.from_linear(head, CURRENT, Region()).weight is embedding.weight


@pytest.mark.parametrize("fp8_params", [False, True])
def test_casting_the_model_leaves_scales_alone(fp8_params: bool) -> None:
    net, region = convert(Net(), DELAYED, fp8_params=fp8_params)
    if not fp8_params:
        train(net, region)
    before = [t.clone() for t in fp8_state(net)]
    net.bfloat16()
    assert same(fp8_state(net), before)
    assert net.up.bias.dtype == torch.bfloat16
    assert net.up.parameter.dtype == (E4M3.dtype if fp8_params else torch.bfloat16)


def test_moving_the_model_moves_its_state() -> None:
    layer = FP8Linear.from_linear(nn.Linear(16, 16), DELAYED, Region(), fp8_params=True).to("meta")
    tensors = [*layer.parameters(), *layer.buffers(), layer._gradient_of_weight]
    assert {t.device.type for t in tensors} == {"meta"}
    assert layer.weight.grad_dtype == torch.float32


@pytest.mark.parametrize("fp8_params", [False, True])
def test_state_loads_from_every_scaling_into_every_other(fp8_params: bool) -> None:
    some = {
        "delayed": DELAYED,
        "longer": Scaling(amax_history_len=9),
        "shorter": Scaling(amax_history_len=2),
        **{k: ALL[k] for k in ("current", "row", "block", "mxfp8", "nvfp4")},
    }
    for source, target in itertools.permutations(some, 2):
        one, other = (
            convert(Net(), some[name], fp8_params=fp8_params)[0] for name in (source, target)
        )
        other.load_state_dict(stored_state_dict(one))
        fresh = convert(Net(), some[target], fp8_params=fp8_params)[0]
        off = (
            (
                other.up.dequantized_weight(torch.float32)
                - fresh.up.dequantized_weight(torch.float32)
            )
            .abs()
            .max()
        )
        assert (
            off
            <= (0.4 if "nvfp4" in (source, target) else 0.13)
            * fresh.up.dequantized_weight(torch.float32).abs().max()
        ), (source, target)


def test_scales_that_were_not_set_are_1_under_first_step_te() -> None:
    """A scale of 0, taken for one that is set, would make everything NaN."""
    net, _ = convert(Net(), DELAYED)
    other, region = convert(Net(), replace(DELAYED, first_step="te"))
    other.load_state_dict(stored_state_dict(net))
    for layer in fp8_linears(other):
        assert layer.fp8_scale is not None
        assert layer.fp8_scale.tolist() == [1.0, 1.0, 1.0]
    with region.entered():
        assert other(data(0)).isfinite().all()


def test_a_float8_weight_without_its_scale_is_refused() -> None:
    state = stored_state_dict(convert(Net(), CURRENT, fp8_params=True)[0])
    del state["up.fp8_weight_scale_inv"]
    for model in (convert(Net(), CURRENT, fp8_params=True)[0], convert(Net(), CURRENT)[0]):
        with pytest.raises(
            RuntimeError,
            match=r"up\.weight is torch\.float8_e4m3fn and needs up\.fp8_weight_scale_inv",
        ):
            model.load_state_dict(dict(state))


def test_what_a_backward_pass_saw_is_saved_before_the_scales_move() -> None:
    """A run may be saved between two microbatches: the amaxes of both passes are in the one row of the stored form."""
    net, region = convert(Net(), DELAYED)
    with region.entered():
        loss_of(net(data(0))).backward()
    seen = net.up.fp8_backward_amax[0].clone()
    saved = {k: t.clone() for k, t in stored_state_dict(net).items()}
    assert (
        seen[2] > 0
        and saved["up.fp8_amax_history"][0, 2] == seen[2]
        and not any("backward" in k for k in saved)
    )
    other, _ = convert(Net(), DELAYED)
    other.up.fp8_backward_amax.fill_(1e9)
    other.load_state_dict(saved)
    assert not other.up.fp8_backward_amax.any(), "of the weights before"
    for one in (net, other):
        update_scales(fp8_linears(one))
    assert same(fp8_state(net), fp8_state(other)) and not net.up.fp8_backward_amax.any()
