"""FP8 coverage: which layers run which GEMMs in which format, why the others do not, and their share of the matmul FLOPs."""

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
from fp8cfg.schema.tables import table, wrapped

if TYPE_CHECKING:
    from torch import nn

_NO_OUTPUT = (
    "No output layer was found for fp8.output_layer=false to keep in high precision: where one of"
    " these makes the logits, name it in fp8.exclude."
)
LOW = 0.5
"""The share of FP8 below which a run is warned of."""
_INDEX = re.compile(r"(?<![^.])\d+(?=\.)")


@dataclass(frozen=True)
class Coverage:
    """What each linear layer does or did, and each layer's attention.

    FLOPs are those of one token, forward and backward, 2 for a multiplication and an addition; attention is counted for
    the causal half of the sequence, `attention_flops` for all layers together; of someone else's model they are not known, and 0.
    There the FLOPs of a layer are its weights times the rows of the inputs that it was observed to multiply. A layer that was
    not observed, as are most of `beside` (weights that are multiplied outside of linear layers), counts with the largest number
    of rows of any layer. `note` is a line below the table.
    """

    linears: Sequence[PlannedLinear]
    attentions: Sequence[PlannedAttention]
    attention_flops: float
    compute: str
    beside: Sequence[Unwatched] = ()
    note: str = ""

    @property
    def layers_in_fp8(self) -> int:
        """Linear layers with at least one product in FP8."""
        return sum(p.fp8 for p in self.linears)

    @property
    def share(self) -> float:
        """Share of all matmul FLOPs that are in FP8, attention's products among them."""
        attention = (
            sum(p.fp8_share for p in self.attentions)
            / max(1, len(self.attentions))
            * self.attention_flops
        )
        return (
            (attention + sum(self._of(p) * p.fp8_share for p in self.linears)) / self._flops
            if self._flops
            else 0.0
        )

    @property
    def products(self) -> dict[str, dict[str, str]]:
        """The operands of each product by the layer's name, such as "e5m2xe4m3"."""
        found: list[PlannedLinear | PlannedAttention] = [*self.linears, *self.attentions]
        return {p.name: _named(p, self.compute) for p in found}

    def data(self) -> dict[str, Any]:
        """The same as plain data, layer by layer, for the run folder."""
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
        rows = [
            [str(count), name, f"{flops / self._flops:.1%}", what]
            for (name, what), count, flops in self._groups()
        ]
        fp8 = sum(p.fp8_share > 0 for p in self.attentions)
        for what, count in Counter(map(self._attention, self.attentions)).items():
            share = count / len(self.attentions) * self.attention_flops / self._flops
            rows.append([str(count) if fp8 else "", "attention", f"{share:.1%}", what])
        attention = f", attention in {fp8} of {len(self.attentions)}" if fp8 else ""
        return table(
            ["", "linear layers", "FLOPs", "fprop     dgrad     wgrad"], rows, right=(0, 2)
        ) + (
            f"\nFP8: {self.layers_in_fp8} of {len(self.linears)} linear layers{attention},"
            f" {self.share:.1%} of {self.what}" + (f"\n{wrapped(self.note)}" if self.note else "")
        )

    @property
    def largest_in_high_precision(self) -> tuple[str, float, str]:
        """The part of the model with most FLOPs that are not in FP8: its name, their share of all FLOPs, and why."""
        parts = [
            (name, flops, what.partition(": ")[2])
            for (name, what), _, flops in self._groups()
            if what.startswith(self.compute)
        ]
        if self.attentions and not any(p.fp8_share for p in self.attentions):
            parts.append(("attention", self.attention_flops, self.attentions[0].reason))
        name, flops, why = max(
            parts,
            key=lambda part: part[1],
            default=("products of layers that are otherwise in FP8", 0.0, ""),
        )
        return name, flops / self._flops if self._flops else 0.0, why or "in high precision"

    @property
    def left_out(self) -> list[tuple[str, int, float]]:
        """Why linear layers and other weights are in high precision: (reason, how many, their share of all FLOPs), by share."""
        found: dict[str, list[float]] = {}
        for p in self.linears:
            if not p.fp8:
                found.setdefault(p.reason or _why(p), []).append(self._of(p) / self._flops)
        for other in self.beside:
            found.setdefault(other.reason, []).append(self._of(other) / self._flops)
        return sorted(
            ((why, len(shares), sum(shares)) for why, shares in found.items()),
            key=lambda group: -group[2],
        )

    @property
    def what(self) -> str:
        """What `share` is a share of."""
        if self.attention_flops:
            return "matmul FLOPs"
        return "the FLOPs of all weights" if self.beside else "the linear layers' FLOPs"

    @property
    def _flops(self) -> float:
        return self.attention_flops + sum(map(self._of, self._weighed))

    def _of(self, p: PlannedLinear | Unwatched) -> float:
        """The FLOPs of one layer's products."""
        return (
            (p.count if isinstance(p, PlannedLinear) else 3)
            * 2.0
            * p.weights
            * (self._most if p.rows is None else p.rows)
        )

    @cached_property
    def _most(self) -> int:
        return max((p.rows for p in self._weighed if p.rows), default=1)

    @property
    def _weighed(self) -> list[PlannedLinear | Unwatched]:
        return [*self.linears, *self.beside]

    def _products(self, p: PlannedLinear | PlannedAttention) -> dict[str, str]:
        return {**_named(p, self.compute), "reason": p.reason}

    def _attention(self, p: PlannedAttention) -> str:
        """What one layer's attention runs, forward and backward: it has no weight, and so no wgrad."""
        if p.reason:
            return f"{self.compute}: {p.reason}"
        return " ".join(
            "|".join(dict.fromkeys(_kinds(k, self.compute) for k in part))
            for part in (p.gemms[:2], p.gemms[2:])
        )

    def _groups(self) -> list[tuple[tuple[str, str], int, float]]:
        """Layers that differ in their index alone, together: (name, what they run), how many, FLOPs."""
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
    """The coverage that `recipe` asks for."""
    m = recipe.model
    config = transformer_config(recipe)
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
    """Raises NotFP8Error if the planned `coverage` is below fp8.min_coverage."""
    line = min_coverage_problem(recipe, coverage)
    if line:
        raise NotFP8Error(line)


def min_coverage_problem(recipe: Recipe, coverage: Coverage) -> str:
    """A line if the planned `coverage` is below fp8.min_coverage; else empty."""
    least = recipe.fp8.min_coverage
    if not recipe.fp8.enabled or coverage.share >= least:
        return ""
    return f"fp8.min_coverage={least:g}: {coverage.share:.1%} of matmul FLOPs would run in FP8"


def _reach(tokens: int, window: int | None) -> float:
    """Twice the tokens that one attends to on average, in the leading order: half of each product is masked."""
    return tokens if window is None or window >= tokens else 2 * window - window * window / tokens


def coverage_of_layers(
    linears: Sequence[PlannedLinear], beside: Sequence[Unwatched], fp8: FP8
) -> Coverage:
    """The coverage of a model whose attention is not known, planned for `fp8`."""
    found = fp8.output_layer or not fp8.enabled or any(p.output for p in linears)
    return Coverage(linears, (), 0.0, "high precision", beside, "" if found else _NO_OUTPUT)


def observed_coverage(
    recipe: Recipe,
    model: nn.Module,
    plan: Sequence[PlannedLinear],
    seen: Observed,
    foreign: bool = False,
) -> Coverage:
    """The coverage of the products that were `seen` since the record was last cleared: what their call sites recorded. `foreign`
    says that `model` is not the Transformer of `recipe`."""

    def gemms(name: str, products: Sequence[str]) -> Any:
        return tuple(seen.get(name, {}).get(g) for g in products)

    if foreign:
        from fp8cfg.backends.any_model import conversion_state as rows
        from fp8cfg.backends.any_model import eligibility

        trained, linears = has_trained(seen), []
        for p in plan:
            layer = model.get_submodule(p.name)
            frozen = eligibility.has_frozen_weight(layer)
            left_out = products_left_out(seen.get(p.name, {}), frozen, trained)
            linears.append(replace(p, rows=rows.multiplied(layer), left_out=left_out))
        asked = coverage_of_layers(linears, eligibility.beside(model), recipe.fp8)
    else:
        asked = planned_coverage(recipe, plan)
    return replace(
        asked,
        linears=[replace(p, gemms=gemms(p.name, GEMMS)) for p in asked.linears],
        attentions=[replace(p, gemms=gemms(p.name, ATTENTION_GEMMS)) for p in asked.attentions],
    )


def coverage(model: nn.Module) -> Coverage:
    """What ran in each linear layer of `model`, by its name, since the record was last cleared, whatever loop it runs in; and in
    attention where that is in FP8. A converted layer that has not run counts as high precision. Products that autograd does not need,
    such as dgrad of a first layer or wgrad of a frozen weight, are no part of the FLOPs. Raises ConfigError for what is no
    nn.Module."""
    from torch import nn

    from fp8cfg.backends.any_model.eligibility import beside, observed

    expect("coverage", model, nn.Module, "a torch.nn.Module, such as job.model")
    linears, attentions = observed(model)
    return Coverage(linears, attentions, 0.0, "high precision", beside(model))


def warn_of_low_coverage(model: nn.Module, seen: Coverage) -> None:
    """Warn, once for `model`, which is a user's, where less than half of its FLOPs ran in FP8, and name the largest part that did
    not. A converted layer that has not run is left out, and a product that is missing in one that has, as before a backward pass,
    counts as planned."""
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
    """The line about a run of which less than half of the FLOPs are in FP8; empty for another."""
    if seen.share >= LOW:
        return ""
    name, share, what = seen.largest_in_high_precision
    return (
        f"only {seen.share:.1%} of {seen.what} ran in FP8; the largest part that did not is {name},"
        f" {share:.1%} ({what})"
    )


def _filled(ran: PlannedLinear, planned: PlannedLinear) -> tuple[Kinds, Kinds, Kinds]:
    gemms = [
        want if got is None and name not in ran.left_out else got
        for name, got, want in zip(GEMMS, ran.gemms, planned.gemms, strict=True)
    ]
    return gemms[0], gemms[1], gemms[2]


def _add(
    groups: dict[tuple[str, str], tuple[int, float]], name: str, what: str, flops: float
) -> None:
    key = _INDEX.sub("*", name), what
    count, before = groups.get(key, (0, 0.0))
    groups[key] = count + 1, before + flops


def _why(p: PlannedLinear) -> str:
    return (
        "ran outside of the autocast context" if HIGH_PRECISION in p.gemms else "did not multiply"
    )


def _named(p: PlannedLinear | PlannedAttention, otherwise: str) -> dict[str, str]:
    return {g: "none" if g in p.left_out else _kinds(k, otherwise) for g, k in p.products.items()}


def _kinds(kinds: Kinds, otherwise: str) -> str:
    return "x".join(kinds) if kinds else otherwise


def prove_engagement(
    recipe: Recipe,
    model: nn.Module,
    plan: Sequence[PlannedLinear],
    observed: Observed,
    foreign: bool = False,
) -> Coverage:
    """The coverage of the step that just ran in `model`, whose products are `observed`; `foreign` says that it is not the
    Transformer of `recipe`. Raises NotFP8Error where it is not what was planned, or less than fp8.min_coverage.
    """
    seen = observed_coverage(recipe, model, plan, observed, foreign)
    if foreign:
        from fp8cfg.backends.any_model.conversion_state import replaced_layers, with_current_names

        wrong = replaced_layers(model, plan)
        wrong += not_engaged(with_current_names(model, plan), observed)
    else:
        wrong = differences([*plan, *attention_plan(recipe)], observed)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise NotFP8Error(f"this run is not what was asked for: {'; '.join(wrong[:3])}{more}")
    if recipe.fp8.enabled and seen.share < recipe.fp8.min_coverage:
        raise NotFP8Error(
            f"fp8.min_coverage={recipe.fp8.min_coverage:g}: {seen.share:.1%} of {seen.what} ran"
            " in FP8"
        )
    if recipe.fp8.enabled and foreign:
        warn_of_low_coverage(model, seen)
    return seen
