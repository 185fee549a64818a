"""Collectives of tensor parallelism with their gradients, as in Megatron's tensor_parallel/mappings.py.

    enter     copy            backward: sum             the input of a column-parallel layer, whole on every rank
    leave     sum             backward: copy            the output of a row-parallel layer, a share of the sum on each
    gather    all-gather      backward: reduce-scatter  the same two under sequence parallelism, where outside of the layers a rank
    scatter   reduce-scatter  backward: all-gather      has a part of each sequence
    total     sum             backward: sum             a sum of which every rank goes on with all
    join      all-gather      backward: own part        parts along the last dimension, of which every rank goes on with all

All are in the dtype of the tensor, as Megatron's are: the shares of a sum in bfloat16 are rounded before they are added up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from fp8cfg.numerics.async_copies import waited
from fp8cfg.numerics.token_shard import all_gather

SEQUENCE = 1
"""The dimension of tokens in [B, T, C]."""
_reduce_scatter = (
    getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
)  # until torch 2.13


def summed(t: Tensor, group: Any) -> Tensor:
    """The sum over the ranks; a new tensor, without a gradient."""
    return waited(collectives.all_reduce, t.contiguous(), "sum", group=group)


def _gathered(t: Tensor, dim: int, group: Any) -> Tensor:
    return all_gather(t, group).movedim(0, dim).flatten(dim, dim + 1)


def _scattered(t: Tensor, dim: int, group: Any) -> Tensor:
    return waited(_reduce_scatter, t.contiguous(), "sum", dim, group=group)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return summed(g, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return summed(g, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(g, ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _scattered(x, SEQUENCE, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _gathered(g, SEQUENCE, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, group: str) -> Tensor:
        ctx.rank, ctx.size = rank, x.shape[-1]
        return _gathered(x, x.dim() - 1, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g.narrow(-1, ctx.rank * ctx.size, ctx.size), None, None


def enter(x: Tensor, group: str) -> Tensor:
    """`x` itself; its gradients are summed over the ranks."""
    return _Enter.apply(x, group)  # type: ignore[no-any-return]


def leave(x: Tensor, group: str) -> Tensor:
    """The sum of `x` over the ranks, whose gradient is the same on each."""
    return _Leave.apply(x, group)  # type: ignore[no-any-return]


def total(x: Tensor, group: str) -> Tensor:
    """The sum of `x` over the ranks, with which each computes something else: gradients are summed too."""
    return _Total.apply(x, group)  # type: ignore[no-any-return]


def gather(x: Tensor, group: str, dim: int = SEQUENCE) -> Tensor:
    """The ranks' parts one behind the other along `dim`, by default whole sequences, [B, T / ranks, C] -> [B, T, C]; gradients are
    summed to the ranks they belong to."""
    return _Gather.apply(x, dim, group)  # type: ignore[no-any-return]


def scatter(x: Tensor, group: str) -> Tensor:
    """This rank's part of the sum over the ranks, [B, T, C] -> [B, T / ranks, C]."""
    return _Scatter.apply(x, group)  # type: ignore[no-any-return]


def join(x: Tensor, rank: int, group: str) -> Tensor:
    """The ranks' parts one behind the other along the last dimension; what follows is computed alike on every rank."""
    return _Join.apply(x, rank, group)  # type: ignore[no-any-return]
