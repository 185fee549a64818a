"""Validation rules of low-bit Adam state: which codecs can hold moments and masters without the average getting stuck.

Rounding to nearest loses what is less than half the distance to the neighbour. With m bits of mantissa that is at least 2^-(m+2)
of a value, so an average of rate beta with 1 - beta below it never moves; at most it is 1 / (2^(m+1) + 2), above which none stops.
The same goes for weights and the size of their updates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fp8cfg.config.refusal import Refusal
from fp8cfg.config.storage import COLUMNS, FP8_CODECS

MANTISSA_BITS = {"bf16": 7, "fp16": 10, "fp16_scaled": 10, "fp8_pow2": 3}
"""Of the codecs that are rounded on a grid which does not move with the tensor's amax."""
ADAM = {"exp_avg": 0, "exp_avg_sq": 1}
"""The columns of the moments, and which of the betas averages each."""
_LEVELS = ("opt_level", "backend")
"""The keys that say what a column is where it is auto."""
FP16_LEAST = 2.0**-25
"""What fp16 without a scale rounds to 0, and everything below: half its smallest number."""


def storage_refusals(
    columns: Mapping[str, str],
    rounding: str,
    betas: tuple[float, float],
    eps: float,
    lr: float,
    weight_size: float,
    explicit: Collection[str] = COLUMNS,
    stochastic: bool = True,
) -> list[str]:
    """A line for each reason why Adam cannot work with these columns. `weight_size` is the magnitude of a typical weight, the
    standard deviation that they start with. Of the columns those that are `explicit` can give way, for the others say what a level
    does; rounding can where the backend can round `stochastic`."""
    weight, master = columns["weight"], columns["master_weight"]
    return [
        _with_columns(line, explicit, stochastic)
        for line in (
            *second_moment(columns["exp_avg_sq"], betas[1], eps),
            *frozen_averages(columns, betas),
            *no_masters(weight, master),
            *lost_updates(weight, master, rounding, lr, weight_size),
        )
    ]


def _with_columns(line: str, explicit: Collection[str], stochastic: bool) -> str:
    """`line`, in which columns that are not `explicit` do not give way, nor does rounding unless it can be `stochastic`."""
    if not isinstance(line, Refusal):
        return line
    fixed = {f"storage.{column}" for column in COLUMNS if column not in explicit} | (
        set() if stochastic else {"storage.rounding"}
    )
    return Refusal(
        line, [(key, new) for key, new in line.gives if key not in fixed], [*line.to, *_LEVELS]
    )


def second_moment(codec: str, beta: float, eps: float) -> Iterator[str]:
    """Second moments in FP8 under one scale, or in fp16 without one: most become 0, and dividing by their roots ends in NaN, or
    in updates by gradient / eps. An eps as large as those roots keeps these as small as they were.
    """
    least = math.sqrt(FP16_LEAST)
    if codec == "fp16" and eps < least:
        also = ", or bf16" if beta <= _slowest(MANTISSA_BITS["bf16"]) else ""
        yield Refusal(
            "storage.exp_avg_sq=fp16: without a scale second moments of gradients below"
            f" {least:.1e} become 0, optim.eps={eps:g} alone divides these, and training can"
            f" diverge; write {_follows('bf16', beta)}{also}",
            [("storage.exp_avg_sq", _follows("bf16", beta)), ("optim.eps", least)],
            ["storage.exp_avg_sq", "optim.eps"],
        )
    if codec in ("fp8", "fp8_pow2"):
        yield (
            f"storage.exp_avg_sq={codec}: second moments do not fit one FP8 scale a tensor,"
            " training diverges; write fp8_block"
        )


def frozen_averages(columns: Mapping[str, str], betas: tuple[float, float]) -> Iterator[str]:
    """Moving averages that rounding keeps from decaying at all, wherever they lie between two powers of two."""
    for column, which in ADAM.items():
        codec, beta = columns[column], betas[which]
        bits = MANTISSA_BITS.get(codec)
        if (
            bits is None
            or 1 - beta >= 2.0 ** -(bits + 2)
            or (column, codec) == ("exp_avg_sq", "fp8_pow2")
        ):
            continue
        nearest = [_slowest(bits) if i == which else b for i, b in enumerate(betas)]
        yield Refusal(
            f"optim.betas={list(betas)}: storage.{column}={codec} rounds an average of rate"
            f" {beta:g} back to where it was, so it never comes down; nearest is"
            f" {_slowest(bits):g}, or write storage.{column}={_follows(codec, beta)}",
            [(f"storage.{column}", _follows(codec, beta)), ("optim.betas", tuple(nearest))],
            [f"storage.{column}", "optim.betas"],
        )


def slow_averages(columns: Mapping[str, str], betas: tuple[float, float]) -> Iterator[str]:
    """Remarks, not refusals: averages that stop coming down within a factor of two, once gradients have become small."""
    for column, which in ADAM.items():
        bits = MANTISSA_BITS.get(columns[column])
        if bits is not None and 2.0 ** -(bits + 2) <= 1 - betas[which] < _stops(bits):
            yield (
                f"optim.betas={list(betas)}: storage.{column}={columns[column]} follows gradients"
                f" that shrink only by halves; up to {_slowest(bits):g} it follows all the way"
            )


def lost_averages(columns: Mapping[str, str]) -> Iterator[str]:
    """Remarks, not refusals: gradients of large models are small, and where their averages are 0 nothing moves."""
    if columns["exp_avg"] == "fp16":
        least = f"{FP16_LEAST:.0e}"
        yield (
            f"storage.exp_avg=fp16: without a scale averages below {least} become 0; fp16_scaled"
            " keeps them, in as many bytes"
        )


def no_masters(weight: str, master: str) -> Iterator[str]:
    """FP8 weights without master weights: almost every update is smaller than half the distance between two FP8 values."""
    if weight in FP8_CODECS and master == "none":
        yield Refusal(
            f"storage.master_weight=none: storage.weight={weight} needs masters; write fp16_scaled"
            " or fp32",
            [("storage.master_weight", "fp32"), ("storage.weight", "auto")],
            ["storage.weight", "storage.master_weight"],
        )
    elif master in FP8_CODECS:
        yield (
            f"storage.master_weight={master}: FP8 loses the updates that masters are there to keep;"
            " write fp16_scaled or fp32"
        )


def lost_updates(
    weight: str, master: str, rounding: str, lr: float, weight_size: float
) -> Iterator[str]:
    """Learning rates (the size of Adam's updates) below half the rounding step of the weights that are updated."""
    column, codec = _moved(weight, master)
    if lr < (half := _lost_below(codec, rounding, weight_size)):
        gives: list[tuple[str, Any]] = [
            ("storage.rounding", "stochastic"),
            ("storage.master_weight", "fp32"),
            ("optim.lr", half),
        ]
        yield Refusal(
            f"optim.lr={lr:g}: storage.{column}={codec} rounds most updates of that size away, at"
            f" weights of {weight_size:g} those below {half:.2g}; write storage.rounding=stochastic"
            " or storage.master_weight=fp32",
            gives,
            ["optim.lr", "storage.rounding", "storage.weight", "storage.master_weight"],
        )


def late_updates(
    columns: Mapping[str, str], rounding: str, lr: float, end_lr: float, weight_size: float
) -> Iterator[str]:
    """Remarks, not refusals: learning rates that fall below it later in the schedule."""
    column, codec = _moved(columns["weight"], columns["master_weight"])
    if end_lr < (half := _lost_below(codec, rounding, weight_size)) <= lr:
        yield (
            f"optim.min_lr={end_lr:g}: storage.{column}={codec} rounds most updates below"
            f" {half:.2g} away, where the schedule ends; storage.rounding=stochastic keeps their"
            " mean"
        )


def _moved(weight: str, master: str) -> tuple[str, str]:
    """The column that a step moves, and its codec."""
    return ("weight", weight) if master == "none" else ("master_weight", master)


def _lost_below(codec: str, rounding: str, weight_size: float) -> float:
    """The size of updates that rounding loses; 0 where it loses none."""
    if rounding == "stochastic" or codec not in ("bf16", "fp16", "fp16_scaled"):
        return 0.0
    return half_unit(weight_size, MANTISSA_BITS[codec])


def half_unit(size: float, mantissa_bits: int) -> float:
    """Half the distance between two neighbours of a value, in a format with that many bits of mantissa."""
    return float(2.0 ** (math.floor(math.log2(size)) - mantissa_bits - 1))


def _slowest(bits: int) -> float:
    """The largest beta, to four digits downwards, whose average always comes down."""
    return math.floor((1 - _stops(bits)) * 1e4) / 1e4


def _stops(bits: int) -> float:
    return 1 / (2.0 ** (bits + 1) + 2)


def _follows(codec: str, beta: float) -> str:
    """A codec for that average, as narrow as may be."""
    if codec == "fp8_pow2":
        return "fp8"
    return (
        "fp16_scaled"
        if codec == "bf16" and beta <= _slowest(MANTISSA_BITS["fp16_scaled"])
        else "fp32"
    )
