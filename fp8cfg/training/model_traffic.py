"""Traffic inside of a model: the bytes that tensor, context and pipeline parallelism send in one pass over a microbatch.

They are computed, not counted where they are sent: that is inside of the model, which may be compiled.
"""

from __future__ import annotations

from typing import cast

from fp8cfg.config.recipe import Recipe
from fp8cfg.parallel.mesh import coordinates
from fp8cfg.report.communication.passes import of_pass
from fp8cfg.report.memory.layout import stage_parts
from fp8cfg.training.distributed.traffic import Kind
from fp8cfg.training.distributed.world import World


def count_pass(recipe: Recipe, samples: int, world: World) -> None:
    """Count what this rank sends in a forward and a backward pass over that many samples."""
    strategy = recipe.trainer.strategy
    stage = stage_parts(recipe, strategy.size)[coordinates(strategy, world.rank, world.size)["pp"]]
    for sent in of_pass(recipe, stage, samples):
        world.traffic.add(cast(Kind, sent.what), sent.bytes, sent.count)
