"""FP8Linear in its autocast region: which products run in FP8, what is recorded of them, recomputation and microbatches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp8cfg.numerics import (
    DGRAD,
    E4M3,
    FPROP,
    WGRAD,
    FP8Linear,
    GemmRecord,
    Region,
    Scaling,
    fp8_linears,
    update_scales,
)
from fp8cfg.numerics.gemm import Operand, gemm
from fp8cfg.numerics.quantize import quantize
from fp8cfg.numerics.stored_state import fold_backward, stored_state_dict
from tests.support.fp8_net import (
    CURRENT,
    DELAYED,
    FP8_RUN,
    KINDS,
    Net,
    convert,
    data,
    dequantized,
    fp8_state,
    grads,
    in_fp8,
    loss_of,
    ran,
    same,
    train,
)
from tests.support.traced import TRACE


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outside_the_region_it_is_the_plain_layer(autocast: bool, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(32, 48, bias=bias)
    layer = FP8Linear.from_linear(copy.deepcopy(plain), DELAYED, Region())
    results = []
    for module in (plain, layer):
        x = data(1, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = module(x)
        loss_of(y).backward()
        results.append([y, x.grad, *grads(module)])
    assert same(*results)
    assert layer.fp8_amax_history.count_nonzero() == layer.fp8_backward_amax.count_nonzero() == 0
    kind = "bfloat16" if autocast else "float32"
    assert ran(layer) == [GemmRecord(kind, kind, "high_precision")] * 3


@pytest.mark.parametrize("traced", [False, True])
def test_gemms_ran_says_what_ran(traced: bool) -> None:
    net, region = convert(Net(), DELAYED, high_precision=(False, True, False))
    forward = TRACE(net) if traced else net
    assert ran(net.up) == [None, None, None]
    high = GemmRecord("float32", "float32", "high_precision")
    with region.entered():
        y = forward(data(0, requires_grad=True))
    assert ran(net.up) == [FP8_RUN[FPROP], None, None]
    loss_of(y).backward()
    assert ran(net.up) == ran(net.down) == [FP8_RUN[FPROP], high, FP8_RUN[WGRAD]]
    loss_of(forward(data(0, requires_grad=True))).backward()
    assert ran(net.up) == ran(net.down) == [high] * 3
    assert "ran_" not in "".join(net.state_dict())


def test_gemms_ran_names_the_hardware_product() -> None:
    net, _ = convert(Net(), CURRENT, product="scaled_mm")
    net.up.region.active = True
    loss_of(net(data(0, requires_grad=True))).backward()
    assert ran(net.up) == [GemmRecord(r.a, r.b, "scaled_mm") for r in FP8_RUN]


def test_a_product_of_two_precisions_is_refused() -> None:
    record, a = torch.zeros(3, dtype=torch.int32), torch.randn(16, 16)
    with pytest.raises(TypeError, match="operands of two precisions"):
        gemm(
            quantize(a, torch.tensor(1.0), E4M3, torch.bfloat16),
            Operand(a.bfloat16()),
            torch.bfloat16,
            record,
            DGRAD,
        )
    assert record.tolist() == [0, 0, 0]


@pytest.mark.parametrize("slot", [FPROP, DGRAD, WGRAD])
def test_a_product_kept_in_high_precision_is_exact_and_the_others_are_not(slot: int) -> None:
    linear = nn.Linear(32, 48, bias=False)
    flags = tuple(i == slot for i in range(3))
    layer = FP8Linear.from_linear(linear, CURRENT, Region(True), high_precision=flags)  # type: ignore[arg-type]
    x, g = torch.randn(20, 32, requires_grad=True), torch.randn(20, 48)
    y = layer(x)
    y.backward(g)
    exact = (x @ linear.weight.t(), g @ linear.weight, g.t() @ x)
    close = [
        torch.allclose(a, b, rtol=1e-5, atol=1e-5)
        for a, b in zip((y, x.grad, linear.weight.grad), exact, strict=True)
    ]
    assert close == list(flags)


def test_gradients_nobody_wants_are_not_computed() -> None:
    linear = nn.Linear(32, 48)
    linear.weight.requires_grad_(False)
    layer = FP8Linear.from_linear(linear, CURRENT, Region(True))
    layer(torch.randn(4, 32)).sum().backward()
    assert ran(layer)[DGRAD:] == [None, None]
    y = layer(torch.randn(4, 32, requires_grad=True))
    kept = [t.shape for t in y.grad_fn.next_functions[0][0].saved_tensors if t is not None]  # type: ignore[union-attr]
    assert kept == [(32, 48), ()]  # the weight as dgrad reads it, and its scale
    y.sum().backward()
    assert ran(layer)[DGRAD:] == [FP8_RUN[DGRAD], None]
    assert layer.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_names_the_output_and_stays_out_of_the_products(dtype: torch.dtype) -> None:
    linear, x = nn.Linear(32, 48), data(0, requires_grad=True)
    layer = FP8Linear.from_linear(linear, CURRENT, Region(True))
    with torch.autocast(
        "cpu", dtype=dtype
    ):  # sums of FP8 values exceed float16 before they are scaled
        y = layer(x)
        loss_of(y).backward()  # also inside
    assert (y.dtype, x.grad.dtype, linear.weight.grad.dtype) == (
        dtype,
        torch.float32,
        torch.float32,
    )
    exact = (
        dequantized(x.detach(), E4M3) @ dequantized(linear.weight.detach(), E4M3).t()
        + linear.bias.double()
    )
    assert (y - exact).norm() < 4e-3 * exact.norm()
    assert x.grad.isfinite().all()
    assert linear.weight.grad.isfinite().all()
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@KINDS
@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_recomputed_activations_change_nothing(scaling: Scaling, recompute: str) -> None:
    plain, recomputed = convert(Net(), scaling), convert(Net(recompute), scaling)
    assert train(*plain) == train(*recomputed)
    assert same(
        list(stored_state_dict(plain[0]).values()), list(stored_state_dict(recomputed[0]).values())
    )
    assert (
        ran(recomputed[0].up) == in_fp8(scaling)
        if recompute == "reentrant"
        else ran(recomputed[0].up)[WGRAD] == in_fp8(scaling)[WGRAD]
    )


def test_a_recomputation_outside_the_region_repeats_what_ran() -> None:
    net, region = convert(Net("non-reentrant"), DELAYED)
    y = net(data(0))  # high precision
    region.active = True
    loss_of(y).backward()
    assert ran(net.up)[FPROP] == GemmRecord("float32", "float32", "high_precision")


def test_two_microbatches_leave_the_scales_of_one_batch() -> None:
    one, two = convert(Net(), DELAYED)[0], convert(Net(), DELAYED)[0]
    batches = [data(2), data(1)]  # the larger first
    for net, parts in ((one, [torch.cat(batches)]), (two, batches)):
        net.up.region.active = True
        for part in parts:
            net(part).pow(2).sum().backward()
        update_scales(fp8_linears(net))
    # grad_output is scaled in time while unset, by the amax of each microbatch: what follows from it differs by rounding
    for a, b in zip(fp8_state(one), fp8_state(two), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0)
    assert torch.equal(one.up.fp8_scale[:2], two.up.fp8_scale[:2])
    for net, parts in ((one, [torch.cat(batches)]), (two, batches)):
        for other in (one.down, two.down, one.up, two.up):
            other.fp8_scale.copy_(torch.tensor([50.0, 700.0, 900.0]))
        for part in parts:
            net(part).pow(2).sum().backward()
        fold_backward(fp8_linears(net))
    assert same(
        [one.up.fp8_amax_history[0], one.down.fp8_amax_history[0]],
        [two.up.fp8_amax_history[0], two.down.fp8_amax_history[0]],
    )


def test_one_layer_used_twice_before_the_backward_pass() -> None:
    layer = FP8Linear.from_linear(nn.Linear(32, 32), DELAYED, Region(True))
    loss_of(layer(layer(data(0)))).backward()
    fold_backward([layer])
    assert layer.fp8_amax_history[0].count_nonzero() == 3


@pytest.mark.parametrize("active", [True, False])
def test_evaluation_moves_nothing(active: bool) -> None:
    net, region = convert(Net(), DELAYED)
    train(net, region)
    before = copy.deepcopy(stored_state_dict(net))
    with torch.no_grad(), region.entered(active):
        net.eval()(data(9) * 100)
    assert same(list(before.values()), list(stored_state_dict(net).values()))
    assert ran(net.up)[FPROP].execution == "emulated", "what was recorded is of training, or in FP8"


def test_a_failing_step_leaves_the_region() -> None:
    region = Region()
    with pytest.raises(ZeroDivisionError), region.entered():
        raise ZeroDivisionError
    assert not region.active
