"""Limits of pipeline parallelism: what of a recipe is not trained in stages, a line each with what to write instead.

As those of tensor parallelism (tensor_limits.py), they are remarks where a recipe is planned or exported, and refuse one that is to
run here.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8cfg.backends.backend_choice import against_layout
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.refusal import LayoutRefusal


def limits(recipe: Recipe, ranks: int) -> list[str]:
    """A line for each reason why `recipe` is not trained with its pipeline_model_parallel_size on `ranks` ranks."""
    if recipe.trainer.strategy.pipeline_model_parallel_size == 1:
        return []
    return [*_microbatches(recipe, ranks), *of_precision(recipe)]


def of_precision(recipe: Recipe) -> list[str]:
    """Those lines that are about who multiplies and what is logged, whatever the sizes."""
    stages, lines = recipe.trainer.strategy.pipeline_model_parallel_size, list[str]()
    if recipe.fp8.enabled:
        lines += against_layout(recipe.backend, stages=stages)
    if every := recipe.log.fp8_stats_every_n_steps:
        lines.append(
            LayoutRefusal(
                f"log.fp8_stats_every_n_steps={every}: one rank measures, and under "
                f"pipeline_model_parallel_size={stages} none has all layers; write 0",
                {"log.fp8_stats_every_n_steps": 0},
            )
        )
    return lines


def _microbatches(recipe: Recipe, ranks: int) -> Iterator[str]:
    """A pipeline is filled by as many microbatches as it has ranks; interleaved stages take turns over so many at a time."""
    t, s = recipe.trainer, recipe.trainer.strategy
    stages, shares = s.pipeline_model_parallel_size, max(1, ranks // s.size)
    count, left = divmod(t.global_batch_size, t.micro_batch_size * shares)
    chunks = s.chunks
    if left or (count >= stages and (chunks == 1 or count % stages == 0)):
        return
    why = (
        f"so few do not fill {stages} stages"
        if count < stages
        else f"interleaved stages take a multiple of {stages}"
    )
    share = t.global_batch_size // shares  # samples of a rank
    micro = next(
        (
            m
            for m in range(min(t.micro_batch_size, share // stages), 0, -1)
            if share % m == 0 and (chunks == 1 or share // m % stages == 0)
        ),
        None,
    )
    cure = (
        f"trainer.micro_batch_size={micro}"
        if micro
        else f"trainer.global_batch_size={stages * t.micro_batch_size * shares}"
    )
    many = "1 microbatch" if count == 1 else f"{count} microbatches"
    yield (
        f"{s.key('pipeline_model_parallel_size')}={stages}: a step has {many} on each rank, and"
        f" {why}; write {cure}"
    )
