"""What ran in a model, asked of its layers alone: whoever converted it, and whatever loop it runs in."""

from __future__ import annotations

from torch import nn

from fp8cfg.backends import backend_registry, flops
from fp8cfg.backends.exclusions import REASON
from fp8cfg.backends.gemm_plan import ATTENTION_GEMMS, GEMMS, PlannedAttention, PlannedLinear, Unwatched
from fp8cfg.backends.protocol import Observed
from fp8cfg.backends.unconverted_modules import unwatched


def observed(model: nn.Module) -> tuple[list[PlannedLinear], list[PlannedAttention]]:
    """What each linear layer of `model` multiplied, and each attention that is converted, with the reason where none of it was in
    FP8."""
    seen: Observed = {}
    for backend in backend_registry.used():
        seen |= backend.observed(model)
    linears, attentions = [], []
    for name, module in model.named_modules():
        ran = seen.get(name, {})
        if isinstance(module, nn.Linear) or "fprop" in ran:
            gemms = tuple(ran.get(g) for g in GEMMS)
            linears.append(PlannedLinear(
                name, module.in_features, module.out_features, gemms, _reason(module, ran), flops.multiplied(module)))  # type: ignore[arg-type]
        elif ran:
            attentions.append(PlannedAttention(name, tuple(ran.get(g) for g in ATTENTION_GEMMS)))
    return linears, attentions


def beside(model: nn.Module) -> list[Unwatched]:
    """What multiplies in `model` beside its linear layers."""
    watched = {model.get_submodule(name) for backend in backend_registry.used() for name in backend.observed(model)}
    return unwatched(model, watched)


def _reason(module: nn.Module, ran: object) -> str:
    if ran or getattr(module, REASON, ""):
        return str(getattr(module, REASON, ""))
    return "not converted" if type(module) is nn.Linear else f"{type(module).__name__} is not watched"
