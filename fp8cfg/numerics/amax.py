"""Amax: the largest magnitude of a tensor, of its tiles, and over the ranks that share it.

scaling.py computes scales from amaxes. This file also has the view of a matrix as tiles
(`split_tiles`), `AmaxGroup`, which reduces amaxes if tensor parallelism shards a tensor, and
`keep_overflow` for float16 gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

from fp8cfg.numerics.async_copies import run_collective
from fp8cfg.schema.scalings import Tile


def compute_amax(tensor: Tensor) -> Tensor:
    """Returns the largest magnitude in a tensor, float32 []. NaN is skipped, infinity is not.

    TE's kernels take fmaxf, which skips NaN. Non-finite values are detected on the gradients
    instead. Returns 0 for an empty tensor. The host does not wait for an accelerator.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:  # an expert that received no tokens
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    return replace_nan(tensor.abs()).amax().float()


def compute_amax_or_nan(tensor: Tensor) -> Tensor:
    """Returns the largest magnitude in a tensor, float32 [], or NaN if it has one.

    Returns 0 for an empty tensor.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    low, high = torch.aminmax(tensor)  # unlike abs(), it makes no copy of the tensor
    return torch.maximum(high, -low).float()


def replace_nan(magnitudes: Tensor) -> Tensor:
    """Replaces NaN by 0 in a tensor without negative numbers."""
    return torch.where(magnitudes >= 0, magnitudes, 0)  # a comparison with NaN is false


def record_amax(record: Tensor, amax: Tensor) -> None:
    """Folds `amax`, [], into the running maximum `record`, []. NaN is skipped."""
    if torch.compiler.is_compiling():
        record.copy_(torch.fmax(record, amax))
    else:
        torch.fmax(record, amax, out=record)  # one kernel, without a temporary


def running_max(history: Tensor | None, role: int) -> Tensor | None:
    """Returns the running maximum, float32 [], of one tensor in the amax record of a layer.

    Args:
        history: Amax record, float32 [length, roles]. None records nothing.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
    """
    if history is None:
        return None
    return history[0, role]


def keep_overflow(grad_output: Tensor, *gradients: Tensor) -> None:
    """Makes `gradients` infinite, in place, if the float16 `grad_output` overflowed.

    FP8 saturates and would hide the overflow from torch.amp.GradScaler, which lowers its scale only
    for an infinite gradient.
    """
    lowest, highest = grad_output.aminmax()
    overflowed = lowest.isinf() | highest.isinf()
    for gradient in gradients:
        gradient.masked_fill_(overflowed, torch.inf)


# --- tiles of a matrix


def split_tiles(t: Tensor, tile: Tile) -> Tensor:
    """Returns the matrix `t` [R, C] as [R / r, r, C / c, c] for tiles of r x c.

    Incomplete tiles are padded with zeros. Without padding the result is a view. A tile size of 0
    is the whole dimension.
    """
    rows, columns = t.shape
    r, c = tile_shape(t.shape, tile)
    if rows % r or columns % c:
        t = F.pad(t, (0, -columns % c, 0, -rows % r))
        if torch.compiler.is_compiling():
            t = t.as_strided(t.shape, (t.shape[1], 1))  # see `join_tiles`
    return t.view(t.shape[0] // r, r, t.shape[1] // c, c)


def join_tiles(v: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the contiguous matrix of `shape` from its tiles. The inverse of `split_tiles`."""
    a, r, b, c = v.shape
    # Inductor's C++ code leaves elements of incomplete tiles unwritten if it fuses them with other
    # loops. A tensor that is read by stride is written to memory first. Seen with torch 2.13.
    # Remove it with the first torch that passes the test of few columns without it.
    if torch.compiler.is_compiling() and shape != (a * r, b * c):
        return v.contiguous().as_strided(shape, (b * c, 1))
    return v.reshape(a * r, b * c)[: shape[0], : shape[1]].contiguous()


def tile_shape(shape: tuple[int, ...], tile: Tile) -> Tile:
    """Returns the rows and columns of a tile. A tile size of 0 is the whole dimension."""
    return tile[0] or max(1, shape[0]), tile[1] or max(1, shape[1])


def compute_tile_amax(v: Tensor, keep_nan: bool) -> Tensor:
    """Returns the amax of each tile of `v` [A, r, B, c], float32 [A, 1, B, 1]."""
    magnitudes = v.float().abs()
    if not keep_nan:
        magnitudes = replace_nan(magnitudes)
    return magnitudes.amax((1, 3), keepdim=True)


# --- ranks that share a tensor


class AmaxGroup(NamedTuple):
    """Tensors of a layer that tensor parallelism shards, and the ranks that have their shards.

    Static, so that a compiler specializes on it.

    Attributes:
        split: For each sharded tensor its role and the sharded dimension of the matrix.
        group: Name of the process group.
    """

    split: tuple[tuple[int, int], ...]
    group: str

    @property
    def roles(self) -> tuple[int, ...]:
        """The roles of the sharded tensors."""
        return tuple(role for role, _ in self.split)

    def group_of(self, role: int, tile: Tile | None = None) -> str | None:
        """Returns the group whose ranks share one `tile` of a tensor, or None if tiles are local.

        A tile size of 0 is the whole dimension. A `tile` of None is the whole tensor.
        """
        for sharded_role, dim in self.split:
            if sharded_role == role and (tile is None or tile[dim] == 0):
                return self.group
        return None

    def reduce(self, amax: Tensor, role: int) -> Tensor:
        """Returns the amax of the whole tensor from the amax of this rank's shard.

        All ranks must call it.
        """
        if self.group_of(role) is None:
            return amax
        return all_reduce_max(amax, self.group)

    def exclude(self, roles: tuple[int, ...]) -> AmaxGroup | None:
        """Returns the group without `roles`, or None if no tensor is left."""
        split = tuple((role, dim) for role, dim in self.split if role not in roles)
        if not split:
            return None
        return AmaxGroup(split, self.group)


def sharing_group(amax_group: AmaxGroup | None, role: int, tile: Tile | None = None) -> str | None:
    """Returns `AmaxGroup.group_of`. None without tensor parallelism."""
    if amax_group is None:
        return None
    return amax_group.group_of(role, tile)


def all_reduce_max(t: Tensor, group: Any) -> Tensor:
    """Returns the elementwise maximum over the ranks of a group, a new tensor without gradient."""
    return run_collective(collectives.all_reduce, t.detach(), "max", group=group)


def all_reduce_max_or_nan(t: Tensor, group: Any) -> Tensor:
    """Returns the maximum over the ranks of float32 magnitudes, or NaN if a rank has NaN."""
    # A maximum of floats may skip NaN. As integers, the bits of magnitudes are in the same order,
    # and NaN is above all of them.
    return all_reduce_max(t.detach().view(torch.int32), group).view(torch.float32)
