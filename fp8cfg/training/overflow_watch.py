"""FP8 overflow in a run: counts in metrics.jsonl, and one warning when FP8 loses values.

A tensor is clipped if its amax does not fit its delayed scale. Other scalings fit each tensor, so
only infinite values are lost. Ranks that share layers share the counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fp8cfg.building.job import Job
from fp8cfg.numerics import Overflow
from fp8cfg.numerics.amax_update import RangesUsed, collect_ranges_used, read_overflow
from fp8cfg.numerics.kernels.launch import HAS_TRITON
from fp8cfg.numerics.overflow_counts import take_step_counts
from fp8cfg.parallel.process_group import World, pipeline_world, stage_world
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.tables import wrapped
from fp8cfg.training.metrics import Value

WARNING_RATIO = 2.0
"""Ratio of an amax to its scale's range that is worth a warning.

A tensor that grows a little in each step is clipped a little. Here its largest value is halved."""


class OverflowCollector:
    """Collects the overflow of each step on the device, and reads it on the host.

    Both happen in the order of the steps, but step k + 1 may be collected before k is read.
    """

    def __init__(self, job: Job, world: World) -> None:
        self._job = job
        self._world = world
        self._stages = pipeline_world(job.prepared)
        # The same in all steps that are collected ahead: layers in FP8 do not change in a run.
        self._tensor_names: list[str] = []
        take_value_counter(job)  # drops the counts of earlier passes

    def collect(self, loss: Tensor, request: float) -> dict[str, Tensor]:
        """Launches the reductions over the ranks. Waits for nothing.

        Args:
            loss: Loss of the step, float32 []. The metrics are on its device.
            request: A number of this rank. It shares a reduction with the counts.

        Returns:
            `request`, the largest of all ranks, []; `values`, numbers of clipped and infinite
            values, [2]; `stages`, as of `count_overflow_over_stages`, [3]; `ratios`, amaxes as
            multiples of what fits, [tensors]. The last three only if they are known.
        """
        used = reduce_ranges_used(
            collect_ranges_used(self._job.model), ranks_with_own_amaxes(self._job)
        )
        counter = take_value_counter(self._job)
        metrics = {}
        if counter is None:
            metrics["request"] = self._world.largest(torch.full_like(loss, request))
        else:
            # The counter has a place for it behind the two counts: one reduction instead of two.
            counter[2].fill_(request)
            largest = self._world.largest(counter[:3])
            metrics["request"] = largest[2]
            metrics["values"] = largest[:2]
        if self._stages.size > 1:
            metrics["stages"] = count_overflow_over_stages(used, loss, self._stages)
        if used is not None:
            metrics["ratios"] = used.ratios
            self._tensor_names = used.names
        return metrics

    def read(self, metrics: Mapping[str, Tensor]) -> Overflow | None:
        """Returns the overflow of a step from its collected `metrics`, of all pipeline stages.

        None if no layer reports it: layers of the native backend do, and Transformer Engine's
        under delayed scaling.
        """
        overflow = None
        if "ratios" in metrics:
            overflow = read_overflow(RangesUsed(metrics["ratios"], self._tensor_names))
        if "stages" not in metrics:
            return overflow
        num_clipped, num_infinite, largest = metrics["stages"].tolist()
        if largest < 0:
            return None
        if num_infinite or largest >= WARNING_RATIO:
            # A warning names the tensor. The exchange of names waits for all launched work.
            return reduce_overflow_over_stages(overflow, self._stages)
        if not num_clipped:
            largest = 0.0
        return Overflow(int(num_clipped), 0, largest, "")


class OverflowWarnings:
    """Warns once about the first clipped and once about the first infinite tensor of a run.

    Args:
        say: Prints a message.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pending = {"clipped", "infinite"}

    def check(self, overflow: Overflow, step: int) -> None:
        """Prints a warning if `overflow` of `step` is worth one."""
        if overflow.infinite:
            self._warn_once(
                "infinite",
                f"step {step}: {overflow.tensor} had infinite values, which FP8 makes finite under"
                f" most scalings ({overflow.infinite} tensors)",
            )
        elif overflow.largest >= WARNING_RATIO:
            self._warn_once(
                "clipped",
                f"step {step}: {overflow.tensor} was clipped, it grew to {overflow.largest:.3g}"
                f" times what its delayed scale holds ({overflow.clipped} tensors); fp8.margin"
                " leaves room, fp8.scaling=current scales each tensor from itself",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind in self._pending:
            self._pending.remove(kind)
            self._say(wrapped(f"warning: {message}; metrics.jsonl counts them in each step"))


def overflow_values(overflow: Overflow | None, num_values: Sequence[float]) -> dict[str, Value]:
    """Returns the values of metrics.jsonl: numbers of tensors, and of values if counted.

    Args:
        overflow: The overflow of a step.
        num_values: Numbers of clipped and of infinite values, or nothing.
    """
    if overflow is None:
        return {}
    values: dict[str, Value] = {
        "fp8_clipped": overflow.clipped,
        "fp8_infinite": overflow.infinite,
    }
    if num_values:
        num_clipped, num_infinite = num_values
        values["fp8_clipped_values"] = int(num_clipped)
        values["fp8_infinite_values"] = int(num_infinite)
    return values


def reduce_ranges_used(used: RangesUsed | None, ranks: World) -> RangesUsed | None:
    """Reduces the ranges to their maximum over `ranks`, which have the same layers."""
    if used is None:
        return None
    return used._replace(ratios=ranks.largest(used.ratios))


def take_value_counter(job: Job) -> Tensor | None:
    """Returns the counts of values of the step that ends here, float32 [4], and restarts them.

    None if the backend counts none. On a GPU only Triton kernels count. See overflow_counts.py.
    """
    if job.choice.product == "none" or not capabilities(job.choice.backend).counts_values:
        return None
    if job.device.type == "cuda" and not HAS_TRITON:
        return None
    return take_step_counts(job.device)


def ranks_with_own_amaxes(job: Job) -> World:
    """Returns the ranks that have the same layers of `job`, if each knows only its own amaxes.

    Otherwise returns this rank: with shared delayed scales all of them know the same amaxes.
    """
    fp8 = job.recipe.fp8
    has_shared_scales = SCALINGS[fp8.scaling].history and fp8.reduce_amax
    if (
        has_shared_scales
        and not fp8.tp_only_amax_red
        and capabilities(job.choice.backend).moves_scales
    ):
        return World()
    return stage_world(job.prepared)


def reduce_overflow_over_stages(overflow: Overflow | None, stages: World) -> Overflow | None:
    """Sums the overflow of all pipeline stages, and names the worst tensor. Waits for all."""
    if stages.size == 1:
        return overflow
    texts = [json.loads(text) for text in stages.texts(json.dumps(overflow))]
    overflows = [Overflow(*fields) for fields in texts if fields]
    if not overflows:
        return None
    worst = max(overflows, key=lambda each: each.largest)
    num_clipped = sum(each.clipped for each in overflows)
    num_infinite = sum(each.infinite for each in overflows)
    return Overflow(num_clipped, num_infinite, worst.largest, worst.tensor)


def count_overflow_over_stages(used: RangesUsed | None, like: Tensor, stages: World) -> Tensor:
    """Counts the overflow of all pipeline stages. Waits for nothing.

    Returns:
        Numbers of clipped and of infinite tensors and the largest ratio, [3], with the dtype and
        the device of `like`. The ratio is negative without an FP8 layer.
    """
    if used is None:
        counts, largest = like.new_zeros(2), like.new_full((1,), -1.0)
    else:
        is_infinite = used.ratios.isinf()
        num_clipped = ((used.ratios > 1) & ~is_infinite).sum()
        counts = torch.stack([num_clipped, is_infinite.sum()]).to(like.dtype)
        largest = used.ratios.amax().to(like.dtype).view(1)
    return torch.cat([stages.sum(counts), stages.largest(largest)])
