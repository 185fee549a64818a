"""Overflow in a run: counts of clipped and infinite FP8 tensors in metrics.jsonl, and a line where FP8 loses values."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from fp8cfg.building.job import Job
from fp8cfg.numerics import Overflow
from fp8cfg.numerics.amax_update import RangesUsed
from fp8cfg.numerics.kernels.launch import HAS_TRITON
from fp8cfg.numerics.overflow_counts import take_step_counts
from fp8cfg.parallel.process_group import World, same_layers
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.tables import wrapped
from fp8cfg.training.metrics import Value

SAID = 2.0
"""A tensor that grows a little from step to step is clipped by as little; a line is worth one whose largest value is halved."""
VALUES = ("fp8_clipped_values", "fp8_infinite_values")
"""Numbers of values in metrics.jsonl, of the tensors that native layers quantize."""


class OverflowWatch:
    """What FP8 tensors did not hold, step by step. `say` gets one line for the first step in which a tensor's largest value was cut
    to half of it or less, and one for the first in which an infinite value became a finite one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._left = say, {"clipped", "infinite"}

    def values(
        self, found: Overflow | None, counted: list[int] | None, done: int
    ) -> dict[str, Value]:
        """`fp8_clipped` and `fp8_infinite`, numbers of tensors, as metrics.jsonl has them of step `done`, and VALUES where these
        were `counted`; empty without layers that tell: the native backend's, and Transformer Engine's under delayed scaling.
        """
        if found is None:
            return {}
        if found.infinite:
            self._once(
                "infinite",
                f"step {done}: {found.tensor} had infinite values, which FP8 makes finite under"
                f" most scalings ({found.infinite} tensors)",
            )
        elif found.largest >= SAID:
            self._once("clipped", _clipped(found, done))
        return {
            "fp8_clipped": found.clipped,
            "fp8_infinite": found.infinite,
            **dict(zip(VALUES, counted or (), strict=False)),
        }

    def _once(self, kind: str, line: str) -> None:
        if kind in self._left:
            self._left.remove(kind)
            self._say(wrapped(f"warning: {line}; metrics.jsonl counts them in each step"))


def over_ranks(used: RangesUsed | None, ranks: World) -> RangesUsed | None:
    """The largest that the tensors of a layer used over `ranks`, which have the same layers and all call it."""
    return used and used._replace(ratios=ranks.largest(used.ratios))


def values_of(job: Job) -> Tensor | None:
    """The counter of values of the step of `job` that ends here, float32 [4] (overflow_counts.py); None where there is none: on a
    GPU kernels count, of Triton."""
    counts = job.choice.product != "none" and capabilities(job.choice.backend).counts_values
    return (
        take_step_counts(job.device)
        if counts and (HAS_TRITON or job.device.type != "cuda")
        else None
    )


def with_own_amaxes(job: Job) -> World:
    """The ranks that have the same layers of `job`, where each knows its own amaxes alone; else this one. Delayed scales that all
    of them moved together tell each the same."""
    fp8 = job.recipe.fp8
    together = SCALINGS[fp8.scaling].history and capabilities(job.choice.backend).moves_scales
    shared = together and fp8.reduce_amax and not fp8.tp_only_amax_red
    return World() if shared else same_layers(job.prepared)


def over_stages(found: Overflow | None, stages: World) -> Overflow | None:
    """The overflow of all stages of a pipeline, of which each has `found` its own; they all call it."""
    if stages.size == 1:
        return found
    every = [Overflow(*each) for each in map(json.loads, stages.texts(json.dumps(found))) if each]
    if not every:
        return None
    clipped, infinite = sum(each.clipped for each in every), sum(each.infinite for each in every)
    worst = max(every, key=lambda each: each.largest)
    return Overflow(clipped, infinite, worst.largest, worst.tensor)


def counts_over_stages(used: RangesUsed | None, like: Tensor, stages: World) -> Tensor:
    """How many tensors of all stages of a pipeline were clipped, how many had infinite values, and the largest ratio, [3], of the
    dtype of `like` and on its device; the last is below 0 where there is no FP8 layer. It waits for nothing.
    """
    here = (
        torch.cat([like.new_zeros(2), like.new_full((1,), -1.0)])
        if used is None
        else _counted(used.ratios).to(like.dtype)
    )
    return torch.cat([stages.sum(here[:2].clone()), stages.largest(here[2:].clone())])


def _counted(ratios: Tensor) -> Tensor:
    infinite = ratios.isinf()
    return torch.stack([((ratios > 1) & ~infinite).sum(), infinite.sum(), ratios.amax()])


def of_counts(counts: Tensor, own: Overflow | None, stages: World) -> Overflow | None:
    """The overflow of all stages, of `counts_over_stages`, which the host has. Where a line may be worth saying they tell one
    another whose the largest is, which waits for what was launched since; else no tensor is named.
    """
    clipped, infinite, most = counts.tolist()
    if most < 0:
        return None
    if infinite or most >= SAID:
        return over_stages(own, stages)
    return Overflow(int(clipped), 0, most if clipped else 0.0, "")


def _clipped(found: Overflow, done: int) -> str:
    return (
        f"step {done}: {found.tensor} was clipped, it grew to {found.largest:.3g} times what its"
        f" delayed scale holds ({found.clipped} tensors); fp8.margin leaves room,"
        " fp8.scaling=current scales each tensor from itself"
    )
