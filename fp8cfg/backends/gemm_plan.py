"""GEMM plan: which GEMMs of which linear layers run in FP8, from names and shapes only."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8cfg.schema.errors import ConfigError, refuse_if, suggest
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.violation import Violation

GEMMS = ("fprop", "dgrad", "wgrad")
ATTENTION_GEMMS = ("p", "o", "ds", "dv", "dq", "dk")
"""GEMMs of attention by result: P = Q Kᵀ and O = S V, then four in the backward pass
(numerics/fp8_attention.py)."""
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
Shapes = Iterable[tuple[str, int, int]]
Kinds = tuple[str, str] | tuple[()] | None
"""Formats of the two operands of a GEMM.

In a plan None means high precision. In a record None means that the GEMM did not run, and
HIGH_PRECISION that it ran in high precision in training.
"""
HIGH_PRECISION: tuple[()] = ()
OWN_FORWARD = "has its own forward"
Misfit = Callable[[FP8, int, int], str]
"""Returns why a layer of these sizes stays in high precision, or "" (`Rules.misfit`)."""
Numbering = Callable[[str], tuple[int, int] | None]
"""Maps the name of a linear layer to its Transformer layer's index and their number, or to None."""


@dataclass(frozen=True)
class PlannedLinear:
    """Plan of one linear layer, or its observed GEMMs.

    Attributes:
        name: Name of the module.
        in_features: Size of the input.
        out_features: Size of the output.
        gemms: Operand formats of fprop, dgrad and wgrad, such as ("e4m3", "e4m3"). None is high
            precision.
        reason: Why a GEMM stays in high precision.
        rows: Observed number of input rows, or None.
        output: Whether it is an output layer.
        left_out: GEMMs not needed by autograd, such as wgrad of a frozen weight. They do not count
            as FLOPs.
    """

    name: str
    in_features: int
    out_features: int
    gemms: tuple[Kinds, Kinds, Kinds]
    reason: str = ""
    rows: int | None = None
    output: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def fp8(self) -> bool:
        """Whether at least one of the GEMMs runs in FP8."""
        return any(self.gemms)

    @property
    def products(self) -> dict[str, Kinds]:
        """Operand formats by GEMM name."""
        return dict(zip(GEMMS, self.gemms, strict=True))

    @property
    def fp8_share(self) -> float:
        """Share of the layer's FLOPs in FP8. All its GEMMs have equal FLOPs."""
        return sum(1 for kinds in self.gemms if kinds) / self.count

    @property
    def count(self) -> int:
        """Number of GEMMs in a step: three minus `left_out`."""
        return len(GEMMS) - len(self.left_out)

    @property
    def weights(self) -> int:
        """Number of weight elements."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class PlannedAttention:
    """Plan of the attention of one Transformer layer, or its observed GEMMs.

    Attributes:
        name: Name of the module.
        gemms: Operand formats of the ATTENTION_GEMMS. None is high precision.
        reason: As in PlannedLinear.
        left_out: As in PlannedLinear.
    """

    name: str
    gemms: tuple[Kinds, ...]
    reason: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def products(self) -> dict[str, Kinds]:
        """Operand formats by GEMM name."""
        return dict(zip(ATTENTION_GEMMS, self.gemms, strict=True))

    @property
    def fp8_share(self) -> float:
        """Share of the FLOPs in FP8. All its GEMMs have equal FLOPs."""
        return sum(1 for kinds in self.gemms if kinds) / self.count

    @property
    def count(self) -> int:
        """Number of GEMMs in a step: six minus `left_out`."""
        return len(ATTENTION_GEMMS) - len(self.left_out)


@dataclass(frozen=True)
class Unwatched:
    """Parameters of a custom model outside of linear layers, possibly multiplied by its own code.

    Attributes:
        name: Name of the module.
        weights: Number of elements.
        reason: Why they stay in high precision.
        rows: As in PlannedLinear.
    """

    name: str
    weights: int
    reason: str
    rows: int | None = None


def plan_attention(fp8: FP8, num_layers: int) -> list[PlannedAttention]:
    """Returns the plan of the attention of every Transformer layer."""
    forward, backward, _ = gemm_formats(fp8)
    fp8_kinds = (forward, forward, backward, backward, backward, backward)
    high_precision = (None,) * len(ATTENTION_GEMMS)
    is_fp8 = fp8.enabled and fp8.dot_product_attention
    plans = []
    for layer in range(num_layers):
        reason = _reason_at_ends(layer, fp8, num_layers) if is_fp8 else "scaled dot product"
        plans.append(
            PlannedAttention(
                name=f"layers.{layer}.self_attention.core_attention",
                gemms=high_precision if reason else fp8_kinds,
                reason=reason,
            )
        )
    return plans


def layer_numbering(num_layers: int) -> Numbering:
    """Returns the numbering of a model whose Transformer layers are named `layers.N`."""

    def number(name: str) -> tuple[int, int] | None:
        match = _LAYER_NUMBER.search(name)
        return (int(match[1]), num_layers) if match else None

    return number


_NO_OUTPUT = "fp8.output_layer=false"
_EXCLUDED = "fp8.exclude"


def plan_linears(
    shapes: Shapes,
    fp8: FP8,
    number: Numbering,
    misfit: Misfit,
    output: Collection[str] = ("output_layer",),
    irreplaceable: Mapping[str, str] | None = None,
    other_matmuls: Sequence[str] = (),
    norms: Iterable[str] = (),
) -> list[PlannedLinear]:
    """Plans the GEMMs of all linear layers.

    Args:
        shapes: Name, in_features and out_features of each layer.
        fp8: The fp8 section of the recipe.
        number: Returns the number of a layer's Transformer block and the number of blocks, or None.
        misfit: Returns why the backend cannot run a layer of these sizes, or "".
        output: Names of the output layers.
        irreplaceable: Reasons of layers that cannot be replaced, by name.
        other_matmuls: Modules that multiply and are no linear layers, for the error text.
        norms: Names of the norms that the backend replaces.

    Raises:
        ConfigError: A pattern of fp8.include or fp8.exclude matches no layer, or FP8 is enabled
            and no layer would run in FP8.
    """
    shapes = list(shapes)
    high_precision = (None, None, None)
    if not fp8.enabled:
        return [
            PlannedLinear(*shape, gemms=high_precision, reason="FP8 is off") for shape in shapes
        ]
    names = [name for name, _, _ in shapes]
    refuse_if(_unmatched_patterns(fp8, names, norms))
    fp8_gemms, override_reason = _fp8_gemms(fp8)
    plans = []
    for shape in shapes:
        name, _, _ = shape
        reason = (irreplaceable or {}).get(name) or _high_precision_reason(
            shape, fp8, number, misfit, output
        )
        plans.append(
            PlannedLinear(
                *shape,
                gemms=high_precision if reason else fp8_gemms,
                reason=reason or override_reason,
                output=name in output,
            )
        )
    if not any(planned.fp8 for planned in plans):
        refuse_if(_all_excluded(fp8, plans))
        raise ConfigError([_no_fp8_layer(plans, other_matmuls)])
    refuse_if(_keys_without_effect(fp8, plans, output))
    return plans


def _no_fp8_layer(plans: Sequence[PlannedLinear], other_matmuls: Sequence[str]) -> Violation:
    """Returns the violation for a model without a layer in FP8, with every reason."""
    reasons = sorted({planned.reason for planned in plans}) or ["the model has none"]
    advice = ""
    if any(planned.reason.endswith(OWN_FORWARD) for planned in plans):
        advice = (
            "; write convert_model(model, recipe, linear=[THEIR_CLASS]) for a subclass of nn.Linear"
            " whose forward only casts input and weight"
        )
    return Violation(
        "fp8.enabled=true",
        f"none of {len(plans)} linear layers would run in FP8"
        f" ({'; '.join([*reasons, *other_matmuls])}){advice}",
    )


def _all_excluded(fp8: FP8, plans: Sequence[PlannedLinear]) -> list[Violation]:
    """Returns a violation if fp8.exclude keeps every layer out of FP8."""
    # The output layer stays in high precision by default, so it does not count.
    reasons = {planned.reason for planned in plans} - {_NO_OUTPUT}
    if not reasons or not all(reason.startswith(_EXCLUDED) for reason in reasons):
        return []
    return [
        Violation(
            f"fp8.exclude={spelled(list(fp8.exclude))}",
            f"leaves no linear layer in FP8 (0 of {len(plans)}); narrow fp8.exclude or set"
            " fp8.enabled=false",
        )
    ]


def gemm_formats(fp8: FP8) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    """Returns the operand formats of fprop (x, w), dgrad (dy, w) and wgrad (dy, x)."""
    forward, gradient = SCALINGS[fp8.scaling].operands(fp8.format)
    return (forward, forward), (gradient, forward), (gradient, forward)


def _fp8_gemms(fp8: FP8) -> tuple[tuple[Kinds, Kinds, Kinds], str]:
    """Returns the formats of the three GEMMs of an FP8 layer.

    fp8.override_linear_precision may keep some GEMMs in high precision. The text is the reason.
    """
    kinds: dict[str, Kinds] = dict(zip(GEMMS, gemm_formats(fp8), strict=True))
    overridden = [gemm for gemm in GEMMS if getattr(fp8.override_linear_precision, gemm)]
    for gemm in overridden:
        kinds[gemm] = None
    reason = f"fp8.override_linear_precision.{'|'.join(overridden)}" if overridden else ""
    return (kinds["fprop"], kinds["dgrad"], kinds["wgrad"]), reason


def _high_precision_reason(
    shape: tuple[str, int, int],
    fp8: FP8,
    number: Numbering,
    misfit: Misfit,
    output: Collection[str],
) -> str:
    """Returns why the whole layer stays in high precision, or ""."""
    name, in_features, out_features = shape
    if not in_features or not out_features:
        return f"{in_features} x {out_features}: nothing to multiply"
    if name in output and not fp8.output_layer:
        return _NO_OUTPUT
    position = number(name)
    if position is not None:
        layer, num_layers = position
        reason = _reason_at_ends(layer, fp8, num_layers)
        if reason:
            return reason
    for pattern in fp8.exclude:
        if fnmatchcase(name, pattern):
            return f"{_EXCLUDED} {pattern}"
    if fp8.include and not any(fnmatchcase(name, pattern) for pattern in fp8.include):
        return "not in fp8.include"
    return misfit(fp8, in_features, out_features)


def _reason_at_ends(layer: int, fp8: FP8, num_layers: int) -> str:
    """Returns why Transformer layer `layer` stays in high precision, or ""."""
    if layer < fp8.high_precision_at_start:
        return f"fp8.high_precision_at_start={fp8.high_precision_at_start}"
    if layer >= num_layers - fp8.high_precision_at_end:
        return f"fp8.high_precision_at_end={fp8.high_precision_at_end}"
    return ""


def plan_differences(
    plan: Sequence[PlannedLinear | PlannedAttention], seen: Mapping[str, Mapping[str, Kinds]]
) -> list[str]:
    """Returns a problem for each GEMM with other formats than planned.

    Args:
        plan: The plan.
        seen: Observed formats, by layer and GEMM name.
    """
    lines = []
    for planned in plan:
        observed = seen.get(planned.name, {})
        for gemm, planned_kinds in planned.products.items():
            kinds = observed.get(gemm)
            if gemm in planned.left_out and kinds is not None:
                lines.append(
                    f"{planned.name} {gemm}: planned not to run, its weight is frozen; ran"
                    f" {_kinds_text(kinds)}"
                )
            # () and None both mean that the GEMM has no FP8 operands.
            elif (planned_kinds or None) != (kinds or None):
                lines.append(
                    f"{planned.name} {gemm}: planned {_kinds_text(planned_kinds)}, ran"
                    f" {_kinds_text(kinds)}"
                )
    return lines


def not_engaged(
    plan: Sequence[PlannedLinear | PlannedAttention], seen: Mapping[str, Mapping[str, Kinds]]
) -> list[str]:
    """Returns a problem for each GEMM of a custom model in high precision instead of FP8.

    A missing GEMM is no difference if other GEMMs ran. A custom model may skip layers in a step,
    and autograd may not need a gradient.
    """
    expects_fp8 = not plan or any(planned.fp8_share for planned in plan)
    if expects_fp8 and not any(any(gemms.values()) for gemms in seen.values()):
        return ["no layer ran in FP8; run the forward pass inside autocast()"]
    lines = []
    effective: dict[str, dict[str, Kinds]] = {}
    for planned in plan:
        observed = seen.get(planned.name, {})
        # A GEMM that did not run, or ran in high precision, counts as planned here. The second case
        # has its own line.
        effective[planned.name] = {
            gemm: observed.get(gemm) or kinds for gemm, kinds in planned.products.items()
        }
        outside_gemms = [
            gemm
            for gemm, kinds in planned.products.items()
            if kinds and observed.get(gemm) == HIGH_PRECISION
        ]
        if outside_gemms:
            lines.append(
                f"{planned.name} ({', '.join(outside_gemms)}): planned in FP8, ran in high"
                " precision, outside of the autocast context"
            )
    return lines + plan_differences(plan, effective)


def products_left_out(ran: Mapping[str, Kinds], is_frozen: bool, trained: bool) -> tuple[str, ...]:
    """Returns the backward GEMMs of a linear layer not needed by autograd.

    Args:
        ran: Observed GEMMs of the layer. Empty if it is not observed.
        is_frozen: Whether its weight needs no gradient.
        trained: Whether any layer of the model ran a backward GEMM. Then a missing one was not
            needed: its input and weight need no gradient, or the loss does not depend on them.
    """
    unneeded = set()
    if is_frozen:
        unneeded.add("wgrad")
    if trained and ran.get("fprop") is not None:
        unneeded |= {"dgrad", "wgrad"}
    return tuple(gemm for gemm in GEMMS if gemm in unneeded and ran.get(gemm) is None)


def has_trained(seen: Mapping[str, Mapping[str, Kinds]]) -> bool:
    """Whether any layer ran a backward GEMM."""
    for observed in seen.values():
        if observed.get("dgrad") is not None or observed.get("wgrad") is not None:
            return True
    return False


def _kinds_text(kinds: Kinds) -> str:
    """Formats the operand kinds of a GEMM for messages."""
    return " x ".join(kinds) if kinds else "high precision"


def _keys_without_effect(
    fp8: FP8, plans: Sequence[PlannedLinear], output: Collection[str]
) -> list[Violation]:
    """Returns a violation for each key that selects layers for FP8 without effect."""
    selected = {}
    for pattern in fp8.include:
        selected[f"fp8.include={pattern}"] = [
            planned for planned in plans if fnmatchcase(planned.name, pattern)
        ]
    if fp8.output_layer:
        selected["fp8.output_layer=true"] = [planned for planned in plans if planned.name in output]
    violations = []
    for key, layers in selected.items():
        if layers and not any(planned.fp8 for planned in layers):
            problem = f"has no effect, its layers stay in high precision ({layers[0].reason})"
            violations.append(Violation(key, problem))
    return violations


def is_excluded(name: str, fp8: FP8) -> bool:
    """Whether a pattern of fp8.exclude matches the layer or norm `name`."""
    return any(fnmatchcase(name, pattern) for pattern in fp8.exclude)


def _unmatched_patterns(fp8: FP8, names: Sequence[str], norms: Iterable[str]) -> list[Violation]:
    """Returns a violation for each pattern of fp8.include and fp8.exclude without a match."""
    # Only fp8.exclude applies to norms.
    matchable = {"include": names, "exclude": [*names, *norms]}
    violations = []
    for key, candidates in matchable.items():
        for pattern in getattr(fp8, key):
            if any(fnmatchcase(name, pattern) for name in candidates):
                continue
            # Layer numbers become * in suggestions, as users write such patterns.
            generic = {_LAYER_NUMBER.sub(lambda m: m[0].replace(m[1], "*"), name) for name in names}
            hint = suggest(pattern, sorted(generic))
            violations.append(Violation(f"fp8.{key}={pattern}", f"matches no linear layer{hint}"))
    return violations
