"""FP8 coverage: which layers run which GEMMs in which format, why the others do not, and their share of the matmul FLOPs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fp8cfg.backends import backend_registry
from fp8cfg.backends.gemm_plan import (
    ATTENTION_GEMMS,
    GEMMS,
    HIGH_PRECISION,
    Kinds,
    PlannedAttention,
    PlannedLinear,
    Unwatched,
    plan_attention,
)
from fp8cfg.config.recipe import Recipe
from fp8cfg.report.tables import table

if TYPE_CHECKING:
    from torch import nn

_INDEX = re.compile(r"(?<![^.])\d+(?=\.)")


@dataclass(frozen=True)
class Coverage:
    """What each linear layer does or did, and each layer's attention.

    FLOPs are those of one token, forward and backward, 2 for a multiplication and an addition; attention is counted for
    the causal half of the sequence, `attention_flops` for all layers together; of someone else's model they are not known, and 0.
    There the FLOPs of a layer are its weights times the rows of the inputs that it was observed to multiply. A layer that was
    not observed, as are most of `beside` (weights that are multiplied outside of linear layers), counts with the largest number
    of rows of any layer.
    """

    linears: Sequence[PlannedLinear]
    attentions: Sequence[PlannedAttention]
    attention_flops: float
    compute: str
    beside: Sequence[Unwatched] = ()

    @property
    def layers_in_fp8(self) -> int:
        """Linear layers with at least one product in FP8."""
        return sum(p.fp8 for p in self.linears)

    @property
    def share(self) -> float:
        """Share of all matmul FLOPs that are in FP8, attention's products among them."""
        attention = sum(p.fp8_share for p in self.attentions) / max(1, len(self.attentions)) * self.attention_flops
        return (attention + sum(self._of(p) * p.fp8_share for p in self.linears)) / self._flops if self._flops else 0.0

    @property
    def products(self) -> dict[str, dict[str, str]]:
        """The operands of each product by the layer's name, such as "e5m2xe4m3"."""
        found: list[PlannedLinear | PlannedAttention] = [*self.linears, *self.attentions]
        return {p.name: _named(p, self.compute) for p in found}

    def data(self) -> dict[str, Any]:
        """The same as plain data, layer by layer, for the run folder."""
        return {
            "share_of_matmul_flops": self.share, "layers_in_fp8": self.layers_in_fp8, "layers": len(self.linears),
            "linears": [{"name": p.name, "in_features": p.in_features, "out_features": p.out_features,
                         **self._products(p)} for p in self.linears],
            "attention": [{"name": p.name, **self._products(p)} for p in self.attentions],
            "beside": [{"name": p.name, "weights": p.weights, "reason": p.reason} for p in self.beside]}

    def __str__(self) -> str:
        rows = [[str(count), name, f"{flops / self._flops:.1%}", what] for (name, what), count, flops in self._groups()]
        fp8 = sum(p.fp8_share > 0 for p in self.attentions)
        for what, count in Counter(map(self._attention, self.attentions)).items():
            share = count / len(self.attentions) * self.attention_flops / self._flops
            rows.append([str(count) if fp8 else "", "attention", f"{share:.1%}", what])
        attention = f", attention in {fp8} of {len(self.attentions)}" if fp8 else ""
        return table(["", "linear layers", "FLOPs", "fprop     dgrad     wgrad"], rows, right=(0, 2)) + (
            f"\nFP8: {self.layers_in_fp8} of {len(self.linears)} linear layers{attention}, {self.share:.1%} of {self.what}")

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
        """The FLOPs of one layer's three products."""
        return 3 * 2.0 * p.weights * (self._most if p.rows is None else p.rows)

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
        return " ".join("|".join(dict.fromkeys(_kinds(k, self.compute) for k in part)) for part in (p.gemms[:2], p.gemms[2:]))

    def _groups(self) -> list[tuple[tuple[str, str], int, float]]:
        """Layers that differ in their index alone, together: (name, what they run), how many, FLOPs."""
        groups: dict[tuple[str, str], tuple[int, float]] = {}
        for p in self.linears:
            kinds = " ".join(f"{_kinds(k, self.compute):9}" for k in p.gemms)
            what = f"{kinds} {p.reason}" if p.fp8 else f"{self.compute}: {p.reason or _why(p)}"
            _add(groups, p.name, what.rstrip(), self._of(p))
        for other in self.beside:
            _add(groups, other.name, f"{self.compute}: {other.reason}", self._of(other))
        return [(key, *value) for key, value in groups.items()]


def planned(recipe: Recipe, linears: Sequence[PlannedLinear]) -> Coverage:
    """The coverage that `recipe` asks for."""
    m = recipe.model
    attention = 3 * 2 * m.seq_length * m.num_attention_heads * m.head_dim * m.num_layers  # two products, half of each masked
    return Coverage(linears, plan_attention(recipe.fp8, m.num_layers), float(attention), recipe.precision.compute)


def of_layers(linears: Sequence[PlannedLinear], beside: Sequence[Unwatched]) -> Coverage:
    """The coverage of a model whose attention is not known."""
    return Coverage(linears, (), 0.0, "high precision", beside)


def ran(recipe: Recipe, model: nn.Module, plan: Sequence[PlannedLinear], backend: str, foreign: bool = False) -> Coverage:
    """The coverage that was observed since the record was last cleared: what the call sites of the products recorded. `foreign`
    says that `model` is not the Transformer of `recipe`."""
    seen = backend_registry.backend(backend).observed(model)

    def gemms(name: str, products: Sequence[str]) -> Any:
        return tuple(seen.get(name, {}).get(g) for g in products)

    if foreign:
        from fp8cfg.backends import flops as rows
        from fp8cfg.backends import observed_gemms

        asked = of_layers([replace(p, rows=rows.multiplied(model.get_submodule(p.name))) for p in plan],
                          observed_gemms.beside(model))
    else:
        asked = planned(recipe, plan)
    return replace(
        asked, linears=[replace(p, gemms=gemms(p.name, GEMMS)) for p in asked.linears],
        attentions=[replace(p, gemms=gemms(p.name, ATTENTION_GEMMS)) for p in asked.attentions])


def coverage(model: nn.Module) -> Coverage:
    """What ran in each linear layer of `model`, by its name, since the record was last cleared, whatever loop it runs in; and in
    attention where that is in FP8. A product of a converted layer that has not run counts as high precision."""
    from fp8cfg.backends.observed_gemms import beside, observed

    linears, attentions = observed(model)
    return Coverage(linears, attentions, 0.0, "high precision", beside(model))


def _add(groups: dict[tuple[str, str], tuple[int, float]], name: str, what: str, flops: float) -> None:
    key = _INDEX.sub("*", name), what
    count, before = groups.get(key, (0, 0.0))
    groups[key] = count + 1, before + flops


def _why(p: PlannedLinear) -> str:
    return "ran outside of the autocast context" if HIGH_PRECISION in p.gemms else "did not multiply"


def _named(p: PlannedLinear | PlannedAttention, otherwise: str) -> dict[str, str]:
    return {g: _kinds(k, otherwise) for g, k in p.products.items()}


def _kinds(kinds: Kinds, otherwise: str) -> str:
    return "x".join(kinds) if kinds else otherwise
