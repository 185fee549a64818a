"""Pipeline stages in checkpoints: the optimizer's JSON state put together from the stages, and what one of them takes of the whole
model's, so that a checkpoint goes on with any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fp8cfg.job import Job
from fp8cfg.parallel.pipeline import elsewhere
from fp8cfg.training.distributed.world import stages


def parts(job: Job, named: Mapping[str, Any]) -> dict[str, Any]:
    """Of what stands under the names of parameters and buffers of the whole model that of this rank's stage."""
    here = job.prepared.pipeline
    return {
        name: its
        for name, its in named.items()
        if here is None or not elsewhere(job.model, here, name)  # type: ignore[arg-type]
    }


def whole_json(job: Job) -> dict[str, Any]:
    """The JSON state of the optimizer with the parameters of all stages. All ranks call it."""
    own = job.optimizer.state_json()
    if job.prepared.pipeline is None:
        return own
    every = [json.loads(text) for text in stages(job.prepared).texts(json.dumps(own["state"]))]
    return {
        **own,
        "state": {name: entry for state in reversed(every) for name, entry in state.items()},
    }


def json_part(job: Job, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the JSON state of a whole optimizer that of this rank's."""
    if job.prepared.pipeline is None or "state" not in state:
        return state
    return {**state, "state": parts(job, state["state"])}
