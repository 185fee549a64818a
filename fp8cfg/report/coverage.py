"""Coverage: which linear layers run which GEMMs in which format, why the others do not, and their share of the FLOPs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8cfg.backends.planning import PlannedLinear
from fp8cfg.config.recipe import Recipe
from fp8cfg.report.tables import table

if TYPE_CHECKING:
    from torch import nn

    from fp8cfg.job import Job

_INDEX = re.compile(r"\blayers\.\d+\.")


@dataclass(frozen=True)
class Coverage:
    """What each linear layer does or did, and the attention products beside them.

    `flops` are those of one token, forward and backward, 2 for a multiplication and an addition; attention is counted for
    the causal half of the sequence.
    """

    linears: Sequence[PlannedLinear]
    attention_flops: float
    compute: str

    @property
    def layers_in_fp8(self) -> int:
        """Linear layers with at least one product in FP8."""
        return sum(p.fp8 for p in self.linears)

    @property
    def share(self) -> float:
        """Share of all matmul FLOPs that are in FP8, attention's products in the denominator."""
        total = self.attention_flops + sum(_flops(p) for p in self.linears)
        return sum(_flops(p) * p.fp8_share for p in self.linears) / total

    def data(self) -> dict[str, Any]:
        """The same as plain data, layer by layer, for the run folder."""
        return {
            "share_of_matmul_flops": self.share, "layers_in_fp8": self.layers_in_fp8, "layers": len(self.linears),
            "linears": [{"name": p.name, "in_features": p.in_features, "out_features": p.out_features,
                         **{g: _kinds(k, self.compute) for g, k in zip(("fprop", "dgrad", "wgrad"), p.gemms, strict=True)},
                         "reason": p.reason} for p in self.linears]}

    def __str__(self) -> str:
        total = self.attention_flops + sum(_flops(p) for p in self.linears)
        rows = [[str(count), name, f"{flops / total:.1%}", what] for (name, what), count, flops in self._groups()]
        rows.append(["", "attention", f"{self.attention_flops / total:.1%}", f"{self.compute}: scaled dot product"])
        return table(["", "linear layers", "FLOPs", "fprop     dgrad     wgrad"], rows, right=(0, 2)) + (
            f"\nFP8: {self.layers_in_fp8} of {len(self.linears)} linear layers, {self.share:.1%} of matmul FLOPs")

    def _groups(self) -> list[tuple[tuple[str, str], int, float]]:
        """Layers that differ in their index alone, together: (name, what they run), how many, FLOPs."""
        groups: dict[tuple[str, str], tuple[int, float]] = {}
        for p in self.linears:
            kinds = " ".join(f"{_kinds(k, self.compute):9}" for k in p.gemms)
            what = f"{kinds} {p.reason}" if p.fp8 else f"{self.compute}: {p.reason}"
            key = _INDEX.sub("layers.*.", p.name), what.rstrip()
            count, flops = groups.get(key, (0, 0.0))
            groups[key] = count + 1, flops + _flops(p)
        return [(key, *value) for key, value in groups.items()]


def planned(recipe: Recipe, linears: Sequence[PlannedLinear]) -> Coverage:
    """The coverage that `recipe` asks for."""
    m = recipe.model
    attention = 3 * 2 * m.seq_length * m.num_attention_heads * m.head_dim * m.num_layers  # two products, half of each masked
    return Coverage(linears, float(attention), recipe.precision.compute)


def ran(job: Job) -> Coverage:
    """The coverage that was observed since the record was last cleared: what the call sites of the products recorded."""
    from fp8cfg.backends import native

    seen = native.observed(job.model)
    linears = [replace(p, gemms=_three(seen.get(p.name, (None, None, None)))) for p in job.plan]
    return replace(planned(job.recipe, linears), linears=linears)


def coverage(model: nn.Module) -> dict[str, dict[str, str]]:
    """What ran in each FP8 linear layer of `model`, by name: for fprop, dgrad and wgrad the formats of the two operands, or
    "high precision" for a product that ran in high precision or has not run."""
    from fp8cfg.backends import native

    return {name: dict(zip(("fprop", "dgrad", "wgrad"), [_kinds(k, "high precision") for k in gemms], strict=True))
            for name, gemms in native.observed(model).items()}


def _three(gemms: tuple[tuple[str, str] | None, ...]) -> Any:
    return gemms[0], gemms[1], gemms[2]


def _flops(p: PlannedLinear) -> float:
    return 3 * 2.0 * p.in_features * p.out_features


def _kinds(kinds: tuple[str, str] | None, otherwise: str) -> str:
    return "x".join(kinds) if kinds else otherwise
