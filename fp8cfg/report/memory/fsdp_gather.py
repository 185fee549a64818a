"""FSDP all-gather memory: parameters and gradients that are temporarily whole under storage.shard=fsdp."""

from __future__ import annotations

from collections.abc import Sequence

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import gathered, resolved
from fp8cfg.report.memory.layout import Part, vectors
from fp8cfg.report.memory.operands import CODEC


def gathered_bytes(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int, backend: str) -> int:
    """Of embedding, last norm and output layer weights and gradients, and at the end what is sent of these; before that the weights
    of two layers, of which one is being gathered, and the gradients of one, as they are and as they are sent. That is so with
    several ranks, which gather ahead; one alone takes less. `part` has `parameters` of them, and `backend` multiplies."""
    p, root = recipe.precision, _root(recipe, part, linears, parameters)
    layer = (parameters - root) // len(part.layers)
    compute, sent, weight = CODEC[p.compute], CODEC[resolved(p)["comm"]], CODEC[gathered(p, backend)]
    return int(root * 2 * compute + max(layer * (2 * weight + compute + sent), root * sent))


def root_bytes(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int) -> int:
    """Of the weights that stay gathered from forward to backward pass: all that are in no layer."""
    return int(_root(recipe, part, linears, parameters) * CODEC[recipe.precision.compute])


def _root(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int) -> int:
    """The parameters of embedding, last norm and output layer."""
    matrices = [q.in_features * q.out_features for q in linears if q.name != "output_layer"]
    return parameters - sum(-(-n // part.tensor) for n in matrices) - len(part.layers) * vectors(recipe, part)
