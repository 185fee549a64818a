"""Job tensors: those of a model and its optimizer in the form in which they are stored, as this rank keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8cfg.config.fp8 import own_scales
from fp8cfg.job import Job
from fp8cfg.numerics.stored_form import is_fp8_state, stored_state_dict
from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer
from fp8cfg.training.checkpoint import pipeline_stages
from fp8cfg.training.checkpoint.frozen_weights import left_out
from fp8cfg.training.checkpoint.saved_tensors import SavedTensors
from fp8cfg.training.checkpoint.sharded_masters import weight_bytes
from fp8cfg.training.checkpoint.tensor_box import Boxes, Groups, Offsets
from fp8cfg.training.checkpoint.tensor_file import view_of
from fp8cfg.training.checkpoint.tensor_layout import TensorLayout, slices
from fp8cfg.training.distributed.unsharded_form import as_unsharded
from fp8cfg.training.distributed.world import World, same_layers, sharing, stages

OWN = ("fp8_scale", "fp8_amax_history")
"""FP8 state of which ranks may have their own (config/fp8.py, own_scales)."""


def boxes(job: Job, world: World) -> Groups:
    """What this rank has of the model, but for frozen weights under adapters, of its FP8 state and of the optimizer. With tensor
    parallelism all ranks call it."""
    layout, names = TensorLayout(job), left_out(job.recipe, job.model)
    # FSDP2's parameters say how they are split; others are to be plain.
    stored = {
        k: t
        for k, t in stored_state_dict(job.model, keep_vars=bool(layout.split)).items()
        if k not in names
    }
    stored, masters = as_unsharded(job.prepared, stored)
    each, mine = (
        own_scales(job.recipe.fp8) and world.size > 1,
        _of_rank(same_layers(job.prepared).rank),
    )
    own = {mine + k: stored.pop(k) for k in list(stored) if each and k.rpartition(".")[2] in OWN}
    model = _boxes(layout, stored)
    optimizer = _boxes(
        layout, {**masters, **job.optimizer.state_tensors()}, alone=bool(job.prepared.owner)
    )
    fp8 = [box for box in model if is_fp8_state(box.name)] + _boxes(layout, own, alone=True)
    return {
        "model": [box for box in model if not is_fp8_state(box.name)],
        "optimizer": optimizer,
        "fp8": fp8,
    }


def of_this_layout(job: Job, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a group of a checkpoint what this rank keeps, as it keeps it; of other tensors nothing is read."""
    layout = TensorLayout(job)
    elsewhere = tuple(
        f"{name}." for name, rank in job.prepared.owner.items() if rank != layout.sharing.rank
    )
    found = {}
    mine = _of_this_rank(saved, same_layers(job.prepared).rank)
    for name, kept in pipeline_stages.parts(job, mine).items():
        if not name.startswith(elsewhere):
            if isinstance(saved, SavedTensors):
                found[name] = layout.part(name, saved.shape(kept), partial(saved.read, kept))
            else:
                found[name] = layout.part(
                    name, tuple(saved[kept].shape), partial(_cut, saved[kept])
                )
    return found


def _boxes(layout: TensorLayout, named: Mapping[str, Tensor], alone: bool = False) -> Boxes:
    """The boxes of tensors by name, of which those that are one and the same stand once."""
    first: dict[Any, str] = {}
    also: dict[str, list[str]] = {}
    for name, t in named.items():
        kept = first.setdefault(
            view_of(local) if (local := layout.local(t)).numel() else name, name
        )
        also.setdefault(kept, []).append(name)
    return [
        replace(box, also=tuple(names[1:]))
        for kept, names in also.items()
        for box in layout.boxes(kept, named[kept], alone)
    ]


def checkpoint_bytes(job: Job, world: World) -> int:
    """Bytes of the tensors of a checkpoint, at least; before the first step too, when moments are not there yet. All ranks call
    it."""
    parts = (
        1 if job.prepared.tensor_parallel is None else job.prepared.tensor_parallel.size
    )  # vectors are few
    names = left_out(job.recipe, job.model)
    model = {
        id(t): t for k, t in stored_state_dict(job.model, keep_vars=True).items() if k not in names
    }
    state = sum(map(_bytes, job.optimizer.state_tensors().values())) + weight_bytes(job)
    if isinstance(job.optimizer, MixedPrecisionOptimizer) and not job.optimizer.inner.state:
        optim = job.recipe.optim
        state += sum(map(_bytes, job.optimizer.masters.values())) * (
            2 if optim.name != "sgd" else int(optim.momentum > 0)
        )
    if job.prepared.owner:  # each rank has the state of its own parameters
        state = int(
            sharing(job.prepared)
            .sum(torch.tensor(float(state), dtype=torch.float64, device=job.device))
            .item()
        )
    here = torch.tensor(
        float(sum(map(_bytes, model.values())) + state), dtype=torch.float64, device=job.device
    )
    return parts * int(stages(job.prepared).sum(here).item())


def _bytes(t: Tensor) -> int:
    """Bytes of all parts of a split tensor; of one that is stored in FP8 and says otherwise, those of the FP8 numbers."""
    split = hasattr(t, "to_local")
    return t.numel() * (1 if is_traceable_wrapper_subclass(t) and not split else t.element_size())


def _of_rank(rank: int) -> str:
    return f"rank{rank}:" if rank else ""


def _of_this_rank(saved: Mapping[str, Tensor], rank: int) -> dict[str, str]:
    """Names of tensors, and those under which a checkpoint has them: of FP8 state the first rank's, and in its place that of `rank`
    of those with the same layers, where it was saved."""
    mine = f"rank{rank}:"
    found = {name: name for name in saved if ":" not in name}
    return found | {name.removeprefix(mine): name for name in saved if name.startswith(mine)}


def _cut(t: Tensor, start: Offsets, size: Offsets) -> Tensor:
    return t[slices(start, size)]
