"""Validation rules of storage.shard=fsdp, and of storage.gather, which only FSDP has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8cfg.config.backend_capabilities import gathering
from fp8cfg.config.refusal import Refusal, idle
from fp8cfg.config.storage import SCALED, against_fp8_gather, level, resolved

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe

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


def fsdp_rules(recipe: Recipe) -> Iterator[str]:
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
        yield Refusal(
            f"{said}: storage.shard=fsdp keeps float32 weights; drop it, {_INSTEAD}",
            [("opt_level", None)],
            ["storage.shard"],
        )
    for column, codec in KEPT.items():
        if (given := getattr(s, column)) not in (
            "auto",
            codec,
            *(SCALED if column == "weight_grad" else ()),
        ):
            yield Refusal(
                f"storage.{column}={given}: storage.shard=fsdp has {codec} there; write that,"
                f" {_INSTEAD}",
                [(f"storage.{column}", "auto")],
                ["storage.shard"],
            )
    sums = ("fp32", "bf16", *(("fp16",) if p.compute == "fp16" else ()))
    if not level(p) and (comm := resolved(p)["comm"]) not in sums:
        yield Refusal(
            f"storage.comm={comm}: FSDP2 sums gradients in {' or '.join(sums)}; write one of them,"
            f" {_INSTEAD}",
            [("storage.comm", "auto")],
            ["storage.shard"],
        )
    if s.gather == "fp8":
        reasons = [
            against_fp8_gather(p, backend)
            for backend in (gathering() if p.backend == "auto" else [p.backend])
        ]
        yield from (
            Refusal(f"storage.gather=fp8: {why}", [("storage.gather", "auto")], _GATHERS)
            for why in (reasons[0] if all(reasons) else ())
        )
    elif s.gather == p.compute and p.fp8.enabled and p.fp8.params:
        yield Refusal(
            f"fp8.params=true: has no effect, storage.gather={s.gather} of storage.shard=fsdp sends"
            " no FP8 weights; drop one of the two",
            [("fp8.params", False)],
            ["storage.gather"],
            tacit=True,
        )
    elif s.gather not in ("auto", p.compute):
        yield Refusal(
            f"storage.gather={s.gather}: FSDP2 gathers weights in precision.compute={p.compute};"
            " write auto, or fp8",
            [("storage.gather", "auto")],
            ["precision.compute"],
        )
