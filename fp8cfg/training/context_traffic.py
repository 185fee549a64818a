"""Context-parallel traffic: the bytes of keys and values that one pass over a microbatch sends.

They are computed, not counted where they are sent: that is inside of the model, which may be compiled.
"""

from __future__ import annotations

import torch

from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.config.recipe import Recipe
from fp8cfg.parallel.mesh import coordinates
from fp8cfg.training.distributed.collectives import Message
from fp8cfg.training.distributed.world import World


def count_pass(recipe: Recipe, samples: int, world: World) -> None:
    """Count what this rank sends in a forward and a backward pass over that many samples: in each layer an all-gather of its keys
    and values, once more where the layer is recomputed, and a reduce-scatter of the gradients of all of them."""
    strategy, m = recipe.trainer.strategy, recipe.model
    ranks = strategy.context_parallel_size
    if ranks == 1:
        return
    elements = 2 * samples * (m.seq_length // ranks) * m.num_query_groups * m.head_dim
    part = torch.empty(elements, dtype=DTYPES[recipe.precision.compute], device="meta")
    gather = Message("gather", part, "keys and values")
    scatter = Message("exchange", part.repeat(ranks), "keys and values", (part.nbytes,) * ranks)
    rank = coordinates(strategy, world.rank, world.size)["cp"]
    for _ in range(m.num_layers):
        for message in (gather, *([gather] if m.recompute_granularity == "full" else []), scatter):
            world.traffic.count(message, rank, ranks)
