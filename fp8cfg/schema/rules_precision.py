"""Validation rules of the precision plugin: loss scaling, and how state is stored and sent. rules_fp8.py has those of `fp8`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8cfg.schema.backends import capabilities, gathering
from fp8cfg.schema.changed_fields import WRITTEN, conflicting, idle
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.rules_fp8 import fp8_rules, without_fp8
from fp8cfg.schema.storage import (
    COLUMNS,
    FP8_CODECS,
    SCALED,
    against_fp8_gather,
    fp8_weights,
    level,
    low_bit,
    resolved,
)
from fp8cfg.schema.violation import Violation

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe

KEPT = {"weight": "fp32", "master_weight": "none", "weight_grad": "fp32"}
"""The columns of a rank's parts: weights are float32 and their own masters. Moments may be of any codec, and gradients of
one with a scale."""
_INSTEAD = "or storage.shard=zero2"
_GATHERS = (
    "fp8.enabled",
    "fp8.scaling",
    "fp8.granularity",
    "fp8.use_power_2_scales",
    "fp8.override_linear_precision.fprop",
    "fp8.override_linear_precision.dgrad",
    "fp8.params",
    "backend",
)
"""The keys that decide whether weights can be gathered in FP8."""


def fsdp_rules(recipe: Recipe) -> Iterator[Violation]:
    """Every rule about `storage.shard=fsdp` and `storage.gather`."""
    p, s = recipe.precision, recipe.storage
    if s.shard != "fsdp":
        yield from idle(
            s,
            ("gather",),
            f", storage.shard={s.shard} keeps whole weights on every rank; drop it or write "
            "storage.shard=fsdp",
            "storage.shard",
        )
        return
    if level(p):
        said = f"opt_level={p.opt_level}" if p.opt_level else f"backend={p.backend}"
        yield Violation(
            f"{said}",
            f"storage.shard=fsdp keeps float32 weights; drop it, {_INSTEAD}",
            [("opt_level", None)],
            ["storage.shard"],
        )
    for column, codec in KEPT.items():
        if (given := getattr(s, column)) not in (
            "auto",
            codec,
            *(SCALED if column == "weight_grad" else ()),
        ):
            yield Violation(
                f"storage.{column}={given}",
                f"storage.shard=fsdp has {codec} there; write that, {_INSTEAD}",
                [(f"storage.{column}", "auto")],
                ["storage.shard"],
            )
    sums = ("fp32", "bf16", *(("fp16",) if p.compute == "fp16" else ()))
    if not level(p) and (comm := resolved(p)["comm"]) not in sums:
        yield Violation(
            f"storage.comm={comm}",
            f"FSDP2 sums gradients in {' or '.join(sums)}; write one of them, {_INSTEAD}",
            [("storage.comm", "auto")],
            ["storage.shard"],
        )
    if s.gather == "fp8":
        reasons = [
            against_fp8_gather(p, backend)
            for backend in (gathering() if p.backend == "auto" else [p.backend])
        ]
        yield from (
            Violation("storage.gather=fp8", f"{why}", [("storage.gather", "auto")], _GATHERS)
            for why in (reasons[0] if all(reasons) else ())
        )
    elif s.gather == p.compute and p.fp8.enabled and p.fp8.params:
        yield Violation(
            "fp8.params=true",
            f"has no effect, storage.gather={s.gather} of storage.shard=fsdp sends"
            " no FP8 weights; drop one of the two",
            [("fp8.params", False)],
            ["storage.gather"],
            is_harmless=True,
        )
    elif s.gather not in ("auto", p.compute):
        yield Violation(
            f"storage.gather={s.gather}",
            f"FSDP2 gathers weights in precision.compute={p.compute}; write auto, or fp8",
            [("storage.gather", "auto")],
            ["precision.compute"],
        )


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
) -> list[Violation]:
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


def _with_columns(violation: Violation, explicit: Collection[str], stochastic: bool) -> Violation:
    """`violation` without fixes of columns that are not `explicit`, or of rounding unless it can be `stochastic`."""
    if not violation.fixes:
        return violation
    fixed = {f"storage.{column}" for column in COLUMNS if column not in explicit} | (
        set() if stochastic else {"storage.rounding"}
    )
    fixes = [(key, value) for key, value in violation.fixes if key not in fixed]
    return replace(violation, fixes=fixes, caused_by=[*violation.caused_by, *_LEVELS])


def second_moment(codec: str, beta: float, eps: float) -> Iterator[Violation]:
    """Second moments in FP8 under one scale, or in fp16 without one: most become 0, and dividing by their roots ends in NaN, or
    in updates by gradient / eps. An eps as large as those roots keeps these as small as they were.
    """
    least = math.sqrt(FP16_LEAST)
    if codec == "fp16" and eps < least:
        also = ", or bf16" if beta <= _slowest(MANTISSA_BITS["bf16"]) else ""
        yield Violation(
            "storage.exp_avg_sq=fp16",
            "without a scale second moments of gradients below"
            f" {least:.1e} become 0, optim.eps={eps:g} alone divides these, and training can"
            f" diverge; write {_follows('bf16', beta)}{also}",
            [("storage.exp_avg_sq", _follows("bf16", beta)), ("optim.eps", least)],
            ["storage.exp_avg_sq", "optim.eps"],
        )
    if codec in ("fp8", "fp8_pow2"):
        yield (
            Violation(
                f"storage.exp_avg_sq={codec}",
                "second moments do not fit one FP8 scale a tensor,"
                " training diverges; write fp8_block",
            )
        )


def frozen_averages(columns: Mapping[str, str], betas: tuple[float, float]) -> Iterator[Violation]:
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
        yield Violation(
            f"optim.betas={list(betas)}",
            f"storage.{column}={codec} rounds an average of rate"
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


def no_masters(weight: str, master: str) -> Iterator[Violation]:
    """FP8 weights without master weights: almost every update is smaller than half the distance between two FP8 values."""
    if weight in FP8_CODECS and master == "none":
        yield Violation(
            "storage.master_weight=none",
            f"storage.weight={weight} needs masters; write fp16_scaled or fp32",
            [("storage.master_weight", "fp32"), ("storage.weight", "auto")],
            ["storage.weight", "storage.master_weight"],
        )
    elif master in FP8_CODECS:
        yield (
            Violation(
                f"storage.master_weight={master}",
                "FP8 loses the updates that masters are there to keep; write fp16_scaled or fp32",
            )
        )


def lost_updates(
    weight: str, master: str, rounding: str, lr: float, weight_size: float
) -> Iterator[Violation]:
    """Learning rates (the size of Adam's updates) below half the rounding step of the weights that are updated."""
    column, codec = _moved(weight, master)
    if lr < (half := _lost_below(codec, rounding, weight_size)):
        gives: list[tuple[str, Any]] = [
            ("storage.rounding", "stochastic"),
            ("storage.master_weight", "fp32"),
            ("optim.lr", half),
        ]
        yield Violation(
            f"optim.lr={lr:g}",
            f"storage.{column}={codec} rounds most updates of that size away, at"
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


def precision_rules(recipe: Recipe) -> Iterator[Violation]:
    """Every rule about `recipe.precision`."""
    p = recipe.precision
    yield from fp8_rules(p, recipe.model.num_layers)
    yield from _loss_scaling(p)
    yield from _storage(recipe)
    yield from fsdp_rules(recipe)


def _loss_scaling(p: Precision) -> Iterator[Violation]:
    dynamic = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    if p.compute != "fp16":
        yield from idle(
            p,
            ("loss_scale", *dynamic),
            f", loss scaling is for precision.compute=fp16 alone, not {p.compute}",
            "precision.compute",
        )
    elif p.loss_scale is not None:
        yield from idle(
            p,
            dynamic,
            f", precision.loss_scale={p.loss_scale:g} is constant; set it to null to scale"
            " dynamically",
            "precision.loss_scale",
        )
    elif p.min_loss_scale > p.initial_loss_scale:
        keys = ("precision.min_loss_scale", "precision.initial_loss_scale")
        yield Violation(
            f"precision.min_loss_scale={p.min_loss_scale:g}",
            f"more than precision.initial_loss_scale={p.initial_loss_scale:g}",
            [(keys[0], p.initial_loss_scale), (keys[1], p.min_loss_scale)],
            keys,
        )


def _storage(recipe: Recipe) -> Iterator[Violation]:
    """The storage columns, and the optimizer that keeps state in them."""
    p, s, f, o = recipe.precision, recipe.storage, recipe.fp8, recipe.optim
    columns = resolved(p)
    if f.enabled and f.params and s.weight not in ("auto", *FP8_CODECS):
        yield Violation(
            f"storage.weight={s.weight}",
            "contradicts fp8.params=true, which stores weights in FP8; drop one of the two",
            [("fp8.params", False), ("storage.weight", "auto")],
            ["storage.weight", "fp8.params"],
        )
    elif f.enabled and f.params and columns["weight"] not in FP8_CODECS and s.shard != "fsdp":
        by = f"opt_level={level(p)}"
        yield Violation(
            "fp8.params=true",
            f"has no effect, {by} stores weights in {columns['weight']}; drop one of the two",
            [("fp8.params", False)],
            ["opt_level", "backend"],
            is_harmless=True,
        )
    elif fp8_weights(p) and p.opt_level == "O3" and not f.params and "fp8.params" in WRITTEN.get():
        yield Violation(
            "fp8.params=false",
            "has no effect, opt_level=O3 stores weights in FP8; drop it or write opt_level=O2",
            [("fp8.params", True)],
            ["opt_level", "backend"],
        )
    for column in ("weight", "weight_grad", "comm", "exp_avg", "exp_avg_sq"):
        if getattr(s, column) == "none":
            yield Violation(f"storage.{column}=none", "only storage.master_weight can be none")
    if "none" not in (columns[k] for k in columns if k != "master_weight"):
        yield from _codecs(p, columns)
        if o.name == "sgd":
            yield from _sgd(p)
        else:
            explicit = [column for column in COLUMNS if getattr(s, column) != "auto"]
            yield from storage_refusals(
                columns,
                s.rounding,
                o.betas,
                o.eps,
                o.lr,
                recipe.model.init_method_std,
                explicit,
                stochastic=not capabilities(p.backend).own_state,
            )
    why = capabilities(p.backend).adam_weight_decay
    if why and o.name == "adam" and o.weight_decay and columns["exp_avg"] != "fp32":
        yield Violation(
            f"optim.weight_decay={o.weight_decay:g}",
            f"with optim.name=adam {why}",
            [("optim.name", "adamw"), ("optim.weight_decay", 0.0)],
            ["optim.name", "optim.weight_decay", "backend"],
        )
    if not f.enabled:
        yield from idle(
            p,
            ("backend",),
            f"{without_fp8(p)}; drop it or write precision=bf16_fp8",
            "fp8.enabled",
        )


def _codecs(p: Precision, columns: dict[str, str]) -> Iterator[Violation]:
    """Codecs that a column cannot have, or that do nothing beside another."""
    weight, master = columns["weight"], columns["master_weight"]
    if weight == "fp8_pow2" and p.fp8.enabled:
        yield Violation(
            "storage.weight=fp8_pow2",
            "FP8 layers hold their weights as fp8.scaling quantizes them;"
            " write storage.weight=fp8, and fp8.use_power_2_scales=true under current scaling",
            [("storage.weight", "fp8")],
            ["fp8.enabled"],
        )
    for column in ("weight", "weight_grad"):
        if columns[column] == "fp8_expand":
            yield Violation(f"storage.{column}=fp8_expand", "a codec of moments (COAT); write fp8")
    if weight == "fp8_block":
        yield (
            Violation(
                "storage.weight=fp8_block",
                "no codec of weights; write fp8, or fp8.scaling=block with fp8.params=true",
            )
        )
    if columns["comm"] in ("fp16_scaled", "fp8_block", "fp8_expand"):
        yield Violation(
            f"storage.comm={columns['comm']}", "not sent over the wire; write fp16, fp8 or fp8_pow2"
        )
    if (
        columns["comm"] in FP8_CODECS
        and columns["weight_grad"] in FP8_CODECS
        and columns["comm"] != columns["weight_grad"]
    ):
        that = (
            ""
            if columns["weight_grad"] in ("fp8_block", "fp8_expand")
            else f"{columns['weight_grad']}, or "
        )
        # A column on auto is what a level says, or what the user said who wrote the level.
        gives = [
            (f"storage.{column}", codec)
            for column, codec in (
                ("comm", columns["weight_grad"] if that else "auto"),
                ("weight_grad", columns["comm"]),
            )
            if getattr(p.storage, column) != "auto"
        ]
        yield Violation(
            f"storage.comm={columns['comm']}",
            f"gradients are stored in {columns['weight_grad']} and"
            f" sent as they are; write {that}bf16 or fp32 to add them up before they are stored",
            gives,
            ["storage.comm", "storage.weight_grad", "opt_level", "backend"],
        )
    if weight == "fp32" and master != "none":
        yield Violation(
            f"storage.master_weight={master}",
            "has no effect, storage.weight=fp32 needs no masters; write none",
            [("storage.master_weight", "auto")],
            ["storage.weight", "precision.compute"],
        )
    gradient, comm = columns["weight_grad"], columns["comm"]
    shards = p.storage.shard == "fsdp"  # which are summed before they are stored
    if p.storage.accumulate != "wide" and not (
        gradient in FP8_CODECS and (shards or gradient == comm)
    ):
        needs = (
            f"storage.weight_grad in FP8, not {gradient}; drop it or write fp8"
            if shards
            else (
                f"storage.weight_grad and storage.comm in one FP8 codec, not {gradient} and {comm};"
                " drop it or write fp8 for both"
            )
        )
        yield Violation(
            f"storage.accumulate={p.storage.accumulate}",
            f"needs {needs}",
            [("storage.accumulate", "wide")],
            ["storage.weight_grad", "storage.comm", "opt_level", "backend", "storage.shard"],
        )
    rounded = {columns["weight"], columns["master_weight"]} - {"fp32", "none"}
    if p.storage.rounding != "nearest" and (not rounded or (fp8_weights(p) and master == "fp32")):
        why = "FP8 layers round their weights themselves" if rounded else "weights are float32"
        yield Violation(
            f"storage.rounding={p.storage.rounding}",
            f"has no effect, {why}; drop it",
            [("storage.rounding", "nearest")],
            [
                "precision.compute",
                "fp8.enabled",
                "fp8.params",
                "storage.weight",
                "storage.master_weight",
                "storage.shard",
            ],
        )


def _sgd(p: Precision) -> Iterator[Violation]:
    """What needs the moments of Adam, and what only the low-bit Adam does."""
    yield from idle(
        p.storage,
        ("exp_avg", "exp_avg_sq"),
        " with optim.name=sgd, which has no such moment",
        "optim.name",
    )
    if level(p):
        yield Violation(
            f"opt_level={level(p)}",
            "needs optim.name=adamw or adam, not sgd (MS-AMP)",
            [("opt_level", None)] if p.opt_level else [],
            ["optim.name"],
        )
    elif low_bit(p):
        yield from conflicting(
            p.storage,
            ("weight", "master_weight", "weight_grad", "rounding"),
            "needs optim.name=adamw or adam, not sgd",
            "optim.name",
        )
