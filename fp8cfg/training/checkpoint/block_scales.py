"""Block scales in a checkpoint: those of moments in blocks of flat elements, of parameters that ranks have parts of.

The scales of a whole tensor stand one behind the other. Of a part that is rows they are a piece of these. Where tensor parallelism
splits columns a rank has some of each row's: ranks join theirs to write them, and cut their own out of what they read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8cfg.models.tensor_shard import TensorShard
from fp8cfg.numerics.codecs import BLOCK
from fp8cfg.optim.low_bit.shards import fits

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SUFFIX = ".scale_inv"


def parameter(name: str) -> str:
    """The parameter of whose state the scales called `name` are."""
    return name.removesuffix(SUFFIX).rpartition(".")[0]


def split(p: Any, shard: TensorShard | None) -> tuple[TensorShard | None, DTensor | None]:
    """How the block scales of `p` are split, which is the part `shard` of a tensor, and, of the other kind, as which parameter of
    FSDP2. Neither where a cut goes through blocks: this rank has no such scales then, and reads all.
    """
    by_rows = hasattr(p, "placements")
    if (shard and shard.run(p.shape) % BLOCK) or (
        by_rows and not fits(p.shape, p.device_mesh.size(p.device_mesh.ndim - 1), BLOCK)
    ):
        return None, None
    return shard, p if by_rows else None


def joined(part: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """The scales of whole rows, so many, from those of each rank's columns. All ranks of `group` call it."""
    every = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, part.contiguous(), group=group)
    return torch.cat([one.view(rows, -1, *part.shape[1:]) for one in every], 1).flatten(0, 1)


def own(whole: Tensor, rows: int, shard: TensorShard) -> Tensor:
    """Of the scales of so many whole rows those of the columns of `shard`."""
    return whole.view(rows, -1, *whole.shape[1:]).chunk(shard.ranks, 1)[shard.rank].flatten(0, 1)
