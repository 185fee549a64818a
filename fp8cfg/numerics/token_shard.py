"""Token shard: the part of a gathered matrix that a rank keeps under sequence parallelism, and the gather that restores the matrix.

A column-parallel layer multiplies the tokens of all tensor-parallel ranks, so each rank has the same input. Keeping all of it until
the backward pass takes ranks times the memory that is needed. Transformer Engine's layers keep the rank's own tokens and gather them
again for wgrad, in FP8 (module/layernorm_linear.py, `ln_out_total`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from fp8cfg.numerics.async_copies import waited

_all_gather = (
    getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
)  # until torch 2.13


def all_gather(t: Tensor, group: Any) -> Tensor:
    """Stacks `t`, any shape, of the ranks of `group`: [ranks, ...], a new tensor without a gradient."""
    # Along 0: what torch 2.11 does along other dimensions does not compile.
    gathered = waited(_all_gather, t.contiguous(), 0, group=group)
    return gathered.view(-1, *t.shape)


class TokenShard(NamedTuple):
    """Place of a rank among the `ranks` of a process group that share the tokens of each sequence.

    Static, so that a compiler specialises on it.
    """

    rank: int
    ranks: int
    group: str

    def part(self, t: Tensor, samples: int) -> Tensor:
        """Copies this rank's tokens of `t` [samples x length, channels]."""
        view = t.unflatten(0, (samples, self.ranks, -1))[:, self.rank]
        # A view of one sample would keep the whole matrix alive.
        tokens: Tensor = view.clone(memory_format=torch.contiguous_format).flatten(0, 1)
        return tokens

    def whole(self, part: Tensor, samples: int) -> Tensor:
        """Gathers the ranks' parts, each [samples x length / ranks, channels]."""
        # Process groups do not know float8.
        sent = part.view(torch.uint8) if part.itemsize == 1 else part
        gathered = all_gather(sent.unflatten(0, (samples, -1)), self.group)
        tokens: Tensor = gathered.movedim(0, 1).flatten(0, 2).view(part.dtype)
        return tokens
