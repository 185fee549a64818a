"""Collectives of tensor and context parallelism with their gradients.

    function                             forward          backward
    copy_to_tensor_parallel              copy             all-reduce
    reduce_from_tensor_parallel          all-reduce       copy
    gather_from_sequence_parallel        all-gather       reduce-scatter
    reduce_scatter_to_sequence_parallel  reduce-scatter   all-gather
    all_reduce_both                      all-reduce       all-reduce
    gather_last_dim                      all-gather       slice of this rank

The first two enclose a pair of column-parallel and row-parallel layers. The next two do the same
under sequence parallelism. There each rank has a part of each sequence outside of such a pair.
Source: Megatron-LM, megatron/core/tensor_parallel/mappings.py.

Sums are taken in the dtype of the tensor, as in Megatron: bfloat16 terms are rounded first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from fp8cfg.numerics.async_copies import run_collective
from fp8cfg.numerics.token_shard import all_gather

SEQUENCE = 1
"""The dimension of tokens in [B, T, C]."""
# reduce_scatter_single is new in torch 2.13. Remove the fallback when pyproject.toml requires 2.13.
_functional_reduce_scatter = (
    getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
)


def copy_to_tensor_parallel(x: Tensor, group: str) -> Tensor:
    """Returns `x`, the input of a column-parallel layer. Sums its gradients over the ranks."""
    return _CopyToTensorParallel.apply(x, group)  # type: ignore[no-any-return]


def reduce_from_tensor_parallel(x: Tensor, group: str) -> Tensor:
    """Sums `x`, the output of a row-parallel layer. Its gradient is the same on all ranks."""
    return _ReduceFromTensorParallel.apply(x, group)  # type: ignore[no-any-return]


def gather_from_sequence_parallel(x: Tensor, group: str, dim: int = SEQUENCE) -> Tensor:
    """Concatenates the parts of all ranks, and reduce-scatters their gradients.

    Args:
        x: This rank's part, [B, T / ranks, C] by default.
        group: Name of the process group.
        dim: Dimension to concatenate along.

    Returns:
        Full sequences, [B, T, C] by default.
    """
    return _GatherFromSequenceParallel.apply(x, dim, group)  # type: ignore[no-any-return]


def reduce_scatter_to_sequence_parallel(x: Tensor, group: str) -> Tensor:
    """Sums `x`, [B, T, C], over the ranks and returns this rank's tokens, [B, T / ranks, C]."""
    return _ReduceScatterToSequenceParallel.apply(x, group)  # type: ignore[no-any-return]


def all_reduce_both(x: Tensor, group: str) -> Tensor:
    """Sums `x` over the ranks, and its gradients too.

    Each rank uses the sum for its own computation, so the gradients differ between ranks.
    """
    return _AllReduceBoth.apply(x, group)  # type: ignore[no-any-return]


def gather_last_dim(x: Tensor, rank: int, group: str) -> Tensor:
    """Concatenates the parts of all ranks along the last dimension.

    All ranks compute the same with the result, so each takes its slice of the gradient.
    """
    return _GatherLastDim.apply(x, rank, group)  # type: ignore[no-any-return]


class _CopyToTensorParallel(torch.autograd.Function):
    """Copies forward, all-reduces backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        # Each rank has the gradient from its own rows of the weight.
        return all_reduce(grad_output, ctx.group), None


class _ReduceFromTensorParallel(torch.autograd.Function):
    """All-reduces forward, copies backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        # d(sum)/d(term) is 1, and all ranks have the same gradient of the sum.
        return grad_output, None


class _GatherFromSequenceParallel(torch.autograd.Function):
    """All-gathers forward, reduce-scatters backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        # All ranks have used the gathered tokens, so their gradients are summed.
        return _reduce_scatter(grad_output, ctx.dim, ctx.group), None, None


class _ReduceScatterToSequenceParallel(torch.autograd.Function):
    """Reduce-scatters forward, all-gathers backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, SEQUENCE, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad_output, SEQUENCE, ctx.group), None


class _AllReduceBoth(torch.autograd.Function):
    """All-reduces forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad_output, ctx.group), None


class _GatherLastDim(torch.autograd.Function):
    """All-gathers the last dimension forward, slices backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, group: str) -> Tensor:
        ctx.rank = rank
        ctx.size = x.shape[-1]
        return _all_gather(x, x.dim() - 1, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        # All ranks have the same gradient, so a sum would count it once per rank.
        return grad_output.narrow(-1, ctx.rank * ctx.size, ctx.size), None, None


def all_reduce(tensor: Tensor, group: Any) -> Tensor:
    """Returns the sum over the ranks, a new tensor without a gradient."""
    return run_collective(collectives.all_reduce, tensor.contiguous(), "sum", group=group)


def _all_gather(tensor: Tensor, dim: int, group: Any) -> Tensor:
    """Concatenates the parts of all ranks along `dim`, without a gradient."""
    # The result has a dimension of ranks in front.
    return all_gather(tensor, group).movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(tensor: Tensor, dim: int, group: Any) -> Tensor:
    """Sums over the ranks and returns this rank's part along `dim`, without a gradient."""
    return run_collective(_functional_reduce_scatter, tensor.contiguous(), "sum", dim, group=group)
