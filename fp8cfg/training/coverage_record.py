"""Coverage record: what a run writes into coverage.json after its first step."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from fp8cfg.backends import backend_registry
from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.job import Job
from fp8cfg.models.sdpa_backend import sdpa_backends
from fp8cfg.report.coverage import Coverage
from fp8cfg.training.distributed.world import stages


def coverage_record(job: Job, seen: Coverage) -> dict[str, Any]:
    """The choice of backend of `job`, its coverage that was `seen`, `sdpa_backend` by attention, and the backend's own entries:
    JSON values. All ranks call it."""
    backend = backend_registry.backend(job.choice.backend)
    return {
        "backend": asdict(job.choice),
        **seen.data(),
        "sdpa_backend": attention_kernels(job),
        **backend.record(job.model),
    }


def attention_kernels(job: Job) -> dict[str, str]:
    """The SDPA backend of each attention in high precision, by name, over all stages of a pipeline, whose ranks all call it; none
    of a model that is not the recipe's."""
    recipe = job.recipe
    if job.foreign:
        return {}
    model, dtype = recipe.model, DTYPES[recipe.precision.compute]
    batch, apart = recipe.trainer.micro_batch_size, recipe.data.reset_attention_mask
    own = sdpa_backends(job.model, batch, model.seq_length, dtype, apart)
    return {
        name: kernel
        for text in stages(job.prepared).texts(json.dumps(own))
        for name, kernel in json.loads(text).items()
    }
