"""Pipeline stages in checkpoints: tensors and optimizer state put together from the stages, and what one of them takes of these, so
that a checkpoint is that of the whole model and goes on with any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8cfg.job import Job
from fp8cfg.parallel.pipeline import PipelineRank, elsewhere
from fp8cfg.training.checkpoint.tensor_shards import memory_of
from fp8cfg.training.distributed.world import stages

Described = tuple[str, list[int], int]
"""Dtype, shape and number of a tensor: of those that are one and the same the number of the first."""


def whole(job: Job, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name of all stages, on the first of them; on the others nothing of use. What stands under two names stays one
    tensor, also where two stages have it. A tensor at a time goes over the wire, as bytes, for gloo sends no float8.

    The ranks of one pipeline call it."""
    here: PipelineRank = job.prepared.pipeline
    every = [json.loads(text) for text in stages(job.prepared).texts(json.dumps(_described(tensors)))]
    if not here.first:
        for t in _to_send(tensors, every, here.rank):
            dist.send(t.detach().to(job.device).contiguous().flatten().view(torch.uint8), group=here.process_group, group_dst=0)
        return {}
    found = dict(tensors)
    for rank, described in enumerate(every[1:], 1):
        made: dict[int, Tensor] = {number: found[name] for name, (_, _, number) in described.items() if name in found}
        for name, (dtype, shape, number) in described.items():
            if number not in made:
                made[number] = _received(getattr(torch, dtype), shape, rank, job.device, here)
            found[name] = made[number]
    return found


def parts(job: Job, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Of what stands under the names of parameters and buffers of the whole model that of this rank's stage."""
    return {name: t for name, t in tensors.items() if not elsewhere(job.model, job.prepared.pipeline, name)}  # type: ignore[arg-type]


def whole_json(job: Job) -> dict[str, Any]:
    """The JSON state of the optimizer with the parameters of all stages. All ranks call it."""
    own = job.optimizer.state_json()
    if job.prepared.pipeline is None:
        return own
    every = [json.loads(text) for text in stages(job.prepared).texts(json.dumps(own["state"]))]
    return {**own, "state": {name: entry for state in reversed(every) for name, entry in state.items()}}


def json_part(job: Job, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the JSON state of a whole optimizer that of this rank's."""
    if job.prepared.pipeline is None or "state" not in state:
        return state
    return {**state, "state": parts(job, state["state"])}


def _described(tensors: Mapping[str, Tensor]) -> dict[str, Described]:
    numbers: dict[object, int] = {}
    return {name: (str(t.dtype).removeprefix("torch."), list(t.shape), numbers.setdefault(memory_of(name, t), len(numbers)))
            for name, t in tensors.items()}


def _to_send(tensors: Mapping[str, Tensor], every: list[dict[str, Described]], rank: int) -> list[Tensor]:
    """Those that no stage before this one has, in the order of their numbers."""
    before = {name for described in every[:rank] for name in described}
    there = {number for name, (_, _, number) in every[rank].items() if name in before}
    left = {number: tensors[name] for name, (_, _, number) in every[rank].items() if number not in there}
    return [left[number] for number in sorted(left)]


def _received(dtype: torch.dtype, shape: list[int], rank: int, device: torch.device, here: PipelineRank) -> Tensor:
    data = torch.empty(shape, dtype=dtype, device=device).flatten().view(torch.uint8)
    dist.recv(data, group=here.process_group, group_src=rank)
    return data.view(dtype).view(shape).cpu()
