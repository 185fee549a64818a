"""FSDP all-gather and reduce-scatter memory: parameters and gradients that are temporarily whole where FSDP2 shards them."""

from __future__ import annotations

from collections.abc import Sequence

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import against_fp8_gather, gathered, gathers_params, resolved
from fp8cfg.report.memory.layout import Part, vectors
from fp8cfg.report.memory.operands import CODEC
from fp8cfg.report.tables import wrapped
from fp8cfg.scalings import SCALINGS


def gathered_bytes(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int, backend: str) -> int:
    """Of embedding, last norm and output layer weights and gradients, and at the end what is sent of these; before that the weights
    of two layers, of which one is being gathered, and the gradients of one, as they are and as they are sent. That is so with
    several ranks, which gather ahead; one alone takes less. `part` has `parameters` of them, and `backend` multiplies."""
    p, root = recipe.precision, _root(recipe, part, linears, parameters)
    layer = (parameters - root) // len(part.layers)
    compute, sent, weight = CODEC[p.compute], CODEC[resolved(p)["comm"]], CODEC[gathered(p, backend)]
    return int(root * 2 * compute + max(layer * (2 * weight + compute + sent), root * sent))


def reduced_bytes(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int, each: float) -> int:
    """Under zero1 and zero2, of gradients of `each` bytes an element that are summed as they come: those of embedding, last norm
    and output layer, and at the end what is sent of them; before that those of one layer, as they are and as they are sent."""
    root = _root(recipe, part, linears, parameters)
    layer, sent = (parameters - root) // len(part.layers), CODEC[resolved(recipe.precision)["comm"]]
    return int(root * each + max(layer * (each + sent), root * sent))


ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Layers whose weights tensor parallelism splits by columns: a rank has all rows."""


def gather_line(recipe: Recipe, linears: Sequence[PlannedLinear], ranks: int, backend: str) -> str:
    """What weights are gathered in over `ranks`, those that share parameters, and why not in FP8 where fp8.params asks for that."""
    p, codec = recipe.precision, gathered(recipe.precision, backend)
    said = f"weights are split over the ranks and gathered in {codec}"
    if codec != "fp8":
        why = against_fp8_gather(p, backend) if p.fp8.enabled and p.fp8.params and p.storage.gather == "auto" else []
        return wrapped(f"{said}: {why[0].partition(';')[0]}", more="  ") if why else said
    if high := of_parts_of_squares(recipe, linears, ranks, backend):
        said += (f", {len(high)} layers in {p.compute} ({high[0]} among them): {ranks} ranks do not get whole squares of "
                 f"{SCALINGS[p.fp8.scaling].block} rows")
    return wrapped(said, more="  ")


def of_parts_of_squares(recipe: Recipe, linears: Sequence[PlannedLinear], ranks: int, backend: str) -> list[str]:
    """The layers in FP8 whose weights are gathered in high precision all the same, since shards are no whole squares of blocks."""
    p, tensor = recipe.precision, recipe.trainer.strategy.tensor_model_parallel_size
    block = SCALINGS[p.fp8.scaling].block
    if not block or not gathers_params(p, backend):
        return []
    return [q.name for q in linears
            if q.fp8 and (q.out_features // (1 if q.name.endswith(ROW_PARALLEL) else tensor)) % (block * ranks)]


def root_bytes(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int) -> int:
    """Of the weights that stay gathered from forward to backward pass: all that are in no layer."""
    return int(_root(recipe, part, linears, parameters) * CODEC[recipe.precision.compute])


def _root(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int) -> int:
    """The parameters of embedding, last norm and output layer."""
    matrices = [q.in_features * q.out_features for q in linears if q.name != "output_layer"]
    return parameters - sum(-(-n // part.tensor) for n in matrices) - len(part.layers) * vectors(recipe, part)
