"""The rules about stored state: their lines, their limits, and that the limits are those of the arithmetic."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fp8cfg.numerics.codecs import get_codec
from fp8cfg.schema.rules_adam import (
    FP16_LEAST,
    MANTISSA_BITS,
    adam_violations,
    frozen_averages,
    half_unit,
    late_updates,
    lost_averages,
    slow_averages,
)

O2 = {
    "weight": "fp16_scaled",
    "master_weight": "none",
    "weight_grad": "fp8_pow2",
    "comm": "fp8_pow2",
    "exp_avg": "fp8_pow2",
    "exp_avg_sq": "fp16_scaled",
}


def refused(
    lr: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    rounding: str = "nearest",
    **columns: str,
) -> list[str]:
    found = adam_violations({**O2, **columns}, rounding, betas, eps, lr, 0.02)
    return [str(violation) for violation in found]


FP16_V = "storage.exp_avg_sq=fp16: without a scale, second moments of gradients below 1.7e-04 become 0, and training can diverge with optim.eps={}; set it to "


LINES = [
    (
        {"exp_avg_sq": "fp8"},
        "storage.exp_avg_sq=fp8: second moments do not fit one FP8 scale per tensor, and training diverges; set it to fp8_block",
    ),
    (
        {"exp_avg_sq": "fp8_pow2", "betas": (0.9, 0.99)},
        "storage.exp_avg_sq=fp8_pow2: second moments do not fit one FP8 scale per tensor, and training diverges; set it to fp8_block",
    ),
    ({"exp_avg_sq": "fp16"}, FP16_V.format("1e-08") + "fp16_scaled, or bf16"),
    ({"exp_avg_sq": "fp16", "eps": 1e-4}, FP16_V.format("0.0001") + "fp16_scaled, or bf16"),
    (
        {"exp_avg_sq": "fp16", "eps": 1e-5, "betas": (0.9, 0.999)},
        FP16_V.format("1e-05") + "fp16_scaled",
    ),
    ({"exp_avg_sq": "fp16", "betas": (0.9, 0.9996)}, FP16_V.format("1e-08") + "fp32"),
    (
        {"betas": (0.98, 0.95)},
        "optim.betas=[0.98, 0.95]: rounding in storage.exp_avg=fp8_pow2 stops an average of rate 0.98, so it never decays; "
        "nearest is 0.9444, or set storage.exp_avg=fp8",
    ),
    (
        {"exp_avg_sq": "bf16", "betas": (0.9, 0.999)},
        "optim.betas=[0.9, 0.999]: rounding in storage.exp_avg_sq=bf16 stops an average of rate 0.999, so it never decays; "
        "nearest is 0.9961, or set storage.exp_avg_sq=fp16_scaled",
    ),
    (
        {"exp_avg_sq": "bf16", "betas": (0.9, 0.9999)},
        "optim.betas=[0.9, 0.9999]: rounding in storage.exp_avg_sq=bf16 stops an average of rate 0.9999, so it never decays; "
        "nearest is 0.9961, or set storage.exp_avg_sq=fp32",
    ),
    (
        {"weight": "fp8"},
        "storage.master_weight=none: storage.weight=fp8 needs master weights; set it to fp16_scaled or fp32",
    ),
    (
        {"weight": "bf16", "master_weight": "fp8_block"},
        "storage.master_weight=fp8_block: FP8 master weights lose small updates; set it to fp16_scaled or fp32",
    ),
    (
        {"lr": 1e-6},
        "optim.lr=1e-06: storage.weight=fp16_scaled loses most updates below 7.6e-06 of weights around 0.02; "
        "set storage.rounding=stochastic or storage.master_weight=fp32",
    ),
    (
        {"lr": 3e-5, "weight": "bf16"},
        "optim.lr=3e-05: storage.weight=bf16 loses most updates below 6.1e-05 of weights around 0.02; "
        "set storage.rounding=stochastic or storage.master_weight=fp32",
    ),
]


@pytest.mark.parametrize(("changed", "line"), LINES, ids=[line[:40] for _, line in LINES])
def test_each_refusal_is_one_line(changed: dict, line: str) -> None:
    assert refused(**changed) == [line]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"lr": 1e-6, "rounding": "stochastic"},
        {"lr": 1e-6, "master_weight": "fp32"},
        {"lr": 1e-5, "weight": "bf16", "master_weight": "fp16_scaled"},
        {"weight": "fp8", "master_weight": "fp16_scaled"},
        {"exp_avg_sq": "fp8_block"},
        {"exp_avg": "fp8", "betas": (0.98, 0.95)},
        {"exp_avg": "bf16", "exp_avg_sq": "bf16", "betas": (0.95, 0.99)},
        {"betas": (0.9, 0.999)},
        {"exp_avg_sq": "fp32", "betas": (0.9, 0.99999)},
        {"betas": (0.95, 0.95)},
        {"exp_avg_sq": "fp16", "eps": 2e-4},
        {"exp_avg": "fp16"},
        {"weight": "fp16"},
        {"master_weight": "fp16"},
        {"weight_grad": "fp16"},
    ],
)
def test_what_works_is_not_refused(changed: dict) -> None:
    assert refused(**changed) == []


def test_all_lines_come_at_once() -> None:
    assert len(refused(lr=1e-7, betas=(0.99, 0.99999), weight="fp16", exp_avg_sq="fp16")) == 4


def test_fp16_without_a_scale() -> None:
    """Below FP16_LEAST it is 0; roots of second moments that are not stay above the eps from which on it is accepted."""
    at = torch.tensor([FP16_LEAST, FP16_LEAST * 1.001])
    zero, least = get_codec("fp16").decode(get_codec("fp16").encode(at)).tolist()
    assert zero == 0 and least**0.5 > FP16_LEAST**0.5
    scaled = get_codec("fp16_scaled")
    assert bool((scaled.decode(scaled.encode(at)) > 0).all())
    assert list(lost_averages({**O2, "exp_avg": "fp16"})) == [
        "storage.exp_avg=fp16: averages below 3e-08 become 0; storage.exp_avg=fp16_scaled keeps them in the same memory"
    ]
    assert list(lost_averages({**O2, "exp_avg": "fp16_scaled"})) == []


def test_remarks() -> None:
    assert list(slow_averages({**O2, "exp_avg_sq": "bf16"}, (0.95, 0.99))) == [
        "optim.betas=[0.95, 0.99]: storage.exp_avg=fp8_pow2 follows shrinking gradients only in steps of two; up to 0.9444 it follows exactly"
    ]
    assert list(slow_averages(O2, (0.9, 0.999))) == []


@pytest.mark.parametrize(
    ("changed", "rounding", "lr", "end_lr", "said"),
    [
        ({}, "nearest", 3e-5, 3e-6, True),
        ({}, "stochastic", 3e-5, 3e-6, False),
        ({}, "nearest", 3e-4, 3e-5, False),
        ({}, "nearest", 3e-6, 3e-7, False),
        ({"master_weight": "fp32"}, "nearest", 3e-5, 3e-6, False),
        ({"weight": "fp8", "master_weight": "fp16_scaled"}, "nearest", 3e-5, 3e-6, True),
    ],
)
def test_a_learning_rate_that_ends_below_what_rounding_keeps_is_remarked(
    changed: dict, rounding: str, lr: float, end_lr: float, said: bool
) -> None:
    """Not where the rate that it starts with is refused already."""
    lines = list(late_updates({**O2, **changed}, rounding, lr, end_lr, 0.02))
    column = "master_weight" if changed else "weight"
    assert (
        lines
        == [
            f"optim.min_lr=3e-06: storage.{column}=fp16_scaled loses most updates below 7.6e-06 at the end of the schedule; "
            "storage.rounding=stochastic keeps their mean"
        ]
        * said
    )


def decayed(name: str, beta: float) -> tuple[float, float]:
    """What is left of averages between 1 and 2, least and most, without gradients; the first element keeps the scale."""
    stored = get_codec(name).encode(torch.cat([torch.tensor([2.0]), torch.linspace(1, 2, 999)]))
    for _ in range(int(8 / (1 - beta))):
        v = get_codec(name).decode(stored)
        v[1:] *= beta
        stored = get_codec(name).encode(v)
    rest = get_codec(name).decode(stored)[1:]
    return float(rest.min()), float(rest.max())


@pytest.mark.parametrize("name", ["bf16", "fp8_pow2"])
def test_limits_are_those_of_the_arithmetic(name: str) -> None:
    """Refused: not one of the averages moves. Remarked: they come to a stop on the way. Neither: they go on to the bottom."""
    bits = MANTISSA_BITS[name]
    never, always = 2.0 ** -(bits + 2), 1 / (2.0 ** (bits + 1) + 2)
    for rate, refusals, remarks in (
        (0.99 * never, 1, 0),
        (0.99 * always, 0, 1),
        (1.01 * always, 0, 0),
    ):
        columns = {**O2, "exp_avg": name, "exp_avg_sq": "fp32"}
        assert len(list(frozen_averages(columns, (1 - rate, 0.9)))) == refusals
        assert len(list(slow_averages(columns, (1 - rate, 0.9)))) == remarks
        low, high = decayed(name, 1 - rate)
        assert (low, high) == (1.0, 2.0) if refusals else high > 0.4 if remarks else high < 1e-3


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_unit_is_what_rounding_loses(name: str, dtype: torch.dtype) -> None:
    half = half_unit(0.02, MANTISSA_BITS[name])
    w = torch.tensor(0.02).to(dtype).float()
    assert (w + 0.99 * half).to(dtype) == w and (w + 1.01 * half).to(dtype) != w


def test_no_torch() -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, fp8cfg.schema.rules_adam; assert 'torch' not in sys.modules",
        ],
        check=True,
    )
