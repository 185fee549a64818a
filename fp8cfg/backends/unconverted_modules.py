"""Unconverted modules: parameters that a model multiplies outside of its linear layers, all of them in high precision."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from fp8cfg.backends import backend_registry
from fp8cfg.backends.flops import multiplied
from fp8cfg.backends.gemm_plan import Unwatched

_TABLES = (nn.Embedding, nn.EmbeddingBag)
"""What is looked up, not multiplied; one that an output layer shares is that layer's product."""
_ELEMENTWISE = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU)


def unwatched(model: nn.Module, watched: Collection[nn.Module]) -> list[Unwatched]:
    """Every module of `model` with matrices of its own that belong to no linear layer, neither to those of `watched` nor to a
    plain nn.Linear. A module that holds part of a linear layer's weight, such as a parametrization, is inside of the layer and
    counted as the layer's.
    """
    layers = [m for m in model.modules() if m in watched or isinstance(m, (nn.Linear, *_TABLES))]
    inside = {part for layer in layers for part in layer.modules()}
    seen = {id(p) for part in inside for p in part._parameters.values()}
    found = []
    for name, module in model.named_modules():
        if module in inside or isinstance(module, _ELEMENTWISE):
            continue
        matrices = [p for p in _matrices(module) if id(p) not in seen]
        seen |= {id(p) for p in matrices}
        if matrices:
            reason = "is not watched" if _of_a_library(module) else "is no linear layer"
            weights, reason = sum(p.numel() for p in matrices), f"{type(module).__name__} {reason}"
            found.append(Unwatched(name or "the model itself", weights, reason, multiplied(module)))
    return found


def _matrices(module: nn.Module) -> Iterator[Tensor]:
    """The floating parameters that `module` itself holds with more than one dimension longer than 1."""
    held = (
        p
        for p in module._parameters.values()
        if isinstance(p, Tensor) and not isinstance(p, UninitializedParameter)
    )
    return (p for p in held if p.is_floating_point() and sum(size > 1 for size in p.shape) > 1)


def _of_a_library(module: nn.Module) -> bool:
    """Whether it is a layer of a backend's library that may multiply in FP8 without being recorded."""
    known = [
        f"{at}."
        for name in backend_registry.names()
        for at in backend_registry.capabilities(name).layer_modules
    ]
    return any(f"{base.__module__}.".startswith(tuple(known)) for base in type(module).__mro__)
