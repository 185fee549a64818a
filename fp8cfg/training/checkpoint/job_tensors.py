"""Job tensors: those of a model and its optimizer, in the form in which they are stored, put together from all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8cfg.job import Job
from fp8cfg.numerics.stored_form import stored_state_dict
from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer
from fp8cfg.training.distributed.world import World, current
from fp8cfg.training.distributed.zero import full_state

OWN = ("fp8_scale", "fp8_amax_history")
"""FP8 state that each rank has of its own under fp8.reduce_amax=false."""


def model_tensors(job: Job, world: World) -> dict[str, Tensor]:
    """The model's tensors, on the first rank whole where they are split, and with the scales and histories of every rank where
    each has its own. All ranks call it."""
    if job.prepared.shard == "fsdp":
        from fp8cfg.training.distributed import fsdp  # inside, here and below: it takes a second to load

        tensors = fsdp.whole(stored_state_dict(job.model, keep_vars=True), world.first)
    else:
        tensors = stored_state_dict(job.model)
    stored = {} if job.recipe.fp8.reduce_amax else stored_state_dict(job.model)
    own = {k: t for k, t in stored.items() if k.rpartition(".")[2] in OWN}
    for name, tensor in own.items():
        of_rank = world.gather(tensor)
        tensors |= {f"{_of_rank(rank)}{name}": t for rank, t in enumerate(of_rank) if rank}
    return tensors


def optimizer_tensors(job: Job, world: World) -> dict[str, Tensor]:
    """The optimizer's tensors, on the first rank those that other ranks keep among them. All ranks call it."""
    if job.prepared.shard == "fsdp":
        from fp8cfg.training.distributed import fsdp

        return fsdp.whole(job.optimizer.state_tensors(), world.first)
    if job.prepared.owner:
        return full_state(job.optimizer, job.prepared.owner, world)
    return job.optimizer.state_tensors()


def checkpoint_bytes(job: Job, world: World) -> int:
    """Bytes of the tensors of a checkpoint, at least; before the first step too, when moments are not there yet. All ranks call
    it."""
    model = {id(t): t for t in stored_state_dict(job.model, keep_vars=True).values()}
    state = sum(map(_bytes, job.optimizer.state_tensors().values()))
    if isinstance(job.optimizer, MixedPrecisionOptimizer) and not job.optimizer.inner.state:
        optim = job.recipe.optim
        state += sum(map(_bytes, job.optimizer.masters.values())) * (2 if optim.name != "sgd" else int(optim.momentum > 0))
    if job.prepared.owner:  # each rank has the state of its own parameters
        state = int(world.sum(torch.tensor(float(state), dtype=torch.float64, device=job.device)).item())
    return sum(map(_bytes, model.values())) + state


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
