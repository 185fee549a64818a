"""FP8 coverage: the formats of each layer's GEMMs and the share of matmul FLOPs in FP8.

Coverage is planned from a recipe, or observed after a step from the records of the FP8 layers.
Layers in high precision have a reason.
"""

from __future__ import annotations

import re
import warnings
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
    has_trained,
    not_engaged,
    plan_differences,
    products_left_out,
)
from fp8cfg.backends.protocol import Observed
from fp8cfg.models.config import adapter_parameters
from fp8cfg.planning.layer_plan import (
    adapted_projections,
    attention_flops,
    attention_plan,
)
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
        other_weights: Weights outside linear layers: adapters, parameters of other modules.
        note: A line below the table.
    """

    linears: Sequence[PlannedLinear]
    attentions: Sequence[PlannedAttention]
    attention_flops: float
    compute: str
    other_weights: Sequence[Unwatched] = ()
    note: str = ""

    @property
    def layers_in_fp8(self) -> int:
        """Number of linear layers with at least one GEMM in FP8."""
        return sum(linear.fp8 for linear in self.linears)

    @property
    def share(self) -> float:
        """Share of matmul FLOPs in FP8, including attention."""
        if not self.flops:
            return 0.0
        fp8_gemms = sum(attention.fp8_share * attention.count for attention in self.attentions)
        attention_flops = fp8_gemms * self._attention_gemm_flops
        linear_flops = sum(self._gemm_flops(linear) * linear.fp8_share for linear in self.linears)
        return (attention_flops + linear_flops) / self.flops

    @property
    def low_share_warning(self) -> str:
        """A warning if less than half of the FLOPs are in FP8, else ""."""
        if self.share >= LOW or not self.flops:  # no FLOPs: an empty batch
            return ""
        name, share, reason = self.largest_in_high_precision
        return (
            f"only {self.share:.1%} of {self.denominator} ran in FP8; the largest part in high"
            f" precision is {name}, {share:.1%} ({reason})"
        )

    @property
    def products(self) -> dict[str, dict[str, str]]:
        """The operands of each GEMM by layer name, such as "e5m2xe4m3" for dgrad."""
        layers: list[PlannedLinear | PlannedAttention] = [*self.linears, *self.attentions]
        return {layer.name: _gemm_formats(layer, self.compute) for layer in layers}

    def data(self) -> dict[str, Any]:
        """Returns the coverage as plain data for coverage.json in the run folder."""
        linears = []
        for linear in self.linears:
            sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
            linears.append({"name": linear.name, **sizes, **self._formats_and_reason(linear)})
        attentions = []
        for attention in self.attentions:
            attentions.append({"name": attention.name, **self._formats_and_reason(attention)})
        other_weights = []
        for module in self.other_weights:
            other_weights.append(
                {"name": module.name, "weights": module.weights, "reason": module.reason}
            )
        return {
            "share_of_matmul_flops": self.share,
            "layers_in_fp8": self.layers_in_fp8,
            "layers": len(self.linears),
            "linears": linears,
            "attention": attentions,
            "beside": other_weights,
        }

    def __str__(self) -> str:
        return "\n".join(self.blocks())

    def _repr_html_(self) -> str:
        return sections_html("FP8 coverage", [Section(self.summary, self.blocks())])

    def blocks(self) -> list[str]:
        """Returns the table, the summary and the note, for a report."""
        total = self.flops or 1.0  # 0 after an empty batch
        rows = []
        for group in self._groups():
            share = group.flops / total
            rows.append([str(group.layers), group.name, f"{share:.1%}", group.formats])
        # Attention has no weight and no wgrad. Its rows have the formats of forward and backward.
        # They have a count only if some layers run attention in FP8.
        attentions: dict[str, list[PlannedAttention]] = {}
        for attention in self.attentions:
            attentions.setdefault(self._attention_formats(attention), []).append(attention)
        for formats, layers in attentions.items():
            gemms = sum(attention.count for attention in layers)
            share = gemms * self._attention_gemm_flops / total
            count_text = str(len(layers)) if self._attentions_in_fp8 else ""
            rows.append([count_text, "attention", f"{share:.1%}", formats])
        header = ["", "linear layers", "FLOPs", "fprop     dgrad     wgrad"]
        blocks: list[str] = [table(header, rows, right=(0, 2)), f"FP8: {self.summary}"]
        if self.note:
            blocks.append(wrapped(self.note))
        return blocks

    @property
    def summary(self) -> str:
        """The number of layers and the share of FLOPs in FP8, as in the last line of the table."""
        layers = f"{self.layers_in_fp8} of {len(self.linears)} linear layers"
        if self._attentions_in_fp8:
            layers += f", attention in {self._attentions_in_fp8} of {len(self.attentions)}"
        return f"{layers}, {self.share:.1%} of {self.denominator}"

    def runs_as(self, plan: Sequence[PlannedLinear]) -> bool:
        """Whether these observed GEMMs are the planned ones, apart from GEMMs without a use."""
        planned_gemms = {linear.name: linear.products for linear in plan}
        for linear in self.linears:
            planned = planned_gemms.get(linear.name)
            if planned is None:
                continue
            for gemm, formats in linear.products.items():
                # Observed high precision is an empty tuple, planned high precision is None.
                if gemm not in linear.left_out and (formats or None) != (planned[gemm] or None):
                    return False
        return True

    @property
    def _attentions_in_fp8(self) -> int:
        """Number of attention layers with at least one GEMM in FP8."""
        return sum(attention.fp8_share > 0 for attention in self.attentions)

    @property
    def largest_in_high_precision(self) -> tuple[str, float, str]:
        """The part of the model with the most high-precision FLOPs.

        Returns:
            Its name, its share of all FLOPs, and the reason.
        """
        parts = []
        for group in self._groups():
            # Formats of a group in high precision begin with the name of that precision.
            if group.formats.startswith(self.compute):
                _, _, reason = group.formats.partition(": ")
                parts.append((group.name, group.flops, reason))
        if self.attentions and not self._attentions_in_fp8:
            parts.append(("attention", self.attention_flops, self.attentions[0].reason))
        if not parts:
            return "products of layers that are otherwise in FP8", 0.0, "in high precision"
        name, flops, reason = max(parts, key=lambda part: part[1])
        share = flops / self.flops if self.flops else 0.0
        return name, share, reason or "in high precision"

    @property
    def left_out(self) -> list[tuple[str, int, float]]:
        """The reasons for weights in high precision, the largest share first.

        Returns:
            For each reason the number of layers and their share of all FLOPs.
        """
        total = self.flops or 1.0
        shares_by_reason: dict[str, list[float]] = {}
        for linear in self.linears:
            if not linear.fp8:
                share = self._gemm_flops(linear) / total
                shares_by_reason.setdefault(_high_precision_reason(linear), []).append(share)
        for module in self.other_weights:
            share = self._gemm_flops(module) / total
            shares_by_reason.setdefault(module.reason, []).append(share)
        sums = [(reason, len(shares), sum(shares)) for reason, shares in shares_by_reason.items()]
        return sorted(sums, key=lambda group: -group[2])

    @property
    def denominator(self) -> str:
        """The denominator of `share` in words."""
        if self.attention_flops:
            return "matmul FLOPs"
        if self.other_weights:
            return "the FLOPs of all weights"
        return "the linear layers' FLOPs"

    @property
    def flops(self) -> float:
        """FLOPs of all matrix products, forward and backward.

        Per token for a recipe's Transformer. For a custom model over all observed rows.
        """
        return self.attention_flops + sum(map(self._gemm_flops, self._modules_with_weights))

    def _gemm_flops(self, module: PlannedLinear | Unwatched) -> float:
        """FLOPs of the GEMMs of one layer, per token or over all observed rows."""
        # Modules other than linear layers are assumed to run fprop, dgrad and wgrad.
        gemms = len(GEMMS)
        if isinstance(module, PlannedLinear):
            gemms = module.count
        rows = module.rows
        if rows is None:
            rows = self._most_rows
        return gemms * 2.0 * module.weights * rows

    @property
    def _attention_gemm_flops(self) -> float:
        """FLOPs per token of one GEMM of one layer's attention, the average over all layers."""
        # Only the total is known. The average is an approximation if only some layers have a
        # sliding window.
        gemms = sum(attention.count for attention in self.attentions)
        return self.attention_flops / gemms if gemms else 0.0

    @cached_property
    def _most_rows(self) -> int:
        """Rows of a layer without observed rows."""
        # Without observed rows every layer has 1 row: FLOPs per token.
        observed_rows = [module.rows for module in self._modules_with_weights if module.rows]
        return max(observed_rows, default=1)

    @property
    def _modules_with_weights(self) -> list[PlannedLinear | Unwatched]:
        """All modules with FLOPs: linear layers and others."""
        return [*self.linears, *self.other_weights]

    def _formats_and_reason(self, layer: PlannedLinear | PlannedAttention) -> dict[str, str]:
        """Formats by GEMM and the reason, as in coverage.json."""
        return {**_gemm_formats(layer, self.compute), "reason": layer.reason}

    def _attention_formats(self, attention: PlannedAttention) -> str:
        """The formats of one layer's attention, forward and backward."""
        if attention.reason:
            return f"{self.compute}: {attention.reason}"
        # Two forward GEMMs, then four backward ones. Equal formats are printed once.
        texts = []
        for gemms in (ATTENTION_GEMMS[:2], ATTENTION_GEMMS[2:]):
            formats = dict.fromkeys(self._gemm_text(attention, gemm) for gemm in gemms)
            texts.append("|".join(formats))
        return " ".join(texts)

    def _groups(self) -> list[_LayerGroup]:
        """Groups layers with equal names, except for the index, and equal formats."""
        layers = []
        for linear in self.linears:
            layers.append((linear.name, self._row_formats(linear), self._gemm_flops(linear)))
        for module in self.other_weights:
            formats = f"{self.compute}: {module.reason}"
            layers.append((module.name, formats, self._gemm_flops(module)))

        groups: dict[tuple[str, str], _LayerGroup] = {}
        for name, formats, flops in layers:
            group_name = _INDEX.sub("*", name)  # layers.0.linear_qkv: layers.*.linear_qkv
            group = groups.setdefault((group_name, formats), _LayerGroup(group_name, formats))
            group.layers += 1
            group.flops += flops
        return list(groups.values())

    def _row_formats(self, linear: PlannedLinear) -> str:
        """The last column of the table: three formats, or the reason for high precision."""
        if not linear.fp8:
            return f"{self.compute}: {_high_precision_reason(linear)}"
        columns = [f"{self._gemm_text(linear, gemm):9}" for gemm in GEMMS]
        return " ".join([*columns, linear.reason]).rstrip()

    def _gemm_text(self, layer: PlannedLinear | PlannedAttention, gemm: str) -> str:
        """The operands of one GEMM in the table, "-" for a GEMM without a use."""
        if gemm in layer.left_out:
            return "-"
        return _operand_formats(layer.products[gemm], self.compute)


@dataclass
class _LayerGroup:
    """A row of the table: layers with equal names, except for the index, and equal formats."""

    name: str
    formats: str
    layers: int = 0
    flops: float = 0.0


def planned_coverage(recipe: Recipe, linears: Sequence[PlannedLinear]) -> Coverage:
    """Returns the planned coverage of the recipe's Transformer.

    Args:
        recipe: The recipe.
        linears: The planned GEMMs of its linear layers.
    """
    adapters = []
    for module, parts in groupby(adapted_projections(recipe), attrgetter("module")):
        parameters = adapter_parameters([*parts], recipe.lora.rank)
        adapters.append(Unwatched(f"{module}.lora", parameters, "adapters"))
    return Coverage(
        linears,
        attention_plan(recipe),
        attention_flops(recipe),
        recipe.precision.compute,
        adapters,
    )


def check_min_coverage(recipe: Recipe, coverage: Coverage) -> None:
    """Raises NotFP8Error if the planned coverage is below fp8.min_coverage."""
    line = min_coverage_problem(recipe, coverage)
    if line:
        raise NotFP8Error(line)


def min_coverage_problem(recipe: Recipe, coverage: Coverage) -> str:
    """Returns an error line if the planned coverage is below fp8.min_coverage, else ""."""
    minimum = recipe.fp8.min_coverage
    # A smoke run drops the minimum, because its small model has another share.
    if not recipe.fp8.enabled or recipe.trainer.smoke or coverage.share >= minimum:
        return ""
    return (
        f"fp8.min_coverage={minimum:g}: only {coverage.share:.1%} of matmul FLOPs would run in FP8;"
        f" lower it, or see fp8cfg plan for the layers in {recipe.precision.compute}"
    )


def coverage_of_layers(
    linears: Sequence[PlannedLinear], other_weights: Sequence[Unwatched], fp8: FP8
) -> Coverage:
    """Returns the planned coverage of a custom model, without attention.

    Args:
        linears: The planned GEMMs of its linear layers.
        other_weights: Its weights outside linear layers.
        fp8: The recipe's fp8 node.
    """
    note = ""
    if fp8.enabled and not fp8.output_layer and not any(linear.output for linear in linears):
        note = _NO_OUTPUT
    return Coverage(linears, (), 0.0, "high precision", other_weights, note)


def observed_coverage(
    recipe: Recipe,
    model: nn.Module,
    plan: Sequence[PlannedLinear],
    observed: Observed,
    foreign: bool = False,
) -> Coverage:
    """Returns the coverage of the GEMMs that ran since the last reset of the record.

    Args:
        recipe: The recipe.
        model: The model, with the row counts of a custom model's layers.
        plan: The planned GEMMs of its linear layers.
        observed: The observed operand formats of each GEMM, by layer name.
        foreign: Whether `model` is a custom model.
    """

    def observed_gemms(name: str, gemms: Sequence[str]) -> Any:
        formats = observed.get(name, {})
        return tuple(formats.get(gemm) for gemm in gemms)

    if foreign:
        planned = _custom_model_coverage(recipe, model, plan, observed)
    else:
        planned = planned_coverage(recipe, plan)
    linears = []
    for linear in planned.linears:
        linears.append(replace(linear, gemms=observed_gemms(linear.name, GEMMS)))
    attentions = []
    for attention in planned.attentions:
        gemms = observed_gemms(attention.name, ATTENTION_GEMMS)
        attentions.append(replace(attention, gemms=gemms))
    return replace(planned, linears=linears, attentions=attentions)


def _custom_model_coverage(
    recipe: Recipe, model: nn.Module, plan: Sequence[PlannedLinear], observed: Observed
) -> Coverage:
    """Returns the planned coverage of a custom model, with its rows and without unused GEMMs."""
    from fp8cfg.backends.any_model import conversion_state, eligibility

    # A custom model may freeze weights or skip layers. GEMMs that autograd did not need are not
    # counted. The plan of a recipe's Transformer already leaves them out.
    trained = has_trained(observed)
    linears = []
    for linear in plan:
        layer = model.get_submodule(linear.name)
        frozen = eligibility.has_frozen_weight(layer)
        left_out = products_left_out(observed.get(linear.name, {}), frozen, trained)
        rows = conversion_state.multiplied(layer)
        linears.append(replace(linear, rows=rows, left_out=left_out))
    return coverage_of_layers(linears, eligibility.other_parameters(model), recipe.fp8)


def coverage(model: nn.Module) -> Coverage:
    """Returns what ran in each linear layer of a model, and in FP8 attention.

    It works with any training loop and covers the time since the record was last cleared. A
    converted layer that has not run counts as high precision. GEMMs that autograd skips are not
    counted, such as dgrad of the first layer or wgrad of a frozen weight.

    Raises:
        ConfigError: `model` is not an nn.Module.
    """
    from torch import nn

    from fp8cfg.backends.any_model.eligibility import observed_gemms, other_parameters

    expect("coverage", model, nn.Module, "a torch.nn.Module, such as job.model")
    linears, attentions = observed_gemms(model)
    return Coverage(linears, attentions, 0.0, "high precision", other_parameters(model))


def warn_of_low_coverage(model: nn.Module, observed: Coverage) -> None:
    """Warns once per model if less than half of a custom model's FLOPs ran in FP8.

    The warning names the largest part in high precision. Converted layers without any GEMM so far
    are ignored. Other missing GEMMs count as planned, for example before backward.

    Args:
        model: The converted custom model.
        observed: Its observed coverage.
    """
    from fp8cfg.backends.any_model.conversion_state import converted, plan_of

    state = converted(model)
    planned = {linear.name: linear for linear in plan_of(model)}
    linears = []
    for linear in observed.linears:
        if linear.name not in planned:
            linears.append(linear)
        elif any(kinds is not None for kinds in linear.gemms):
            linears.append(_with_planned_gemms(linear, planned[linear.name]))
    line = replace(observed, linears=linears).low_share_warning
    if line and not state.coverage_reported:
        warnings.warn(line, RuntimeWarning, stacklevel=3)
    state.coverage_reported = True


def _with_planned_gemms(observed: PlannedLinear, planned: PlannedLinear) -> PlannedLinear:
    """Returns an observed layer, with the planned formats of GEMMs that did not run yet."""
    # A step without backward pass has only fprop so far. That is no reason for a warning.
    gemms: list[Kinds] = []
    for gemm, kinds in observed.products.items():
        if kinds is None and gemm not in observed.left_out:
            kinds = planned.products[gemm]
        gemms.append(kinds)
    return replace(observed, gemms=(gemms[0], gemms[1], gemms[2]))


def _high_precision_reason(linear: PlannedLinear) -> str:
    """The reason for high precision, also if neither the plan nor the conversion has one."""
    if linear.reason:
        return linear.reason
    if HIGH_PRECISION in linear.gemms:
        return "ran outside of the autocast context"
    return "did not multiply"


def _gemm_formats(layer: PlannedLinear | PlannedAttention, high_precision: str) -> dict[str, str]:
    """Operand formats by GEMM. "none" for GEMMs without a use in autograd."""
    formats = {}
    for gemm, kinds in layer.products.items():
        formats[gemm] = _operand_formats(kinds, high_precision)
        if gemm in layer.left_out:
            formats[gemm] = "none"
    return formats


def _operand_formats(kinds: Kinds, high_precision: str) -> str:
    """Operand formats such as "e4m3xe4m3", or the name of the high precision."""
    return "x".join(kinds) if kinds else high_precision


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
        problems = plan_differences([*plan, *attention_plan(recipe)], observed)
    if problems:
        text = "; ".join(problems[:3])
        if len(problems) > 3:
            text += f" and {len(problems) - 3} more"
        raise NotFP8Error(
            f"this run differs from the plan: {text}; keep the forward pass inside autocast()"
        )
    minimum = recipe.fp8.min_coverage
    if recipe.fp8.enabled and result.share < minimum:
        raise NotFP8Error(
            f"fp8.min_coverage={minimum:g}: only {result.share:.1%} of {result.denominator} ran in"
            " FP8; lower it, or see fp8cfg plan for the other layers"
        )
    if recipe.fp8.enabled and foreign:
        warn_of_low_coverage(model, result)
    return result
