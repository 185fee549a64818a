"""Tensor shards in checkpoints: tensors put together from the ranks that share matrices, and cut for them, so that a checkpoint is
that of the model that is not split and goes on with any layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from fp8cfg.models.tensor_shard import TensorShard
from fp8cfg.numerics.fp8_state_dict import WEIGHT_BUFFERS
from fp8cfg.parallel.tensor import TensorRank

HISTORY = "fp8_amax_history"


def whole(tensors: Mapping[str, Tensor], shards: Mapping[str, TensorShard], here: TensorRank) -> dict[str, Tensor]:
    """Tensors by name of all ranks that share matrices, whole, on the first of these, on the CPU; nothing on the others. What
    stands under two names stays one tensor. Amax histories are the largest of all, since a weight's is recorded by part.

    All those ranks call it, with the same names in the same order."""
    made: dict[object, Tensor | None] = {}
    for name, t in tensors.items():
        if memory_of(name, t) not in made:
            made[memory_of(name, t)] = _whole(name, t.detach(), shard_of(name, t, shards), here)
    return {name: one for name, t in tensors.items() if (one := made[memory_of(name, t)]) is not None}


def memory_of(name: str, t: Tensor) -> object:
    """What tensors that are one and the same have in common, tied weights in a state dict among them; that of an empty one is its
    own."""
    return (t.data_ptr(), t.dtype, t.shape, t.stride()) if t.numel() else name


def parts(tensors: Mapping[str, Tensor], shards: Mapping[str, TensorShard]) -> dict[str, Tensor]:
    """Whole tensors by name as this rank keeps them."""
    found = {}
    for name, t in tensors.items():
        shard = shard_of(name, t, shards)
        found[name] = t if shard is None else shard.part(t)
    return found


def shard_of(name: str, t: Tensor, shards: Mapping[str, TensorShard]) -> TensorShard | None:
    """Of which part of the whole a tensor is: a parameter, what the optimizer has of one, or the scales of a float8 weight that has
    more than one; None for what every rank has."""
    owner, _, last = name.rpartition(".")
    if last in WEIGHT_BUFFERS:
        return shards.get(f"{owner}.weight") if t.dim() == 2 else None
    return shards.get(name, shards.get(owner))


def _whole(name: str, t: Tensor, shard: TensorShard | None, here: TensorRank) -> Tensor | None:
    first = here.rank == 0
    if shard is None:
        if name.endswith(HISTORY):
            t = t.clone()
            dist.all_reduce(t, dist.ReduceOp.MAX, group=here.process_group)
        return t.cpu() if first else None
    data = t.contiguous().view(torch.uint8)  # gloo sends no float8
    found = [torch.empty_like(data) for _ in range(here.size)] if first else None
    dist.gather(data, found, group=here.process_group, group_dst=0)
    return shard.whole([each.view(t.dtype) for each in found]).cpu() if found else None
