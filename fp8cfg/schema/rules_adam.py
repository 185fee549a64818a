"""Validation rules of Adam with low-precision state: legal dtypes of its moments and weights.

Adam averages gradients (exp_avg) and squared gradients (exp_avg_sq). It divides the first average by
the root of the second and changes the weight by about `lr` times the quotient. Rounding after each
step can break this in three ways, and each has a rule here:

    second moments     round to 0, and the division explodes
    moving averages    round back to the same value, and never decay
    weights            round back to the same value, and never move

A dtype with an exact scale, such as fp8, escapes the second failure: the scale follows the amax, so
the rounding grid moves with a decaying average. Powers of two stay, and so do plain dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fp8cfg.schema.storage import COLUMNS, FP8_CODECS
from fp8cfg.schema.violation import Violation

MANTISSA_BITS = {"bf16": 7, "fp16": 10, "fp16_scaled": 10, "fp8_pow2": 3}
"""Mantissa bits of dtypes with a fixed rounding grid, independent of the amax of the tensor."""
ADAM = {"exp_avg": 0, "exp_avg_sq": 1}
"""Columns of the moments, with the index of their decay rate in optim.betas."""
_LEVELS = ("opt_level", "backend")
"""Keys that set a column on auto."""
FP16_LEAST = 2.0**-25
"""Half of fp16's smallest number, 2**-24. fp16 without a scale rounds this and less to 0."""


def adam_violations(
    columns: Mapping[str, str],
    rounding: str,
    betas: tuple[float, float],
    eps: float,
    lr: float,
    weight_size: float,
    explicit: Collection[str] = COLUMNS,
    stochastic: bool = True,
) -> list[Violation]:
    """Lists the reasons why Adam cannot work with state in these dtypes.

    Args:
        columns: Dtype of each storage column.
        rounding: storage.rounding.
        betas: Decay rates of exp_avg and exp_avg_sq.
        eps: Adam's epsilon, added to the root of exp_avg_sq.
        lr: The largest learning rate, about the size of Adam's updates.
        weight_size: Magnitude of a typical weight: the standard deviation at the start.
        explicit: Columns that the recipe sets. Other columns follow from a level, so no fix changes
            them.
        stochastic: Whether the backend can round stochastically.
    """
    weight, master = columns["weight"], columns["master_weight"]
    violations = [
        *second_moment_violations(columns["exp_avg_sq"], betas[1], eps),
        *frozen_averages(columns, betas),
        *missing_masters(weight, master),
        *lost_updates(weight, master, rounding, lr, weight_size),
    ]
    # A level overwrites columns on auto. A fix there would have no effect.
    fixed = {f"storage.{column}" for column in COLUMNS if column not in explicit}
    if not stochastic:
        fixed.add("storage.rounding")
    return [_without_fixes(violation, fixed) for violation in violations]


def _without_fixes(violation: Violation, keys: Collection[str]) -> Violation:
    """Returns `violation` without its fixes of `keys`, and with the level as another cause."""
    if not violation.fixes:
        return violation
    fixes = [(key, value) for key, value in violation.fixes if key not in keys]
    return replace(violation, fixes=fixes, caused_by=[*violation.caused_by, *_LEVELS])


def second_moment_violations(dtype: str, beta: float, eps: float) -> Iterator[Violation]:
    """Rejects second moments that mostly become 0.

    That happens in FP8 with one scale, and in fp16 without a scale. The update is then NaN, or
    gradient / eps. An eps as large as the lost roots keeps updates small.

    Args:
        dtype: Dtype of exp_avg_sq.
        beta: Decay rate of exp_avg_sq.
        eps: Adam's epsilon.
    """
    least_root = math.sqrt(FP16_LEAST)
    if dtype == "fp16" and eps < least_root:
        wider = _wider_dtype("bf16", beta)
        alternative = ", or bf16" if beta <= _largest_beta(MANTISSA_BITS["bf16"]) else ""
        yield Violation(
            "storage.exp_avg_sq=fp16",
            f"without a scale, second moments of gradients below {least_root:.1e} become 0, and"
            f" training can diverge with optim.eps={eps:g}; set it to {wider}{alternative}",
            [("storage.exp_avg_sq", wider), ("optim.eps", least_root)],
            ["storage.exp_avg_sq", "optim.eps"],
        )
    # Squares span twice the powers of two of gradients, and FP8 with one scale has too few. The codec
    # fp8_block stores square roots, with a scale per 128 values.
    if dtype in ("fp8", "fp8_pow2"):
        yield Violation(
            f"storage.exp_avg_sq={dtype}",
            "second moments do not fit one FP8 scale per tensor, and training diverges; set it to"
            " fp8_block",
        )


def frozen_averages(columns: Mapping[str, str], betas: tuple[float, float]) -> Iterator[Violation]:
    """Rejects moving averages that never decay because rounding undoes each step.

    A step without gradients moves a value v by v * (1 - beta). Between 1 and 2 neighbors are
    2**-bits apart, and rounding undoes a move below half of that. If even 2 moves less, no value
    between 1 and 2 moves. Other powers of two behave alike.

    Args:
        columns: Dtype of each storage column.
        betas: Decay rates of exp_avg and exp_avg_sq.
    """
    for column, index in ADAM.items():
        dtype, beta = columns[column], betas[index]
        bits = MANTISSA_BITS.get(dtype)
        # 2 * (1 - beta) against half a step, 2**-(bits + 1).
        if bits is None or 1 - beta >= 2.0 ** -(bits + 2):
            continue
        if (column, dtype) == ("exp_avg_sq", "fp8_pow2"):
            continue  # `second_moment_violations` rejects it
        nearest = list(betas)
        nearest[index] = _largest_beta(bits)
        wider = _wider_dtype(dtype, beta)
        yield Violation(
            f"optim.betas={list(betas)}",
            f"rounding in storage.{column}={dtype} stops an average of rate {beta:g}, so it never"
            f" decays; nearest is {_largest_beta(bits):g}, or set"
            f" storage.{column}={wider}",
            [(f"storage.{column}", wider), ("optim.betas", tuple(nearest))],
            [f"storage.{column}", "optim.betas"],
        )


def missing_masters(weight: str, master: str) -> Iterator[Violation]:
    """Rejects FP8 weights without master weights, and masters in FP8.

    Almost all updates are smaller than half the distance between two FP8 values.
    """
    if weight in FP8_CODECS and master == "none":
        yield Violation(
            "storage.master_weight=none",
            f"storage.weight={weight} needs master weights; set it to fp16_scaled or fp32",
            [("storage.master_weight", "fp32"), ("storage.weight", "auto")],
            ["storage.weight", "storage.master_weight"],
        )
    elif master in FP8_CODECS:
        yield Violation(
            f"storage.master_weight={master}",
            "FP8 master weights lose small updates; set it to fp16_scaled or fp32",
        )


def lost_updates(
    weight: str, master: str, rounding: str, lr: float, weight_size: float
) -> Iterator[Violation]:
    """Rejects learning rates below half the rounding step of the weights.

    Adam's updates are about as large as `lr`. Rounding to nearest undoes smaller updates, so weights
    stop moving. Stochastic rounding keeps their mean.

    Args:
        weight: Dtype of the weights.
        master: Dtype of the master weights, or "none".
        rounding: storage.rounding.
        lr: The largest learning rate.
        weight_size: Magnitude of a typical weight.
    """
    column, dtype = _updated_column(weight, master)
    smallest_update = _least_update(dtype, rounding, weight_size)
    if lr < smallest_update:
        fixes: list[tuple[str, Any]] = [
            ("storage.rounding", "stochastic"),
            ("storage.master_weight", "fp32"),
            ("optim.lr", smallest_update),
        ]
        yield Violation(
            f"optim.lr={lr:g}",
            f"storage.{column}={dtype} loses most updates below {smallest_update:.2g} of weights"
            f" around {weight_size:g}; set storage.rounding=stochastic or"
            " storage.master_weight=fp32",
            fixes,
            ["optim.lr", "storage.rounding", "storage.weight", "storage.master_weight"],
        )


# Remarks: legal settings with a drawback.


def slow_averages(columns: Mapping[str, str], betas: tuple[float, float]) -> Iterator[str]:
    """Remarks on averages that rounding stops before they have decayed by a factor of two."""
    for column, index in ADAM.items():
        bits = MANTISSA_BITS.get(columns[column])
        if bits is None:
            continue
        decay = 1 - betas[index]
        # Values just below a power of two decay. Values just above one do not, see `_least_decay`.
        # Below the lower bound nothing decays, see `frozen_averages`.
        if 2.0 ** -(bits + 2) <= decay < _least_decay(bits):
            yield (
                f"optim.betas={list(betas)}: storage.{column}={columns[column]} follows shrinking"
                f" gradients only in steps of two; up to {_largest_beta(bits):g} it follows exactly"
            )


def lost_averages(columns: Mapping[str, str]) -> Iterator[str]:
    """Remarks on averages that become 0 in fp16."""
    # Gradients of large models are that small. A first moment of 0 only skips an update, so this is
    # no error.
    if columns["exp_avg"] == "fp16":
        yield (
            f"storage.exp_avg=fp16: averages below {FP16_LEAST:.0e} become 0;"
            " storage.exp_avg=fp16_scaled keeps them in the same memory"
        )


def late_updates(
    columns: Mapping[str, str], rounding: str, lr: float, end_lr: float, weight_size: float
) -> Iterator[str]:
    """Remarks on learning rates that become too small for the weights late in the schedule."""
    column, dtype = _updated_column(columns["weight"], columns["master_weight"])
    smallest_update = _least_update(dtype, rounding, weight_size)
    if end_lr < smallest_update <= lr:
        yield (
            f"optim.min_lr={end_lr:g}: storage.{column}={dtype} loses most updates below"
            f" {smallest_update:.2g} at the end of the schedule; storage.rounding=stochastic keeps"
            " their mean"
        )


def _updated_column(weight: str, master: str) -> tuple[str, str]:
    """Returns the column that an optimizer step updates, and its dtype."""
    if master == "none":
        return "weight", weight
    return "master_weight", master


def _least_update(dtype: str, rounding: str, weight_size: float) -> float:
    """Returns the size of updates below which rounding loses most of them, 0 if it loses none."""
    # FP8 weights are left out: `missing_masters` rejects them.
    if rounding == "stochastic" or dtype not in ("bf16", "fp16", "fp16_scaled"):
        return 0.0
    return half_unit(weight_size, MANTISSA_BITS[dtype])


def half_unit(size: float, mantissa_bits: int) -> float:
    """Returns half the distance between `size` and the next value, half a unit in the last place.

    Args:
        size: A positive number.
        mantissa_bits: Stored mantissa bits of the dtype.
    """
    return float(2.0 ** (math.floor(math.log2(size)) - mantissa_bits - 1))


def _largest_beta(bits: int) -> float:
    """Returns the largest beta whose average always decays, cut to four digits."""
    return math.floor((1 - _least_decay(bits)) * 1e4) / 1e4


def _least_decay(bits: int) -> float:
    """Returns the least 1 - beta for which an average decays from any value.

    The worst value is 1 + 2**-bits, the next one above a power of two. Its move is
    (1 + 2**-bits) * (1 - beta). The move must exceed half the distance to its neighbor,
    2**-(bits + 1).
    """
    return 1 / (2.0 ** (bits + 1) + 2)


def _wider_dtype(dtype: str, beta: float) -> str:
    """Returns the narrowest dtype for an average with decay rate `beta`."""
    # An exact scale moves with the amax, so fp8 never freezes and has the bytes of fp8_pow2.
    if dtype == "fp8_pow2":
        return "fp8"
    if dtype == "bf16" and beta <= _largest_beta(MANTISSA_BITS["fp16_scaled"]):
        return "fp16_scaled"
    return "fp32"
