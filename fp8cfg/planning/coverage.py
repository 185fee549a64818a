"""FP8 coverage: the formats of each layer's GEMMs and the share of matmul FLOPs in FP8.

Coverage is planned from a recipe, or observed after a step from the records of the FP8 layers.
Layers in high precision have a reason.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fp8cfg.backends.gemm_plan import (
    ATTENTION_GEMMS,
    GEMMS,
    HIGH_PRECISION,
    Kinds,
    PlannedAttention,
    PlannedLinear,
    Unwatched,
    differences,
    has_trained,
    not_engaged,
    products_left_out,
)
from fp8cfg.backends.protocol import Observed
from fp8cfg.models.config import adapter_parameters
from fp8cfg.planning.layer_plan import adapted_projections, attention_plan, transformer_config
from fp8cfg.schema.errors import NotFP8Error, expect
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.sections import Section, sections_html
from fp8cfg.schema.tables import table, wrapped

if TYPE_CHECKING:
    from torch import nn

_NO_OUTPUT = (
    "fp8.output_layer=false: no output layer was found; if one of these layers computes the logits,"
    " add it to fp8.exclude"
)
LOW = 0.5
"""A run with a smaller share of FP8 FLOPs gets a warning."""
# The index in a module name such as layers.0.linear_qkv: a number before a dot.
_INDEX = re.compile(r"(?<![^.])\d+(?=\.)")


@dataclass(frozen=True)
class Coverage:
    """Formats of the GEMMs of all linear layers and of attention, planned or observed.

    For a recipe's Transformer FLOPs are per token, forward and backward. A multiply-add counts as
    2 FLOPs. For a custom model a layer's FLOPs are its weights times its observed input rows. A
    layer without observed rows counts with the most rows of any layer.

    Attributes:
        linears: GEMMs of each linear layer.
        attentions: GEMMs of each layer's attention. Usually empty for a custom model.
        attention_flops: FLOPs per token of all attention layers. Only the causal half of the
            scores counts. 0 for a custom model because its attention is unknown.
        compute: Name of the high precision, such as "bf16".
        beside: Weights outside linear layers, such as adapters and parameters of other modules.
        note: A line below the table.
    """

    linears: Sequence[PlannedLinear]
    attentions: Sequence[PlannedAttention]
    attention_flops: float
    compute: str
    beside: Sequence[Unwatched] = ()
    note: str = ""

    @property
    def layers_in_fp8(self) -> int:
        """Number of linear layers with at least one GEMM in FP8."""
        return sum(p.fp8 for p in self.linears)

    @property
    def share(self) -> float:
        """Share of matmul FLOPs in FP8, including attention."""
        # Only the total FLOPs of attention are known. Each layer counts with the average, an
        # approximation if only some layers have a sliding window.
        attention = (
            sum(p.fp8_share for p in self.attentions)
            / max(1, len(self.attentions))
            * self.attention_flops
        )
        if not self.flops:
            return 0.0
        linears = sum(self._of(linear) * linear.fp8_share for linear in self.linears)
        return (attention + linears) / self.flops

    @property
    def products(self) -> dict[str, dict[str, str]]:
        """The operands of each GEMM by layer name, such as "e5m2xe4m3" for dgrad."""
        planned: list[PlannedLinear | PlannedAttention] = [*self.linears, *self.attentions]
        return {p.name: _named(p, self.compute) for p in planned}

    def data(self) -> dict[str, Any]:
        """Returns the coverage as plain data for coverage.json in the run folder."""
        return {
            "share_of_matmul_flops": self.share,
            "layers_in_fp8": self.layers_in_fp8,
            "layers": len(self.linears),
            "linears": [
                {
                    "name": p.name,
                    "in_features": p.in_features,
                    "out_features": p.out_features,
                    **self._products(p),
                }
                for p in self.linears
            ],
            "attention": [{"name": p.name, **self._products(p)} for p in self.attentions],
            "beside": [
                {"name": p.name, "weights": p.weights, "reason": p.reason} for p in self.beside
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self.blocks())

    def _repr_html_(self) -> str:
        return sections_html("FP8 coverage", [Section(self.summary, self.blocks())])

    def blocks(self) -> list[str]:
        """Returns the table, the summary and the note, for a report."""
        # Attention has no weight and no wgrad. Its rows have the formats of forward and backward.
        rows = [
            [str(count), name, f"{flops / self.flops:.1%}", what]
            for (name, what), count, flops in self._groups()
        ]
        fp8 = self._attentions_in_fp8
        for what, count in Counter(map(self._attention, self.attentions)).items():
            share = count / len(self.attentions) * self.attention_flops / self.flops
            rows.append([str(count) if fp8 else "", "attention", f"{share:.1%}", what])
        header = ["", "linear layers", "FLOPs", "fprop     dgrad     wgrad"]
        blocks: list[str] = [table(header, rows, right=(0, 2)), f"FP8: {self.summary}"]
        if self.note:
            blocks.append(wrapped(self.note))
        return blocks

    @property
    def summary(self) -> str:
        """The number of layers and the share of FLOPs in FP8, as in the last line of the table."""
        fp8 = self._attentions_in_fp8
        attention = f", attention in {fp8} of {len(self.attentions)}" if fp8 else ""
        return (
            f"{self.layers_in_fp8} of {len(self.linears)} linear layers{attention},"
            f" {self.share:.1%} of {self.what}"
        )

    def runs_as(self, plan: Sequence[PlannedLinear]) -> bool:
        """Whether these observed GEMMs are the planned ones, apart from GEMMs without a use."""
        planned = {p.name: p.products for p in plan}
        return all(
            gemm in p.left_out or (kinds or None) == (planned[p.name][gemm] or None)
            for p in self.linears
            for gemm, kinds in p.products.items()
            if p.name in planned
        )

    @property
    def _attentions_in_fp8(self) -> int:
        """Number of attention layers with at least one GEMM in FP8."""
        return sum(p.fp8_share > 0 for p in self.attentions)

    @property
    def largest_in_high_precision(self) -> tuple[str, float, str]:
        """The part of the model with the most high-precision FLOPs.

        Returns:
            Its name, its share of all FLOPs, and the reason.
        """
        # Text of a group in high precision begins with the name of that precision.
        parts = [
            (name, flops, what.partition(": ")[2])
            for (name, what), _, flops in self._groups()
            if what.startswith(self.compute)
        ]
        if self.attentions and not any(p.fp8_share for p in self.attentions):
            parts.append(("attention", self.attention_flops, self.attentions[0].reason))
        name, flops, reason = max(
            parts,
            key=lambda part: part[1],
            default=("products of layers that are otherwise in FP8", 0.0, ""),
        )
        return name, flops / self.flops if self.flops else 0.0, reason or "in high precision"

    @property
    def left_out(self) -> list[tuple[str, int, float]]:
        """The reasons for weights in high precision, the largest share first.

        Returns:
            For each reason the number of layers and their share of all FLOPs.
        """
        shares_by_reason: dict[str, list[float]] = {}
        for p in self.linears:
            if not p.fp8:
                shares_by_reason.setdefault(p.reason or _why(p), []).append(
                    self._of(p) / self.flops
                )
        for other in self.beside:
            shares_by_reason.setdefault(other.reason, []).append(self._of(other) / self.flops)
        return sorted(
            ((reason, len(shares), sum(shares)) for reason, shares in shares_by_reason.items()),
            key=lambda group: -group[2],
        )

    @property
    def what(self) -> str:
        """The denominator of `share` in words."""
        if self.attention_flops:
            return "matmul FLOPs"
        return "the FLOPs of all weights" if self.beside else "the linear layers' FLOPs"

    @property
    def flops(self) -> float:
        """FLOPs of all matrix products, forward and backward.

        Per token for a recipe's Transformer. For a custom model over all observed rows.
        """
        return self.attention_flops + sum(map(self._of, self._weighed))

    def _of(self, p: PlannedLinear | Unwatched) -> float:
        """FLOPs of the GEMMs of one layer, per token or over all observed rows."""
        # Modules other than linear layers are assumed to run fprop, dgrad and wgrad.
        return (
            (p.count if isinstance(p, PlannedLinear) else 3)
            * 2.0
            * p.weights
            * (self._most if p.rows is None else p.rows)
        )

    @cached_property
    def _most(self) -> int:
        """Rows of a layer without observed rows."""
        # Without observed rows every layer has 1 row: FLOPs per token.
        return max((p.rows for p in self._weighed if p.rows), default=1)

    @property
    def _weighed(self) -> list[PlannedLinear | Unwatched]:
        """All weights with FLOPs: linear layers and other modules."""
        return [*self.linears, *self.beside]

    def _products(self, p: PlannedLinear | PlannedAttention) -> dict[str, str]:
        """Formats by GEMM and the reason, as in coverage.json."""
        return {**_named(p, self.compute), "reason": p.reason}

    def _attention(self, p: PlannedAttention) -> str:
        """The formats of one layer's attention, forward and backward."""
        if p.reason:
            return f"{self.compute}: {p.reason}"
        # Two forward GEMMs, then four backward ones. Equal formats are printed once.
        return " ".join(
            "|".join(dict.fromkeys(_kinds(k, self.compute) for k in part))
            for part in (p.gemms[:2], p.gemms[2:])
        )

    def _groups(self) -> list[tuple[tuple[str, str], int, float]]:
        """Groups layers with equal names, except for the index, and equal formats.

        Returns:
            The name and the formats of each group, its number of layers and its FLOPs.
        """
        groups: dict[tuple[str, str], tuple[int, float]] = {}
        for p in self.linears:
            kinds = " ".join(
                f"{'-' if g in p.left_out else _kinds(k, self.compute):9}"
                for g, k in p.products.items()
            )
            what = f"{kinds} {p.reason}" if p.fp8 else f"{self.compute}: {p.reason or _why(p)}"
            _add(groups, p.name, what.rstrip(), self._of(p))
        for other in self.beside:
            _add(groups, other.name, f"{self.compute}: {other.reason}", self._of(other))
        return [(key, *value) for key, value in groups.items()]


def planned_coverage(recipe: Recipe, linears: Sequence[PlannedLinear]) -> Coverage:
    """Returns the planned coverage of the recipe's Transformer.

    Args:
        recipe: The recipe.
        linears: The planned GEMMs of its linear layers.
    """
    m = recipe.model
    config = transformer_config(recipe)
    # Q K^T and S V have 2 FLOPs per multiply-add, and backward has twice the forward FLOPs.
    # `reach` already has the factor 2 of a multiply-add.
    reach = sum(_reach(m.seq_length, config.window(layer)) for layer in range(m.num_layers))
    attention = 3 * 2 * reach * m.num_attention_heads * m.head_dim  # two products
    adapters = [
        Unwatched(f"{module}.lora", adapter_parameters([*parts], recipe.lora.rank), "adapters")
        for module, parts in groupby(adapted_projections(recipe), attrgetter("module"))
    ]
    return Coverage(
        linears, attention_plan(recipe), float(attention), recipe.precision.compute, adapters
    )


def check_min_coverage(recipe: Recipe, coverage: Coverage) -> None:
    """Raises NotFP8Error if the planned coverage is below fp8.min_coverage."""
    line = min_coverage_problem(recipe, coverage)
    if line:
        raise NotFP8Error(line)


def min_coverage_problem(recipe: Recipe, coverage: Coverage) -> str:
    """Returns an error line if the planned coverage is below fp8.min_coverage, else ""."""
    minimum = recipe.fp8.min_coverage
    if not recipe.fp8.enabled or coverage.share >= minimum:
        return ""
    return (
        f"fp8.min_coverage={minimum:g}: only {coverage.share:.1%} of matmul FLOPs would run in FP8;"
        f" lower it, or see fp8cfg plan for the layers in {recipe.precision.compute}"
    )


def _reach(tokens: int, window: int | None) -> float:
    """Twice the average number of keys per query under a causal mask, in leading order."""
    # Full attention: a query sees half of the tokens on average. With a window of w tokens a
    # query sees w of them, except for the first w queries with half of that.
    if window is None or window >= tokens:
        return tokens
    return 2 * window - window * window / tokens


def coverage_of_layers(
    linears: Sequence[PlannedLinear], beside: Sequence[Unwatched], fp8: FP8
) -> Coverage:
    """Returns the planned coverage of a custom model, without attention.

    Args:
        linears: The planned GEMMs of its linear layers.
        beside: Its weights outside linear layers.
        fp8: The recipe's fp8 node.
    """
    # fp8.output_layer=false needs an output layer. Without one the table gets a note.
    has_output_layer = fp8.output_layer or not fp8.enabled or any(p.output for p in linears)
    return Coverage(
        linears, (), 0.0, "high precision", beside, "" if has_output_layer else _NO_OUTPUT
    )


def observed_coverage(
    recipe: Recipe,
    model: nn.Module,
    plan: Sequence[PlannedLinear],
    seen: Observed,
    foreign: bool = False,
) -> Coverage:
    """Returns the coverage of the GEMMs that ran since the last reset of the record.

    Args:
        recipe: The recipe.
        model: The model, with the row counts of a custom model's layers.
        plan: The planned GEMMs of its linear layers.
        seen: The observed operand formats of each GEMM, by layer name.
        foreign: Whether `model` is a custom model.
    """

    def gemms(name: str, products: Sequence[str]) -> Any:
        return tuple(seen.get(name, {}).get(g) for g in products)

    if foreign:
        from fp8cfg.backends.any_model import conversion_state as rows
        from fp8cfg.backends.any_model import eligibility

        trained, linears = has_trained(seen), []
        # A custom model may freeze weights or skip layers. GEMMs that autograd did not need are
        # not counted. The plan of a recipe's Transformer already leaves them out.
        for p in plan:
            layer = model.get_submodule(p.name)
            frozen = eligibility.has_frozen_weight(layer)
            left_out = products_left_out(seen.get(p.name, {}), frozen, trained)
            linears.append(replace(p, rows=rows.multiplied(layer), left_out=left_out))
        planned = coverage_of_layers(linears, eligibility.beside(model), recipe.fp8)
    else:
        planned = planned_coverage(recipe, plan)
    return replace(
        planned,
        linears=[replace(p, gemms=gemms(p.name, GEMMS)) for p in planned.linears],
        attentions=[replace(p, gemms=gemms(p.name, ATTENTION_GEMMS)) for p in planned.attentions],
    )


def coverage(model: nn.Module) -> Coverage:
    """Returns what ran in each linear layer of a model, and in FP8 attention.

    It works with any training loop and covers the time since the record was last cleared. A
    converted layer that has not run counts as high precision. GEMMs that autograd skips are not
    counted, such as dgrad of the first layer or wgrad of a frozen weight.

    Raises:
        ConfigError: `model` is not an nn.Module.
    """
    from torch import nn

    from fp8cfg.backends.any_model.eligibility import beside, observed

    expect("coverage", model, nn.Module, "a torch.nn.Module, such as job.model")
    linears, attentions = observed(model)
    return Coverage(linears, attentions, 0.0, "high precision", beside(model))


def warn_of_low_coverage(model: nn.Module, seen: Coverage) -> None:
    """Warns once per model if less than half of a custom model's FLOPs ran in FP8.

    The warning names the largest part in high precision. Converted layers without any GEMM so far
    are ignored. Other missing GEMMs count as planned, for example before backward.

    Args:
        model: The converted custom model.
        seen: Its observed coverage.
    """
    from fp8cfg.backends.any_model.conversion_state import converted, plan_of

    state, plan = converted(model), {p.name: p for p in plan_of(model)}
    linears = [
        p if p.name not in plan else replace(p, gemms=_filled(p, plan[p.name]))
        for p in seen.linears
        if p.name not in plan or any(g is not None for g in p.gemms)
    ]
    line = low_coverage_warning(replace(seen, linears=linears))
    if line and not state.share_said:
        warnings.warn(line, RuntimeWarning, stacklevel=3)
    state.share_said = True


def low_coverage_warning(seen: Coverage) -> str:
    """Returns a warning if less than half of the FLOPs ran in FP8, else ""."""
    if seen.share >= LOW:
        return ""
    name, share, reason = seen.largest_in_high_precision
    return (
        f"only {seen.share:.1%} of {seen.what} ran in FP8; the largest part in high precision is"
        f" {name}, {share:.1%} ({reason})"
    )


def _filled(ran: PlannedLinear, planned: PlannedLinear) -> tuple[Kinds, Kinds, Kinds]:
    """The GEMMs of a layer that ran, with the planned formats for those still to come."""
    # A step without backward pass has only fprop so far. That is no reason for a warning.
    gemms = [
        want if got is None and name not in ran.left_out else got
        for name, got, want in zip(GEMMS, ran.gemms, planned.gemms, strict=True)
    ]
    return gemms[0], gemms[1], gemms[2]


def _add(
    groups: dict[tuple[str, str], tuple[int, float]], name: str, what: str, flops: float
) -> None:
    """Adds a layer to its group: layers.0.linear_qkv belongs to layers.*.linear_qkv."""
    key = _INDEX.sub("*", name), what
    count, before = groups.get(key, (0, 0.0))
    groups[key] = count + 1, before + flops


def _why(p: PlannedLinear) -> str:
    """The reason for high precision if neither the plan nor the conversion has one."""
    if HIGH_PRECISION in p.gemms:
        return "ran outside of the autocast context"
    return "did not multiply"


def _named(p: PlannedLinear | PlannedAttention, otherwise: str) -> dict[str, str]:
    """Operand formats by GEMM. "none" for GEMMs without a use in autograd."""
    return {g: "none" if g in p.left_out else _kinds(k, otherwise) for g, k in p.products.items()}


def _kinds(kinds: Kinds, otherwise: str) -> str:
    """Operand formats such as "e4m3xe4m3", or the name of the high precision."""
    return "x".join(kinds) if kinds else otherwise


def prove_engagement(
    recipe: Recipe,
    model: nn.Module,
    plan: Sequence[PlannedLinear],
    observed: Observed,
    foreign: bool = False,
) -> Coverage:
    """Checks that the last step ran in the planned formats, and returns its coverage.

    Args:
        recipe: The recipe.
        model: The model.
        plan: The planned GEMMs of its linear layers.
        observed: The observed operand formats of each GEMM, by layer name.
        foreign: Whether `model` is a custom model. Then the share in FP8 gets a warning if it
            is low.

    Raises:
        NotFP8Error: A GEMM did not run in its planned format, or the share is below
            fp8.min_coverage.
    """
    result = observed_coverage(recipe, model, plan, observed, foreign)
    # A custom model may skip layers in a step. A missing GEMM is an error only in the recipe's
    # own Transformer.
    if foreign:
        from fp8cfg.backends.any_model.conversion_state import replaced_layers, with_current_names

        problems = replaced_layers(model, plan)
        problems += not_engaged(with_current_names(model, plan), observed)
    else:
        problems = differences([*plan, *attention_plan(recipe)], observed)
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise NotFP8Error(
            f"this run differs from the plan: {'; '.join(problems[:3])}{more}; keep the forward"
            " pass"
            " inside autocast()"
        )
    if recipe.fp8.enabled and result.share < recipe.fp8.min_coverage:
        raise NotFP8Error(
            f"fp8.min_coverage={recipe.fp8.min_coverage:g}: only {result.share:.1%} of"
            f" {result.what}"
            " ran in FP8; lower it, or see fp8cfg plan for the other layers"
        )
    if recipe.fp8.enabled and foreign:
        warn_of_low_coverage(model, result)
    return result
