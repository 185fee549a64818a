"""Checkpoints that several ranks write, and the whole tensors that their boxes make, put together without the product's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state, job_tensors
from fp8cfg.checkpoint.save import write_checkpoint
from fp8cfg.parallel.process_group import World
from fp8cfg.training.data import run_data


def saved(job: Job, world: World, folder: Path, step: int) -> Path:
    """A checkpoint of `job` in `folder`, made where it is not there. All ranks call it."""
    share = job_state.collect_share(job, run_data(job.recipe)[0], step, world)
    if world.first:
        folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder if world.first else None, step, share, 1, world)
    return folder / f"step-{step:08d}"


def whole(job: Job, world: World) -> dict[str, dict[str, Tensor]]:
    """Tensors by group and name, of all ranks, on each. All ranks call it."""
    mine = [
        (
            group,
            box.name,
            box.aliases,
            box.shape,
            box.offsets,
            tuple(box.tensor.shape),
            box.tensor.dtype,
            flat(box.tensor),
        )
        for group, boxes in job_tensors.collect_boxes(job, world).items()
        for box in boxes
    ]
    every: list[Any] = [mine]
    if world.size > 1:
        every = [None] * world.size
        dist.all_gather_object(every, mine)
    found: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "fp8": {}}
    for group, name, also, shape, offsets, size, dtype, data in (
        each for rank in every for each in rank
    ):
        t = found[group].setdefault(name, torch.zeros(shape, dtype=dtype))
        t[tuple(slice(a, a + n) for a, n in zip(offsets, size, strict=True))] = (
            torch.from_numpy(data).view(dtype).view(size)
        )
        found[group] |= dict.fromkeys(also, t)
    return found


def flat(t: Tensor) -> Any:
    """The bytes of a tensor, which can be sent whatever its dtype."""
    return t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().copy()
