"""A weight in FP8 or in a codec, as code that is not ours meets it: what it reads as, and what it refuses."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from fp8cfg.numerics import FP8Linear, Region, Scaling
from fp8cfg.numerics.codecs import get_codec
from fp8cfg.numerics.fp8_weights import Codes, plain
from fp8cfg.numerics.weight_storage import store_in_codec
from fp8cfg.schema.errors import ConfigError

REFUSED = r"this weight is quantized.*fp8cfg\.averaged\(job\).*fp8cfg\.convert_back\(model\)"


def layer(kind: str) -> Any:
    """A layer that holds its weight, for one in bfloat16, with a scale: float8, a codec of ours, and of a library's layer."""
    torch.manual_seed(0)
    linear = nn.Linear(32, 48, bias=False)
    if kind == "library":
        store_in_codec(linear, get_codec("fp16_scaled"), torch.bfloat16)
        return linear
    made = FP8Linear.from_linear(
        linear,
        Scaling("current"),
        Region(True),
        fp8_params=kind == "float8",
        read_as=torch.bfloat16,
    )
    if kind == "codec":
        made.store_in_codec(get_codec("fp8"), torch.bfloat16)
    return made


KINDS = pytest.mark.parametrize("kind", ["float8", "codec", "library"])


@KINDS
def test_a_held_weight_reads_as_the_one_that_it_stands_for(kind: str) -> None:
    """`x.to(layer.weight.dtype)` of T5 and PEFT, `get_parameter` of torch, and a product with the weight itself."""
    held = layer(kind)
    weight = held.weight
    assert (weight.dtype, weight.shape, weight.device.type) == (
        torch.bfloat16,
        (48, 32),
        "cpu",
    ) and held.parameter.dtype != torch.bfloat16
    x = torch.ones(2, 32).to(held.weight.dtype)
    assert held(x).isfinite().all() and isinstance(held.get_parameter("weight"), nn.Parameter)
    want = held.float32_weight().bfloat16()
    assert (
        torch.equal(weight, want)
        and type(weight * 2) is Tensor
        and type(held.state_dict()["weight"]) is Tensor
    )
    F.linear(x, weight).sum().backward()
    assert weight.grad is held.parameter.grad and torch.equal(
        held.parameter.grad, torch.full((48, 32), 2.0).to(held.parameter.grad.dtype)
    )
    weight.requires_grad_(False)
    assert (
        not held.parameter.requires_grad
        and not held.weight.requires_grad
        and next(iter(held.parameters())) is held.parameter
    )
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(weight), want)
    torch.save(weight, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), want)


WRITES: dict[str, Callable[[Any], Any]] = {
    "init": lambda m: nn.init.normal_(m.weight),
    "data": lambda m: m.weight.data.normal_(),
    "detach": lambda m: m.weight.detach().mul_(2),
    "view": lambda m: m.weight[0].zero_(),
    "item": lambda m: m.weight.__setitem__(0, 0.0),
    "foreach": lambda m: torch._foreach_mul_([m.weight], 2.0),
    "assign": lambda m: setattr(m.weight, "data", torch.zeros(48, 32)),
    "out": lambda m: torch.add(torch.ones(48, 32), 1, out=m.weight),
    "half": lambda m: m.weight.t().zero_(),
}


@KINDS
@pytest.mark.parametrize("how", WRITES)
def test_writes_to_what_is_read_are_refused(kind: str, how: str) -> None:
    held = layer(kind)
    before = held.weight.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match=REFUSED):
        WRITES[how](held)
    assert torch.equal(held.weight, before)


def test_another_module_does_not_take_it_for_its_own() -> None:
    with pytest.raises(ValueError, match="non-leaf"):
        nn.Linear(32, 48, bias=False).weight = layer("float8").weight


@KINDS
def test_a_weight_without_its_scale_is_not_assigned(kind: str) -> None:
    """The layer would multiply it by the scale of the old weight."""
    held = layer(kind)
    before = held.weight.clone()
    with pytest.raises(ConfigError, match=r"weight: a torch\.float32 Parameter cannot replace"):
        held.weight = nn.Parameter(torch.ones(48, 32))
    assert torch.equal(held.weight, before)


def test_a_weight_in_bfloat16_is_assigned() -> None:
    """Compiled code reads the new weight, and its gradient arrives there, in float32."""
    gradients = []
    for compiled in (False, True):
        held = FP8Linear.from_linear(
            nn.Linear(32, 48, bias=False),
            Scaling("current", power_2_scales=True),
            Region(True),
            codec=get_codec("bf16"),
        )
        held.weight = nn.Parameter(torch.ones(48, 32, dtype=torch.bfloat16))
        run = torch.compile(held, backend="aot_eager", fullgraph=True) if compiled else held
        y = run(torch.ones(4, 32))
        y.sum().backward()
        assert torch.equal(y, torch.full((4, 48), 32.0))
        gradients.append(held.weight.grad)
    for gradient in gradients:
        assert gradient is not None
        assert torch.equal(gradient, torch.full((48, 32), 4.0))


@KINDS
def test_codes_are_not_averaged(kind: str) -> None:
    """torch's three ways of averaging, as they go over parameters."""
    for options in (
        {},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        {"avg_fn": get_ema_avg_fn(0.9)},
    ):
        model = nn.Sequential(layer(kind))
        average = AveragedModel(model, **options)  # type: ignore[arg-type]
        average.update_parameters(model)
        with pytest.raises(RuntimeError, match=REFUSED):
            average.update_parameters(model)
    parameter = layer(kind).parameter
    for use in (
        lambda p: p.lerp_(p, 0.1),
        lambda p: p * 0.9,
        lambda p: 1 - p,
        lambda p: p.float(),
        lambda p: p.data.to(torch.float64),
        lambda p: p.clone().add(1),
        lambda p: p.data.copy_(torch.ones(48, 32)),
        lambda p: torch.ones(48, 32).copy_(p),
    ):
        with torch.no_grad(), pytest.raises(RuntimeError, match=REFUSED):
            use(parameter)


@KINDS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_of_torch_do_not_step_codes(kind: str, fused: bool, optimizer: Any) -> None:
    held = layer(kind)
    held.set_weight_grad_dtype(torch.float16 if kind == "library" else torch.float32)
    held(torch.ones(2, 32, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer(held.parameters(), lr=1e-3, fused=fused).step()


@KINDS
@pytest.mark.parametrize("how", ["deepcopy", "save", "cast"])
def test_copies_of_codes_are_codes(kind: str, how: str) -> None:
    held = layer(kind)
    other = held
    if how == "deepcopy":
        other = copy.deepcopy(held)
    elif how == "save":
        torch.save(held, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        held.float().bfloat16()
    assert (
        isinstance(other.parameter, Codes)
        and isinstance(other.parameter, nn.Parameter)
        and other.parameter.requires_grad
    )
    assert (
        torch.equal(plain(other.parameter).float(), plain(held.parameter).float())
        and type(plain(held.parameter)) is Tensor
    )


@pytest.mark.parametrize("frozen", [False, True])
@KINDS
def test_traced_code_takes_codes_of_the_gradients_size(kind: str, frozen: bool) -> None:
    """Codes are a class of their own, which AOTAutograd does not take; the gradient is the eager one and goes to the Parameter."""
    found = []
    for compiled in (False, True):
        held = layer(kind)
        held.set_weight_grad_dtype(torch.float16 if kind == "library" else torch.bfloat16)
        held.parameter.requires_grad_(not frozen)
        x = torch.linspace(-1, 1, 128).view(4, 32).bfloat16().requires_grad_()
        y = (torch.compile(held, backend="aot_eager", fullgraph=True) if compiled else held)(x)
        y.float().square().sum().backward()
        found.append((y.detach(), x.grad, held.parameter.grad))
    for eager, traced in zip(*found, strict=True):
        assert (eager is None) == (traced is None) and (eager is None or torch.equal(eager, traced))
    assert (found[0][2] is None) == frozen


@pytest.mark.parametrize("kind", ["float8", "library"])
def test_compiled_code_reads_it(kind: str) -> None:
    """Traced, not compiled: a dtype that is asked for, and a product with the weight, whose gradient arrives."""
    eager, traced = layer(kind), layer(kind)

    def run(held: Any, x: Tensor) -> Tensor:
        return held(x.to(held.weight.dtype)) + F.linear(x.to(held.weight.dtype), held.weight)

    x = torch.randn(4, 32)
    for held, f in (
        (eager, run),
        (traced, torch.compile(run, backend="aot_eager", fullgraph=True)),
    ):
        f(held, x).float().square().sum().backward()
    torch.testing.assert_close(traced.parameter.grad, eager.parameter.grad, rtol=1e-2, atol=1e-2)
