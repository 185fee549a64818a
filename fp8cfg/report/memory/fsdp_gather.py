"""FSDP all-gather: what weights are gathered in, and those that stay gathered from forward to backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.backend_capabilities import capabilities
from fp8cfg.config.fsdp_sharding import by_fsdp2, gathered_plain
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import against_fp8_gather, fp8_weights, gathered, resolved, sharding
from fp8cfg.report.memory.layout import Part, vectors
from fp8cfg.report.memory.operands import CODEC, held_beside
from fp8cfg.report.tables import wrapped


def gather_line(recipe: Recipe, ranks: int, backend: str) -> str:
    """What weights are gathered in over `ranks`, those that share parameters, and why not in FP8 where fp8.params asks for that;
    empty where that is no question."""
    p = recipe.precision
    if not by_fsdp2(recipe, ranks, backend) or sharding(p, ranks) == "none":
        return ""
    if sharding(p, ranks) != "fsdp":
        if recipe.lora.enabled:
            return "frozen weights are whole on each rank; adapters are gathered once a step"
        if not fp8_weights(p):
            codec = resolved(p)["weight"]
            return (
                ""
                if codec == gathered_plain(p)
                else f"weights of linear layers are gathered in {codec} once a step"
            )
        two = ", two matrices of each: dgrad reads other scales" if held_beside(recipe) >= 1 else ""
        return f"weights are gathered in fp8 once a step{two}"
    said = f"weights are split over the ranks and gathered in {gathered(p, backend)}"
    if gathered(p, backend) == "fp8":
        cast = (
            f", as {backend} casts them, whatever fp8.params is; storage.gather={p.compute} leaves"
            " them in that"
        )
        return wrapped(said + cast * (capabilities(backend).fp8_gather == "cast"), more="  ")
    if not (p.fp8.enabled and p.fp8.params and p.storage.gather == "auto"):
        return said
    return wrapped(f"{said}: {against_fp8_gather(p, backend)[0].partition(';')[0]}", more="  ")


def root_bytes(
    recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int
) -> int:
    """Of the weights that stay gathered from forward to backward pass: all that are in no layer."""
    return int(_root(recipe, part, linears, parameters) * CODEC[recipe.precision.compute])


def _root(recipe: Recipe, part: Part, linears: Sequence[PlannedLinear], parameters: int) -> int:
    """The parameters of embedding, last norm and output layer."""
    matrices = [q.in_features * q.out_features for q in linears if q.name != "output_layer"]
    return (
        parameters
        - sum(-(-n // part.tensor) for n in matrices)
        - len(part.layers) * vectors(recipe, part)
    )
