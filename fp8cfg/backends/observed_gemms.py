"""Observed GEMMs: the operand kinds that each layer of a model multiplied, read from its layers, in any training loop."""

from __future__ import annotations

from torch import nn

from fp8cfg.backends import backend_registry, flops
from fp8cfg.backends.exclusions import REASON
from fp8cfg.backends.gemm_plan import (
    ATTENTION_GEMMS,
    GEMMS,
    PlannedAttention,
    PlannedLinear,
    Unwatched,
)
from fp8cfg.backends.linear_layouts import as_linear, layout_of
from fp8cfg.backends.protocol import Observed
from fp8cfg.backends.unconverted_modules import unwatched


def observed(model: nn.Module) -> tuple[list[PlannedLinear], list[PlannedAttention]]:
    """The products that each linear layer of `model`, and each converted attention, ran, with the reason where none of them was in
    FP8.
    """
    seen: Observed = {}
    for backend in backend_registry.used():
        seen |= backend.observed(model)
    linears, attentions = [], []
    for name, module in model.named_modules():
        ran = seen.get(name, {})
        layer = (
            as_linear(module, layout)
            if REASON in vars(module) and (layout := layout_of(module))
            else module
        )
        if isinstance(layer, nn.Linear) or "fprop" in ran:
            gemms = tuple(ran.get(g) for g in GEMMS)
            linears.append(
                PlannedLinear(
                    name,
                    layer.in_features,
                    layer.out_features,
                    gemms,  # type: ignore[arg-type]
                    _reason(module, ran),
                    flops.multiplied(module),
                )
            )
        elif ran:
            attentions.append(PlannedAttention(name, tuple(ran.get(g) for g in ATTENTION_GEMMS)))
    return linears, attentions


def beside(model: nn.Module) -> list[Unwatched]:
    """The parameters of `model` that are multiplied outside of its linear layers."""
    watched = {
        model.get_submodule(name)
        for backend in backend_registry.used()
        for name in backend.observed(model)
    }
    return unwatched(
        model, watched | {module for module in model.modules() if REASON in vars(module)}
    )


def _reason(module: nn.Module, ran: object) -> str:
    if ran or getattr(module, REASON, ""):
        return str(getattr(module, REASON, ""))
    return (
        "not converted" if type(module) is nn.Linear else f"{type(module).__name__} is not watched"
    )
