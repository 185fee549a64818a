"""Communication of gradients and weights: what ranks with the same parameters, or parts of them, send of these in a step."""

from __future__ import annotations

from collections.abc import Iterator

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fsdp_sharding import by_fsdp2
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import sharding
from fp8cfg.report.communication.collectives import Collective
from fp8cfg.report.communication.fully_sharded import fully_sharded
from fp8cfg.report.communication.gradients import summed
from fp8cfg.report.communication.owners import handed_round, summed_on_owners
from fp8cfg.report.memory.layout import Part


def data_axis(
    recipe: Recipe,
    part: Part,
    linears: list[PlannedLinear],
    backend: str,
    passes: int,
    rank: int | None = None,
) -> Iterator[Collective]:
    """Gradients and weights over the ranks with the same parameters, of which this is number `rank`, by default one that sends
    most, in a step of so many `passes`."""
    if by_fsdp2(recipe, part.shards, backend):
        yield from fully_sharded(recipe, part, linears, backend, passes)
    elif sharding(recipe.precision, part.shards) == "zero2":
        yield from summed_on_owners(recipe, part, linears, rank)
        yield from handed_round(recipe, part, linears)
    else:
        yield from summed(recipe, part, linears, rank)
        if sharding(recipe.precision, part.shards) == "zero1":
            yield from handed_round(recipe, part, linears)
