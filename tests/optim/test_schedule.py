"""The learning rate against NeMo's and Megatron's formulas, written out as they stand there."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8cfg.optim import Schedule

counts = st.integers(0, 40)
rates = st.floats(1e-6, 1.0)


def nemo_cosine(step: int, schedule: Schedule) -> float:
    """WarmupAnnealHoldPolicy.get_lr and CosineAnnealing of nemo/core/optim/lr_scheduler.py, in their order."""
    warmup, constant, last = schedule.warmup_steps, schedule.constant_steps, schedule.max_steps
    high, low = schedule.max_lr, schedule.min_lr
    decay = last - (constant + warmup)

    def megatron() -> float:
        if warmup > 0 and step <= warmup:
            return high * float(step) / float(warmup)
        if step > warmup + decay:
            return low
        return low + 0.5 * (math.cos(math.pi * (float(step - warmup) / float(decay))) + 1.0) * (
            high - low
        )

    if warmup > 0 and step <= warmup:
        return megatron() if constant else high * (step + 1) / (warmup + 1)
    if constant > 0 and warmup + decay < step <= last:
        return megatron()
    if step > last:
        return low
    if constant == 0:
        return (high - low) * (
            0.5 * (1 + math.cos(math.pi * (step - warmup) / (last - warmup)))
        ) + low
    return megatron()


def megatron_linear(step: int, schedule: Schedule) -> float:
    """get_lr of megatron/core/optimizer_param_scheduler.py; lr_decay_steps ends where the constant steps begin."""
    decay_steps = schedule.max_steps - schedule.constant_steps
    if step > decay_steps:
        return schedule.min_lr
    ratio = float(step - schedule.warmup_steps) / float(decay_steps - schedule.warmup_steps)
    return schedule.min_lr + (1.0 - ratio) * (schedule.max_lr - schedule.min_lr)


@given(
    warmup=counts,
    constant=counts,
    decay=st.integers(1, 40),
    step=st.integers(0, 150),
    high=rates,
    share=st.floats(0, 1),
)
def test_cosine_is_nemos(
    warmup: int, constant: int, decay: int, step: int, high: float, share: float
) -> None:
    schedule = Schedule(high, high * share, warmup, warmup + constant + decay, constant)
    assert schedule.lr_at(step) == pytest.approx(nemo_cosine(step, schedule), rel=1e-12, abs=1e-18)


@given(warmup=counts, constant=counts, decay=st.integers(1, 40), after=st.integers(1, 100))
def test_linear_is_megatrons_after_the_warmup(
    warmup: int, constant: int, decay: int, after: int
) -> None:
    schedule = Schedule(3e-4, 3e-5, warmup, warmup + constant + decay, constant, "linear")
    step = warmup + after
    assert schedule.lr_at(step) == pytest.approx(megatron_linear(step, schedule), rel=1e-12)


@given(st.sampled_from(["cosine", "linear", "constant"]), counts, counts, counts)
def test_it_rises_then_falls_within_its_bounds(
    decay: str, warmup: int, constant: int, last: int
) -> None:
    schedule = Schedule(3e-4, 3e-5, warmup, last, constant, decay)
    rates = [schedule.lr_at(step) for step in range(140)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates) <= 3e-4 and min(rates[warmup:]) >= 3e-5
    assert rates[-1] == (3e-4 if decay == "constant" else 3e-5)


def test_the_default_recipe_at_its_corners() -> None:
    schedule = Schedule(max_lr=3e-4, min_lr=3e-5, warmup_steps=2000, max_steps=1_168_251)
    assert schedule.lr_at(0) == 3e-4 / 2001
    assert schedule.lr_at(1999) == 3e-4 * (2000 / 2001)
    assert schedule.lr_at(2000) == 3e-4
    assert schedule.lr_at(2001) < 3e-4
    assert schedule.lr_at((2000 + 1_168_251) // 2) == pytest.approx(1.65e-4, rel=1e-5)
    assert schedule.lr_at(1_168_251) == schedule.lr_at(10**9) == 3e-5


def test_warmup_from_zero_where_there_are_constant_steps() -> None:
    schedule = Schedule(1.0, 0.1, warmup_steps=4, max_steps=20, constant_steps=6)
    assert [schedule.lr_at(step) for step in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert schedule.lr_at(9) == pytest.approx(0.55)
    assert schedule.lr_at(14) == schedule.lr_at(20) == 0.1


def test_apply_sets_every_group_and_keeps_nothing() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 7.0}], lr=1.0
    )
    schedule = Schedule(1.0, 0.0, warmup_steps=0, max_steps=10, decay="linear")
    for step in (9, 2, 9):  # in any order
        assert schedule.apply(optimizer, step) == pytest.approx(1 - step / 10)
        assert [group["lr"] for group in optimizer.param_groups] == [schedule.lr_at(step)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_lr": 1.0}, "min_lr=1.0 must lie between 0 and max_lr=0.1"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must not be negative"),
        ({"decay": "cosin"}, "decay='cosin' is not one of cosine, linear, constant"),
    ],
)
def test_no_schedule_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**({"max_lr": 0.1, "min_lr": 0.0, "warmup_steps": 1, "max_steps": 9} | change))
