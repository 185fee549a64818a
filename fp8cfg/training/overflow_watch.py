"""FP8 overflow: counts for metrics.jsonl, and a warning when FP8 loses values.

With delayed scaling, a tensor is clipped if its amax exceeds the range of its scale. Other scalings
compute the scale from the tensor itself, so they lose infinite values only. Counts are reduced over
all ranks with the same layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8cfg.numerics import Overflow
from fp8cfg.numerics.amax_update import RangesUsed, collect_ranges_used, read_overflow
from fp8cfg.numerics.kernels.launch import HAS_TRITON
from fp8cfg.numerics.overflow_counts import take_step_counts
from fp8cfg.parallel.process_group import World, pipeline_world, stage_world
from fp8cfg.run_folder.metrics_file import Value
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.tables import wrapped

if TYPE_CHECKING:
    from fp8cfg.building.job import Job

WARNING_RATIO = 2.0
"""Smallest ratio of an amax to the range of its scale for a warning.

Slowly growing tensors are always clipped a little. At a ratio of 2 the largest value is halved."""


class OverflowCollector:
    """Collects the overflow of each step on the device, and reads it on the host later.

    Call `collect` and `read` once for each step, in order. Step k + 1 may be collected before
    step k is read.

    Args:
        job: The job.
        world: Ranks of the run.
    """

    def __init__(self, job: Job, world: World) -> None:
        self._job = job
        self._world = world
        self._stages = pipeline_world(job.prepared)
        # One list for all pending steps: the FP8 layers of a run do not change.
        self._tensor_names: list[str] = []
        take_value_counter(job)  # discards counts from before the run

    def collect(self, loss: Tensor, request: float) -> dict[str, Tensor]:
        """Launches the reductions over the ranks. Does not wait for the device.

        Args:
            loss: Loss of the step, float32 []. The metrics are on its device.
            request: A number of this rank, such as a request to stop.

        Returns:
            Metrics by name:

            - request: Maximum of `request` over the ranks, [].
            - values: Numbers of clipped and of infinite values, [2]. Missing if not counted.
            - stages: Result of `count_overflow_over_stages`, [3]. Only with pipeline stages.
            - ratios: Amax divided by the range of the scale, [tensors]. Missing without FP8 layers.
        """
        used = reduce_ranges_used(
            collect_ranges_used(self._job.model), ranks_with_own_amaxes(self._job)
        )
        counter = take_value_counter(self._job)
        metrics = {}
        if counter is None:
            metrics["request"] = self._world.largest(torch.full_like(loss, request))
        else:
            # The request takes the spare element after the two counts: one all-reduce, not two.
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
        """Computes the overflow of a step over all pipeline stages.

        Args:
            metrics: Result of `collect`, copied to the host.

        Returns:
            The overflow. None if no layer reports it: only the native backend does, and Transformer
            Engine with delayed scaling.
        """
        overflow = None
        if "ratios" in metrics:
            overflow = read_overflow(RangesUsed(metrics["ratios"], self._tensor_names))
        if "stages" not in metrics:
            return overflow
        num_clipped, num_infinite, largest = metrics["stages"].tolist()
        if largest < 0:
            return None  # no stage has FP8 layers
        if num_infinite or largest >= WARNING_RATIO:
            # A warning names the tensor. Stages exchange names only now, because this collective
            # waits for all launched work. All stages have the same numbers, so all get here.
            return reduce_overflow_over_stages(overflow, self._stages)
        if not num_clipped:
            largest = 0.0
        return Overflow(int(num_clipped), 0, largest, "")


class OverflowWarnings:
    """Warns at most twice in a run: about clipped values and about infinite values.

    Args:
        say: Prints a message.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pending = {"clipped", "infinite"}

    def check(self, overflow: Overflow, step: int) -> None:
        """Prints a warning if the overflow of `step` is large enough."""
        if overflow.infinite:
            self._warn_once(
                "infinite",
                f"step {step}: {_count_tensors(overflow.infinite)} had infinite values, such as"
                f" {overflow.tensor}; FP8 makes them finite under most scalings",
            )
        elif overflow.largest >= WARNING_RATIO:
            self._warn_once(
                "clipped",
                f"step {step}: {_count_tensors(overflow.clipped)} clipped, the most"
                f" {overflow.tensor} ({overflow.largest:.3g}x its range); raise fp8.margin or set"
                " fp8.scaling=current",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        """Prints the first warning of a kind: "clipped" or "infinite"."""
        if kind in self._pending:
            self._pending.remove(kind)
            self._say(wrapped(f"warning: {message}"))


def _count_tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def overflow_values(overflow: Overflow | None, num_values: Sequence[float]) -> dict[str, Value]:
    """Returns the overflow metrics for metrics.jsonl.

    Args:
        overflow: Overflow of a step. None adds no metrics.
        num_values: Numbers of clipped and of infinite values. Empty if they are not counted.
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
    """Reduces the ratios to their maximum over `ranks`. These must have the same layers."""
    if used is None:
        return None
    return used._replace(ratios=ranks.largest(used.ratios))


def take_value_counter(job: Job) -> Tensor | None:
    """Returns the value counts of the current step, float32 [4], and resets them.

    Returns None if the backend counts no values. See overflow_counts.py.
    """
    if job.choice.product == "none" or not capabilities(job.choice.backend).counts_values:
        return None
    # On a GPU only the Triton kernels count values.
    if job.device.type == "cuda" and not HAS_TRITON:
        return None
    return take_step_counts(job.device)


def ranks_with_own_amaxes(job: Job) -> World:
    """Returns the ranks over which overflow must be reduced.

    These are the ranks with the same layers. If delayed scaling has reduced the amaxes over these
    ranks already, returns a world of this rank only.
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
    """Sums the overflow over the pipeline stages, and keeps the name of the worst tensor.

    All ranks call it. It waits for the device.
    """
    if stages.size == 1:
        return overflow
    texts = [json.loads(text) for text in stages.texts(json.dumps(overflow))]
    overflows = [Overflow(*fields) for fields in texts if fields]
    if not overflows:
        return None
    worst = max(overflows, key=lambda overflow: overflow.largest)
    num_clipped = sum(overflow.clipped for overflow in overflows)
    num_infinite = sum(overflow.infinite for overflow in overflows)
    return Overflow(num_clipped, num_infinite, worst.largest, worst.tensor)


def count_overflow_over_stages(used: RangesUsed | None, like: Tensor, stages: World) -> Tensor:
    """Counts overflow over the pipeline stages. Does not wait for the device.

    Args:
        used: Ranges of this stage, None without FP8 layers.
        like: Tensor with the dtype and the device of the result.
        stages: Ranks of the pipeline.

    Returns:
        Number of clipped tensors, number of infinite tensors and the largest ratio, [3]. The ratio
        is -1 if no stage has FP8 layers.
    """
    # A stage without FP8 layers takes part in the collectives. Its -1 never wins the maximum.
    if used is None:
        counts, largest = like.new_zeros(2), like.new_full((1,), -1.0)
    else:
        is_infinite = used.ratios.isinf()
        num_clipped = ((used.ratios > 1) & ~is_infinite).sum()
        counts = torch.stack([num_clipped, is_infinite.sum()]).to(like.dtype)
        largest = used.ratios.amax().to(like.dtype).view(1)
    return torch.cat([stages.sum(counts), stages.largest(largest)])
