"""Weight workspace: which runs keep the weights that FP8 products quantized, for the other passes of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8cfg.config.storage import resolved

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe


def quantizes_once(recipe: Recipe, shard: str, microbatches: int) -> bool:
    """Whether the native backend quantizes a weight once for all passes of a step over so many microbatches, and keeps it until the
    last. It does where there are several passes, and weights stay for them. `shard` is storage.shard, resolved; under fsdp the
    weights of a layer are gathered for each pass and let go. Weights in a codec are there to take few bytes, and nothing is kept of
    them; weights that are stored as products read them are quantized already, and their transpose is kept where
    fp8.keep_transpose_cache says so, which a single backward pass makes once anyway.
    """
    p = recipe.precision
    stored = resolved(p)["weight"]
    several = microbatches > 1 or (recipe.model.recompute_granularity == "full" and stored != "fp8")
    return p.fp8.enabled and several and shard != "fsdp" and stored in ("fp8", p.compute)
