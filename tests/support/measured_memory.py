"""Measured memory of ranks over gloo, whose threads free what they sent when they come to it."""

from __future__ import annotations

from fp8cfg.parallel.process_group import World
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training import memory_measurement


def measured(recipe: Recipe, world: World, bound: float) -> dict[str, tuple[int, int]]:
    """Planned and measured bytes of `recipe` by kind; where a rank's plan is below its peak by more than the share `bound` of this, or below what
    is there after a forward pass by half of that, the least of up to three measures. All ranks call it."""
    times = [memory_measurement.measure_memory(recipe)]
    while len(times) < 3 and world.any(
        any(
            over_plan(*times[-1][kind], share)
            for kind, share in {"peak": bound, "after forward": bound / 2}.items()
            if kind in times[-1]
        )
    ):
        times.append(memory_measurement.measure_memory(recipe))
    return {
        kind: (planned, min(one[kind][1] for one in times))
        for kind, (planned, _) in times[0].items()
    }


def over_plan(planned: int, here: int, bound: float) -> bool:
    return planned < (1 - bound) * here
