"""The low-bit optimizers against MS-AMP's documented update, and MS-AMP's traps that are arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fp8cfg.numerics.codecs import CODECS
from fp8cfg.optim.low_bit.adam import LowBitAdam, LowBitAdamW, LowBitOptimizer
from fp8cfg.optim.low_bit.columns import Columns, named_columns
from tests.support.low_bit import BETAS, ROWS, bits, build, normal, parameters, train


class MSAMP:
    """LBAdamW and LBAdamWBase of MS-AMP as documented, one tensor: `o2` stores moments in e4m3 and fp16. Without
    its traps, and with the scale's exponent in double precision."""

    def __init__(
        self,
        w: torch.Tensor,
        o2: bool,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.o2, self.hyper, self.t = o2, (lr, *betas, eps, weight_decay), 0
        self.m, self.v = (torch.zeros_like(w), 1.0), (torch.zeros_like(w), 1.0)
        self.w = cast(w, torch.float16)

    def step(self, grad: torch.Tensor) -> None:
        lr, b1, b2, eps, wd = self.hyper
        self.t += 1
        g = real(cast(grad, torch.float8_e4m3fn))
        p = real(self.w) * (1 - lr * wd)
        m, v = b1 * real(self.m) + (1 - b1) * g, b2 * real(self.v) + (1 - b2) * g * g
        root = v.double().sqrt().float()
        p = p - lr / (1 - b1**self.t) * (m / (root / math.sqrt(1 - b2**self.t) + eps))
        self.w = cast(p, torch.float16)
        self.m, self.v = (
            (cast(m, torch.float8_e4m3fn), cast(v, torch.float16))
            if self.o2
            else ((m, 1.0), (v, 1.0))
        )


def cast(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    amax = x.abs().max().item()
    scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / amax)) if amax > 0 else 1.0
    return (x * scale).to(dtype), 1 / scale


def real(stored: tuple[torch.Tensor, float]) -> torch.Tensor:
    return stored[0].float() * stored[1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_msamp_bits(level: str) -> None:
    """64 x 128, 50 steps, FP8 gradients: weights, moments and scales equal in every bit."""
    w = normal(64, 128, scale=0.02)
    p = {"w": nn.Parameter(w.clone())}
    ours, theirs = build(ROWS[level], p, eps=1e-8), MSAMP(w, level == "O2", 1e-3, BETAS, 1e-8, 0.1)
    for step in range(50):
        g = normal(64, 128, seed=step, scale=1e-3)
        p["w"].grad = g.clone()
        ours.step()
        ours.zero_grad()
        theirs.step(g)
        state = ours.state[p["w"]]
        for (data, *scale), (expected, expected_scale) in (
            (state["weight"], theirs.w),
            (state["exp_avg"], theirs.m),
            (state["exp_avg_sq"], theirs.v),
        ):
            assert torch.equal(bits(data), bits(expected)) and all(
                s.item() == expected_scale for s in scale
            )


def linear_steps(
    cls: type[torch.optim.Optimizer] | type[LowBitOptimizer], c: Columns | None, steps: int = 4
) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """MS-AMP's test_adamw: seed 1000, x randn(4, 4), Linear(4, 4), weight decay and learning rate 1e-3, loss = sum."""
    torch.manual_seed(1000)
    x, linear = torch.randn(4, 4), nn.Linear(4, 4)
    options = {} if c is None else {"columns": c}
    optimizer = cls(linear.named_parameters(), lr=1e-3, weight_decay=1e-3, **options)
    for _ in range(steps):
        linear(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return linear, optimizer


@pytest.mark.parametrize(
    ("exp_avg", "exp_avg_sq"),
    [
        ("fp8_pow2", "fp8_pow2"),
        ("fp8_pow2", "fp16_scaled"),
        ("fp16_scaled", "fp8_pow2"),
        ("fp16_scaled", "fp16_scaled"),
        ("fp32", "fp32"),
        ("fp8", "fp8_block"),
    ],
)
@pytest.mark.parametrize(
    ("mine", "theirs"), [(LowBitAdamW, torch.optim.AdamW), (LowBitAdam, torch.optim.Adam)]
)
def test_msamp_four_steps_of_a_linear(
    mine: type[LowBitOptimizer], theirs: Any, exp_avg: str, exp_avg_sq: str
) -> None:
    ours, _ = linear_steps(
        mine, named_columns("fp16_scaled", "none", "fp8_pow2", exp_avg, exp_avg_sq)
    )
    reference, _ = linear_steps(theirs, None)
    assert torch.allclose(ours.weight, reference.weight, rtol=0, atol=3e-4)


def test_msamp_resumed_weights_are_equal() -> None:
    five, _ = linear_steps(LowBitAdamW, ROWS["O2"], 5)
    _, optimizer = linear_steps(LowBitAdamW, ROWS["O2"], 4)
    state = optimizer.state_dict()
    torch.manual_seed(1000)
    x, resumed = torch.randn(4, 4), nn.Linear(4, 4)
    again = LowBitAdamW(resumed.named_parameters(), columns=ROWS["O2"])
    again.load_state_dict(state)
    resumed(x).sum().backward()
    again.step()
    assert (
        torch.equal(resumed.weight, five.weight) and again.param_groups[0]["weight_decay"] == 1e-3
    )


def test_msamp_weights_of_o3_are_those_of_o2_in_fp8() -> None:
    w = normal(64, 128, scale=0.02)
    two, three = {"w": nn.Parameter(w.clone())}, {"w": nn.Parameter(w.clone())}
    o2, o3 = build(ROWS["O2"], two), build(ROWS["O3"], three)
    for o, p in ((o2, two), (o3, three)):
        train(o, p, range(1))
    half = o2.state[two["w"]]["weight"]
    assert torch.equal(bits(half[0]), bits(o3.state[three["w"]]["master"][0]))
    data, scale_inv = CODECS["fp8_pow2"].encode(CODECS["fp16_scaled"].decode(half))
    assert (
        torch.equal(bits(data), bits(o3.state[three["w"]]["weight"][0]))
        and scale_inv == o3.state[three["w"]]["weight"][1]
    )
    assert torch.equal(three["w"], CODECS["fp8_pow2"].decode((data, scale_inv)))


# Traps of MS-AMP that are arithmetic; 2 and 7 are in test_codecs.py.


@pytest.mark.parametrize("row", ["O1", "O2", "O3", "blocks"])
def test_trap_tiny_gradients(row: str) -> None:
    """1: gradients of 1e-16 gave second moments an infinite scale, and weights NaN at the next step."""
    p = parameters(ROWS[row], (16, 128))
    optimizer = build(ROWS[row], p)
    train(optimizer, p, range(3), scale=1e-16)
    train(optimizer, p, range(3, 5), scale=1e-20)
    assert all(
        torch.isfinite(t.float()).all() for t in (*p.values(), *optimizer.state_tensors().values())
    )


def test_trap_l2_decay_reaches_the_stored_moments() -> None:
    """3: the stored moments of LBAdam did not contain the decay, here half of them."""
    w = normal(64, 128)
    mine, theirs = {"w": nn.Parameter(w.clone())}, nn.Parameter(w.clone())
    ours, reference = (
        build(ROWS["O2"], mine, LowBitAdam, weight_decay=0.5),
        torch.optim.Adam([theirs], lr=1e-3, betas=BETAS, weight_decay=0.5),
    )
    for step in range(20):
        mine["w"].grad = theirs.grad = normal(64, 128, seed=step)
        ours.step()
        reference.step()
        ours.zero_grad()
    for moment in ("exp_avg", "exp_avg_sq"):
        m, true = (
            getattr(ROWS["O2"], moment).decode(ours.state[mine["w"]][moment]),
            reference.state[theirs][moment],
        )
        assert (m - true).norm() / true.norm() < 0.08


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("row", ROWS)
def test_trap_parameters_of_every_dtype_move(row: str, dtype: torch.dtype) -> None:
    """4: bf16 and fp16 parameters were never updated. Here some become copies of what is stored."""
    p = {
        "w": nn.Parameter(normal(16, 128).to(dtype)),
        "b": nn.Parameter(normal(16, seed=1).to(dtype)),
    }
    before = {name: v.detach().clone() for name, v in p.items()}
    optimizer = build(ROWS[row], p, lr=0.1)
    train(optimizer, p, range(3))
    assert all(
        0.1 < (p[name].float() - before[name].float()).abs().mean() < 0.4 and p[name].dtype == dtype
        for name in p
    )


def test_trap_weights_stay_tied_and_frozen_ones_frozen() -> None:
    """5: a tied weight is one parameter and one state; a frozen one has none, and is not moved."""
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(8, 4),
            "head": nn.Linear(4, 8, bias=False),
            "frozen": nn.Linear(4, 4),
        }
    )
    model["head"].weight = model["embed"].weight
    model["frozen"].requires_grad_(False)
    frozen = model["frozen"].weight.clone()
    optimizer = LowBitAdamW(
        [(n, p) for n, p in model.named_parameters() if p.requires_grad], columns=ROWS["O2"]
    )
    model["frozen"](model["head"](model["embed"](torch.arange(8)))[:, :4]).sum().backward()
    optimizer.step()
    assert (
        list(optimizer.names.values()) == ["embed.weight"]
        and model["head"].weight is model["embed"].weight
    )
    assert torch.equal(frozen, model["frozen"].weight) and not model["frozen"].weight.requires_grad


def test_trap_adamw_is_no_adam() -> None:
    """6: since torch 2.7 AdamW is a subclass of Adam, and MS-AMP takes it for one."""
    assert not issubclass(LowBitAdamW, LowBitAdam) and not issubclass(LowBitAdam, LowBitAdamW)
