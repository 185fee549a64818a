"""Planned FLOPs and measured memory next to torch's own FlopCounterMode and MemTracker."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.training.memory_measurement import LiveBytes

ROWS, LENGTH = 2, 32
NEW = ("Activation", "Temp")
"""MemTracker's kinds of tensors that a pass allocates."""
SMALL = [
    "data=tiny",
    f"model.seq_length={LENGTH}",
    "model.num_layers=2",
    "trainer.global_batch_size=2",
    "trainer.micro_batch_size=2",
]


class _NoModules:
    """In place of FlopCounterMode's ModuleTracker, whose hooks torch rejects in recomputation."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def run_pass(job: Job, tokens: torch.Tensor) -> None:
    with job.autocast():
        logits = job.model(tokens)
    logits.float().square().mean().backward()


def built(*overrides: str) -> tuple[Job, torch.Tensor]:
    job = fp8cfg.build(fp8cfg.compose([*SMALL, *overrides]))
    tokens = torch.randint(0, 250, (ROWS, LENGTH), dtype=torch.int64)
    run_pass(job, tokens)
    job.model.zero_grad(set_to_none=False)
    return job, tokens


@pytest.mark.parametrize("recipe", ["llama_tiny", "gpt3_tiny", "gemma2_tiny"])
@pytest.mark.parametrize("precision", ["bf16", "bf16_fp8"])
def test_planned_flops_are_those_that_torch_counts(recipe: str, precision: str) -> None:
    job, tokens = built(
        f"recipe={recipe}", f"precision={precision}", "model.recompute_granularity=none"
    )
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter:
        run_pass(job, tokens)
    counts = counter.get_flop_counts()["Global"]
    coverage = fp8cfg.plan(job.recipe).coverage
    planned = sum(2 * layer.count * layer.weights for layer in coverage.linears)
    # With a bias, torch calls addmm. The CPU's attention kernel has no count.
    counted = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
    assert counted == planned * ROWS * LENGTH


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp8", "bf16_fp8_block"])
def test_measured_peaks_are_those_of_torch(precision: str) -> None:
    job, tokens = built("recipe=llama_tiny", f"precision={precision}")
    states = [*job.model.parameters(), *job.model.buffers(), tokens]
    gradients = [p.grad for p in job.model.parameters() if p.grad is not None]
    with LiveBytes([*states, *gradients]) as live:
        run_pass(job, tokens)

    tracker = MemTracker()
    tracker.track_external(job.model)
    with tracker:
        run_pass(job, tokens)
    (kinds,) = tracker.get_tracker_snapshot("peak").values()
    peak = sum(count for kind, count in kinds.items() if getattr(kind, "value", "") in NEW)
    assert peak == live.peak
