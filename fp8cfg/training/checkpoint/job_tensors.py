"""Job tensors: those of a model and its optimizer, in the form in which they are stored, put together from all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8cfg.job import Job
from fp8cfg.numerics.stored_form import stored_state_dict
from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer
from fp8cfg.training.checkpoint import pipeline_stages, tensor_shards
from fp8cfg.training.checkpoint.frozen_weights import left_out
from fp8cfg.training.distributed.world import World, current, sharing, stages
from fp8cfg.training.distributed.zero import full_state

OWN = ("fp8_scale", "fp8_amax_history")
"""FP8 state that each rank has of its own under fp8.reduce_amax=false."""


def model_tensors(job: Job, world: World) -> dict[str, Tensor]:
    """The model's tensors, but for frozen weights under adapters; on the first rank whole where they are split, and with the scales
    and histories of every rank where each has its own. All ranks call it."""
    if job.prepared.shard == "fsdp":
        from fp8cfg.training.distributed import fsdp  # inside, here and below: it takes a second to load

        tensors = fsdp.whole(stored_state_dict(job.model, keep_vars=True), sharing(job.prepared).first)
    else:
        names = left_out(job.recipe, job.model)
        tensors = {k: t for k, t in stored_state_dict(job.model).items() if k not in names}
    tensors = _of_all_layers(job, _of_whole_matrices(job, tensors))
    stored = {} if job.recipe.fp8.reduce_amax else stored_state_dict(job.model)
    own = {k: t for k, t in stored.items() if k.rpartition(".")[2] in OWN}
    for name, tensor in own.items():
        of_rank = world.gather(tensor)
        tensors |= {f"{_of_rank(rank)}{name}": t for rank, t in enumerate(of_rank) if rank}
    return tensors


def optimizer_tensors(job: Job, world: World) -> dict[str, Tensor]:
    """The optimizer's tensors, on the first rank those that other ranks keep among them. All ranks call it."""
    shards = world if job.prepared.mesh is None else sharing(job.prepared)
    if job.prepared.shard == "fsdp":
        from fp8cfg.training.distributed import fsdp

        tensors = fsdp.whole(job.optimizer.state_tensors(), shards.first)
    elif job.prepared.owner:
        tensors = full_state(job.optimizer, job.prepared.owner, shards)
    else:
        tensors = job.optimizer.state_tensors()
    return _of_all_layers(job, _of_whole_matrices(job, tensors))


def of_this_layout(job: Job, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint as this rank keeps them."""
    if job.prepared.pipeline is not None:
        tensors = pipeline_stages.parts(job, tensors)
    if job.prepared.tensor_parallel is not None:
        tensors = tensor_shards.parts(tensors, job.model.shards)  # type: ignore[arg-type]
    if job.prepared.shard == "fsdp":
        from fp8cfg.training.distributed import fsdp

        tensors = fsdp.parts(tensors, job.model)
    return tensors


def _of_whole_matrices(job: Job, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the first rank `tensors` put together from the ranks that share matrices; on the others nothing of use."""
    here = job.prepared.tensor_parallel
    if here is None or not sharing(job.prepared).first:
        return tensors
    return tensor_shards.whole(tensors, job.model.shards, here)  # type: ignore[arg-type]


def _of_all_layers(job: Job, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the first rank `tensors`, which the first rank of each stage has of whole matrices, put together from the stages."""
    here = job.prepared.tensor_parallel
    if job.prepared.pipeline is None or not sharing(job.prepared).first or (here is not None and here.rank):
        return tensors
    return pipeline_stages.whole(job, tensors)


def checkpoint_bytes(job: Job, world: World) -> int:
    """Bytes of the tensors of a checkpoint, at least; before the first step too, when moments are not there yet. All ranks call
    it."""
    parts = 1 if job.prepared.tensor_parallel is None else job.prepared.tensor_parallel.size  # vectors are few
    names = left_out(job.recipe, job.model)
    model = {id(t): t for k, t in stored_state_dict(job.model, keep_vars=True).items() if k not in names}
    state = sum(map(_bytes, job.optimizer.state_tensors().values()))
    if isinstance(job.optimizer, MixedPrecisionOptimizer) and not job.optimizer.inner.state:
        optim = job.recipe.optim
        state += sum(map(_bytes, job.optimizer.masters.values())) * (2 if optim.name != "sgd" else int(optim.momentum > 0))
    if job.prepared.owner:  # each rank has the state of its own parameters
        state = int(sharing(job.prepared).sum(torch.tensor(float(state), dtype=torch.float64, device=job.device)).item())
    here = torch.tensor(float(sum(map(_bytes, model.values())) + state), dtype=torch.float64, device=job.device)
    return parts * int(stages(job.prepared).sum(here).item())


def _bytes(t: Tensor) -> int:
    """Bytes of all parts of a split tensor; of one that is stored in FP8 and says otherwise, those of the FP8 numbers."""
    split = hasattr(t, "to_local")
    return t.numel() * (1 if is_traceable_wrapper_subclass(t) and not split else t.element_size())


def _of_rank(rank: int) -> str:
    return f"rank{rank}:"


def of_this_rank(fp8: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of saved FP8 state the first rank's, and in its place this rank's where that was saved."""
    mine = _of_rank(current().rank)
    shared = {k: t for k, t in fp8.items() if ":" not in k}
    return shared | {k.removeprefix(mine): t for k, t in fp8.items() if k.startswith(mine)}
