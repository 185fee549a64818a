"""Token shard: a rank's tokens of a gathered matrix under sequence parallelism.

The ranks of a column-parallel layer multiply the same gathered input. If each saved it for the backward
pass, it would take memory for the tokens of all ranks. Each rank saves its tokens instead and gathers them
again for wgrad, in FP8. Transformer Engine does the same (module/layernorm_linear.py, `ln_out_total`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from fp8cfg.numerics.async_copies import run_collective

# torch 2.13 has renamed it.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def all_gather(tensor: Tensor, group: Any) -> Tensor:
    """Stacks `tensor`, of any shape, of all ranks to [ranks, ...], without a gradient."""
    # Along dimension 0: along others torch 2.11 runs code that does not compile.
    gathered = run_collective(_all_gather, tensor.contiguous(), 0, group=group)
    return gathered.view(-1, *tensor.shape)


class TokenShard(NamedTuple):
    """Place of a rank among ranks that share the tokens of each sequence.

    It is static: a compiler specializes on it.

    Attributes:
        rank: Number of this rank.
        ranks: Number of ranks.
        group: Name of their process group.
    """

    rank: int
    ranks: int
    group: str

    def local_tokens(self, matrix: Tensor, samples: int) -> Tensor:
        """Copies this rank's tokens of a matrix [samples * length, channels]."""
        view = matrix.unflatten(0, (samples, self.ranks, -1))[:, self.rank]
        # A view of one sample would keep the whole matrix alive.
        tokens: Tensor = view.clone(memory_format=torch.contiguous_format).flatten(0, 1)
        return tokens

    def gather_tokens(self, tokens: Tensor, samples: int) -> Tensor:
        """Gathers all tokens from the ranks' [samples * length / ranks, channels]."""
        shard = tokens
        if tokens.itemsize == 1:
            shard = tokens.view(torch.uint8)  # process groups do not know float8
        gathered = all_gather(shard.unflatten(0, (samples, -1)), self.group)
        matrix: Tensor = gathered.movedim(0, 1).flatten(0, 2).view(tokens.dtype)
        return matrix
