"""Which GEMMs of which linear layers will run in FP8, and why the others will not: decided from names and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8cfg.config.errors import ConfigError, refuse_if, suggest
from fp8cfg.config.fp8 import FP8

GEMMS = ("fprop", "dgrad", "wgrad")
ATTENTION_GEMMS = ("p", "o", "ds", "dv", "dq", "dk")
"""The products of attention by what they make: P = Q Kᵀ and O = S V, then four backward ones; see numerics/attention.py."""
ALIGNMENT = 16
"""Scaled matrix products want every contracted and every last dimension divisible by this (cuBLASLt, TE section 3.4)."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
Shapes = Iterable[tuple[str, int, int]]
Kinds = tuple[str, str] | None


@dataclass(frozen=True)
class PlannedLinear:
    """One linear layer. `gemms` holds, for fprop, dgrad and wgrad, the kinds of the two operands, such as (e4m3, e4m3), or
    None where the product stays in high precision; `reason` says why where any does."""

    name: str
    in_features: int
    out_features: int
    gemms: tuple[Kinds, Kinds, Kinds]
    reason: str = ""

    @property
    def fp8(self) -> bool:
        """Whether any of the three products runs in FP8."""
        return any(self.gemms)

    @property
    def products(self) -> dict[str, Kinds]:
        """`gemms` by their names."""
        return dict(zip(GEMMS, self.gemms, strict=True))

    @property
    def fp8_share(self) -> float:
        """Share of this layer's three equally large products that run in FP8."""
        return sum(g is not None for g in self.gemms) / 3


@dataclass(frozen=True)
class PlannedAttention:
    """The attention of one Transformer layer, `gemms` and `reason` as in PlannedLinear: first two products, then four backward."""

    name: str
    gemms: tuple[Kinds, ...]
    reason: str = ""

    @property
    def products(self) -> dict[str, Kinds]:
        """`gemms` by their names."""
        return dict(zip(ATTENTION_GEMMS, self.gemms, strict=True))

    @property
    def fp8_share(self) -> float:
        """Share of the six equally large products that run in FP8."""
        return sum(g is not None for g in self.gemms) / len(self.gemms)


def plan_attention(fp8: FP8, num_layers: int) -> list[PlannedAttention]:
    """The plan of every layer's attention."""
    forward, backward, _ = formats(fp8)
    asked = fp8.enabled and fp8.dot_product_attention
    reasons = [_outside(n, fp8, num_layers) if asked else "scaled dot product" for n in range(num_layers)]
    gemms = (forward,) * 2 + (backward,) * 4
    return [PlannedAttention(f"layers.{n}.self_attention.core_attention", (None,) * 6 if reason else gemms, reason)
            for n, reason in enumerate(reasons)]


def plan_linears(shapes: Shapes, fp8: FP8, num_layers: int) -> list[PlannedLinear]:
    """The plan of every linear layer of `shapes` (name, in_features, out_features).

    Raises ConfigError for a pattern of fp8.include or fp8.exclude that matches no layer, and where FP8 is enabled and no
    layer would run in it.
    """
    shapes = list(shapes)
    if not fp8.enabled:
        return [PlannedLinear(*s, gemms=(None, None, None), reason="FP8 is off") for s in shapes]
    refuse_if(_unmatched(fp8, [s[0] for s in shapes]))
    plans = [_plan(*s, fp8=fp8, num_layers=num_layers) for s in shapes]
    if not any(p.fp8 for p in plans):
        why = sorted({p.reason for p in plans})
        raise ConfigError(f"fp8.enabled=True: none of {len(plans)} linear layers would run in FP8 ({'; '.join(why)})")
    refuse_if(_without_effect(fp8, plans))
    return plans


def formats(fp8: FP8) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    """Kinds of the operands of fprop (x, w), dgrad (dy, w) and wgrad (dy, x)."""
    if fp8.scaling == "nvfp4":
        return (("e2m1", "e2m1"),) * 3
    gradient = "e5m2" if fp8.format == "hybrid" else "e4m3"
    return ("e4m3", "e4m3"), (gradient, "e4m3"), (gradient, "e4m3")


def _plan(name: str, in_features: int, out_features: int, fp8: FP8, num_layers: int) -> PlannedLinear:
    reason = _excluded(name, in_features, out_features, fp8, num_layers)
    if reason:
        return PlannedLinear(name, in_features, out_features, (None, None, None), reason)
    kept = [g for g in GEMMS if getattr(fp8.override_linear_precision, g)]
    products = [None if g in kept else f for g, f in zip(GEMMS, formats(fp8), strict=True)]
    reason = f"fp8.override_linear_precision.{'|'.join(kept)}" if kept else ""
    return PlannedLinear(name, in_features, out_features, (products[0], products[1], products[2]), reason)


def _excluded(name: str, in_features: int, out_features: int, fp8: FP8, num_layers: int) -> str:
    """Why the whole layer stays in high precision, or an empty string."""
    layer = _LAYER.search(name)
    if name == "output_layer" and not fp8.output_layer:
        return "fp8.output_layer=false"
    if layer and (reason := _outside(int(layer[1]), fp8, num_layers)):
        return reason
    for pattern in fp8.exclude:
        if fnmatchcase(name, pattern):
            return f"fp8.exclude {pattern}"
    if fp8.include and not any(fnmatchcase(name, p) for p in fp8.include):
        return "not in fp8.include"
    for what, size in (("in", in_features), ("out", out_features)):
        if size % ALIGNMENT:
            return f"{what}_features={size} is not a multiple of {ALIGNMENT}"
    return ""


def _outside(layer: int, fp8: FP8, num_layers: int) -> str:
    """Why Transformer layer number `layer` stays in high precision, or an empty string."""
    if layer < fp8.high_precision_at_start:
        return f"fp8.high_precision_at_start={fp8.high_precision_at_start}"
    if layer >= num_layers - fp8.high_precision_at_end:
        return f"fp8.high_precision_at_end={fp8.high_precision_at_end}"
    return ""


def _without_effect(fp8: FP8, plans: Sequence[PlannedLinear]) -> list[str]:
    """A line for each key that asks for layers in FP8 and gets none."""
    asked = {f"fp8.include={pattern}": [p for p in plans if fnmatchcase(p.name, pattern)] for pattern in fp8.include}
    if fp8.output_layer:
        asked["fp8.output_layer=True"] = [p for p in plans if p.name == "output_layer"]
    return [f"{key}: has no effect, its layers stay in high precision ({found[0].reason})"
            for key, found in asked.items() if found and not any(p.fp8 for p in found)]


def _unmatched(fp8: FP8, names: Sequence[str]) -> list[str]:
    lines = []
    for key in ("include", "exclude"):
        for pattern in getattr(fp8, key):
            if not any(fnmatchcase(n, pattern) for n in names):
                generic = sorted({_LAYER.sub(lambda m: m[0].replace(m[1], "*"), n) for n in names})
                lines.append(f"fp8.{key}={pattern}: matches no linear layer" + suggest(pattern, generic))
    return lines
