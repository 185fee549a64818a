"""Counted collectives: sums, maxima, gathers and exchanges of flat tensors over torch.distributed.

Float8 is sent as bytes, since gloo refuses it and NCCL would add it up in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from fp8cfg.training.distributed.traffic import Kind, on_ring

if TYPE_CHECKING:
    from fp8cfg.training.distributed.world import World

_all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name until torch >= 2.13 is required


def reduced(data: Tensor, kind: Kind, world: World, largest: bool = False) -> Tensor:
    """The sum of `data` over the ranks in its dtype, in place, or the `largest` of each element."""
    world.traffic.add(kind, on_ring(data, world.size))
    dist.all_reduce(data, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=world.group)
    return data


def gathered(data: Tensor, kind: Kind, world: World) -> Tensor:
    """[ranks, numel]: what each rank has given, as many elements as the others."""
    world.traffic.add(kind, (world.size - 1) * data.nbytes)
    back = data.new_empty(world.size * data.numel())
    _all_gather(back, data, group=world.group)
    return back.view(world.size, -1)


def exchanged(data: Tensor, counts: Sequence[int], kind: Kind, world: World) -> Tensor:
    """What each rank has for this one of its `data`, bytes, of which `counts[r]` are for rank r; one behind the other."""
    mine = counts[world.rank]
    world.traffic.add(kind, data.nbytes - mine)
    back = data.new_empty(world.size * mine)
    dist.all_to_all_single(back, data, [mine] * world.size, list(counts), group=world.group)
    return back
