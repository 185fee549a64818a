"""Copies of FP8 layers, the random numbers of stochastic rounding, and products that are rounded once."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8cfg
from fp8cfg.numerics import E2M1, E4M3, FP8Linear, Region, Scaling, seed_rounding
from fp8cfg.numerics.formats import RandomStream, random_key
from fp8cfg.numerics.gemm import Operand, gemm
from fp8cfg.numerics.quantize import quantize
from fp8cfg.numerics.statistics import collect_statistics
from fp8cfg.numerics.stored_state import stored_state_dict
from tests.support.small import losses, small

NVFP4 = Scaling("nvfp4", E2M1, E2M1, weights_2d=True)
SCALINGS = {
    "delayed": Scaling(amax_history_len=4),
    "current": Scaling("current"),
    "block": Scaling("block", weights_2d=True),
    "mxfp8": Scaling("mxfp8", backward=E4M3),
    "nvfp4": NVFP4,
}


def layer(scaling: Scaling = NVFP4, seed: int = 0) -> FP8Linear:
    torch.manual_seed(0)
    made = FP8Linear.from_linear(
        nn.Linear(64, 48, dtype=torch.bfloat16), scaling, Region(active=True)
    )
    seed_rounding(made, seed)
    return made


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(96, 64, generator=generator).bfloat16(), torch.randn(
        96, 48, generator=generator
    ).bfloat16()


def ran(made: FP8Linear, dy: Tensor | None = None, recompute: bool = False) -> list[Tensor]:
    """The output and the gradients of one pass."""
    x, own = batch()
    x.requires_grad_()
    made.zero_grad()
    y = checkpoint(made, x, use_reentrant=False) if recompute else made(x)
    assert isinstance(y, Tensor) and made.bias is not None
    y.backward(own if dy is None else dy)
    found = (y.detach(), x.grad, made.weight.grad, made.bias.grad)
    return [t.clone() for t in found if t is not None]


def equal(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    return [torch.equal(x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_a_copy_multiplies_as_its_original(scaling: Scaling) -> None:
    original = layer(scaling)
    copies = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    want = ran(original)
    for made in copies:
        assert all(equal(ran(made), want))
        assert torch.equal(made.gemms_ran, original.gemms_ran)


def test_what_rounds_a_gradient_is_the_seeds_the_layers_and_the_passes() -> None:
    first = layer()
    torch.manual_seed(7)  # torch's generator has no part in it
    assert all(equal(ran(layer()), one := ran(first)))
    assert equal(ran(first), one) == [True, False, False, True], (
        "the next microbatch rounds by other numbers"
    )
    assert equal(ran(layer(seed=1)), one) == [True, False, False, True]
    other = layer()
    other.seed_rounding(0, "another layer", 0)
    assert equal(ran(other), one) == [True, False, False, True]


def test_ranks_round_by_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ran(layer())
    monkeypatch.setenv("RANK", "1")
    assert equal(ran(layer()), here) == [True, False, False, True]


@pytest.mark.parametrize("how", ["to_empty", "assign"])
def test_layers_from_the_meta_device_keep_their_seeds(how: str) -> None:
    """One key for all layers would round their gradients by the same numbers."""
    keys = []
    for device in ("cpu", "meta"):
        model = nn.Sequential(nn.Linear(64, 64, device=device), nn.Linear(64, 64, device=device))
        for i, linear in enumerate(model):
            model[i] = FP8Linear.from_linear(linear, NVFP4, Region(True))
        seed_rounding(model, 5)
        if device == "meta" and how == "to_empty":
            model.to_empty(device="cpu")
        elif device == "meta":
            plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            model.load_state_dict(plain.state_dict(), assign=True)
        keys.append([made.get_buffer("fp8_rounding_key").tolist() for made in model])
    assert keys[0] == keys[1]
    assert keys[0][0] != keys[0][1]


def test_a_recomputation_rounds_as_the_pass_that_it_repeats() -> None:
    assert all(equal(ran(layer(), recompute=True), ran(layer())))


def test_the_memory_layout_of_a_gradient_changes_nothing() -> None:
    dy = batch()[1]
    assert all(equal(ran(layer(), dy.t().contiguous().t()), ran(layer(), dy)))


def test_the_count_of_draws_is_state_and_the_key_is_not() -> None:
    made, resumed = layer(), layer()
    ran(made)
    state = stored_state_dict(made)
    assert (
        "fp8_rounding_count" in state
        and "fp8_rounding_key" not in state
        and list(made.state_dict()) == ["weight", "bias"]
    )
    resumed.load_state_dict(state)
    assert all(equal(ran(resumed), ran(made)))
    plain = layer(Scaling("current"))
    plain.load_state_dict(dict(state))  # of another scaling: left out
    resumed.load_state_dict(plain.state_dict())
    assert int(resumed.fp8_rounding_count) == 0, "new weights begin anew"


def test_statistics_draw_nothing() -> None:
    made, beside = layer(), layer()
    x, dy = batch()
    collect_statistics(made, lambda: made(x.requires_grad_()).backward(dy))
    assert all(equal(ran(made), ran(beside)))


def test_random_numbers_are_even_and_differ_by_draw_and_lane() -> None:
    key = random_key(0, "layer", 0)
    draws = {
        (n, lane): RandomStream(key, torch.tensor(n, dtype=torch.int32), lane).uniform(0, 1 << 16)
        for n in range(3)
        for lane in range(2)
    }
    for u in draws.values():
        assert u.min() >= 0 and u.max() < 1 and u.mean() == pytest.approx(0.5, abs=0.005)
    stacked = torch.stack([*draws.values()])
    assert torch.corrcoef(stacked).fill_diagonal_(0).abs().max() < 0.02


def test_two_jobs_of_one_recipe_train_alike_and_another_seed_does_not() -> None:
    words = ("precision=bf16_nvfp4",)
    torch.manual_seed(1)
    one = losses(*words, count=3)
    torch.manual_seed(2)
    assert losses(*words, count=3) == one
    job = fp8cfg.build(small(*words))
    keys = [m.fp8_rounding_key.tolist() for m in job.model.modules() if isinstance(m, FP8Linear)]
    assert len({tuple(k) for k in keys}) == len(keys), "each layer has its own"
    assert keys != [
        m.fp8_rounding_key.tolist()
        for m in fp8cfg.build(small(*words, "trainer.seed=7")).model.modules()
        if isinstance(m, FP8Linear)
    ]


@pytest.mark.parametrize("carrier", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_emulated_product_is_rounded_once(out: torch.dtype, carrier: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b, bias = torch.randn(64, 256), torch.randn(48, 256), torch.randn(48).bfloat16()
    qa, qb = (quantize(t, torch.tensor(s), E4M3, carrier) for t, s in ((a, 37.3), (b, 91.7)))
    assert qa.scale_inv is not None and qb.scale_inv is not None
    exact = (
        qa.data.double() @ qb.data.double().t() * (qa.scale_inv * qb.scale_inv).double()
        + bias.double()
    )
    found = gemm(Operand(*qa), Operand(*qb), out, None, 0, bias)
    if out == torch.float32:
        size = (
            qa.data.double().abs()
            @ qb.data.double().abs().t()
            * (qa.scale_inv * qb.scale_inv).double()
            + bias.double().abs()
        )
        assert ((found.double() - exact).abs() <= size * 2.0**-22).all()
    else:  # a second rounding would change one element in five of bfloat16
        assert (found == exact.to(out)).double().mean() > 0.99


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16], ids=str)
def test_a_wider_bias_is_added_as_the_hardware_adds_it(out: torch.dtype) -> None:
    """In the dtype of the output: before sums are rounded, or after where operands have tiles. These sums are exact."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (n, 128), generator=draw).float() for n in (64, 48))
    one, bias = torch.tensor(1.0), torch.randn(48, generator=draw) * 100
    emulated = [Operand(t.bfloat16(), one, E4M3) for t in (a, b)]
    real = [Operand(t.to(E4M3.dtype), one, E4M3) for t in (a, b)]
    want = (a @ b.t() + bias.to(out).float()).to(out)
    assert torch.equal(gemm(emulated[0], emulated[1], out, None, 0, bias), want)
    assert torch.equal(gemm(real[0], real[1], out, None, 0, bias), want)
    tiled = [Operand(t.bfloat16(), None, E4M3, (1, 128)) for t in (a, b)]
    assert torch.equal(
        gemm(tiled[0], tiled[1], out, None, 0, bias), (a @ b.t()).to(out) + bias.to(out)
    )
