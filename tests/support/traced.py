"""Traced models: Dynamo and AOTAutograd without Inductor, for tests of what is recorded, guarded or compiled again.

Those two decide all of that; Inductor, which takes minutes where they take seconds, writes the code alone. Each mechanism has a case
under Inductor as well.
"""

from __future__ import annotations

from functools import partial

import torch

from fp8cfg.building.job import Job

TRACE = partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
"""What `Job.compiler` gives, without Inductor."""


def trace_model(job: Job) -> None:
    """`job.compile_model()` without Inductor; a low-bit optimizer stays eager."""
    job.compiler = lambda: TRACE  # type: ignore[method-assign]
    job.compile_model()
    job.optimizer.compiled = False
