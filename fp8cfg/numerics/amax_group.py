"""Amax group: the ranks that have parts of one tensor, and quantize them with one scale.

Tensor parallelism splits a layer's weight, and either its input or its output's gradient. The amax of a tensor is then the largest
over its parts, and so is that of each row or column that lies across them: with a scale of its own on each rank the products of the
parts would be those of another model on every layout. Rows, columns and blocks within one part are that rank's alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from fp8cfg.numerics.waited_collective import waited
from fp8cfg.scalings import Tile


class AmaxGroup(NamedTuple):
    """The tensors of a layer that are split, each as its role (INPUT, WEIGHT, GRAD_OUTPUT) and the dimension of the matrix that the
    ranks divide, and the name of the process group that has their parts. Static, so that a compiler specialises on it.
    """

    split: tuple[tuple[int, int], ...]
    group: str

    @property
    def roles(self) -> tuple[int, ...]:
        """The roles of the tensors that are split."""
        return tuple(role for role, _ in self.split)

    def over(self, role: int, tile: Tile | None = None) -> str | None:
        """The group whose ranks have parts of one `tile` of a tensor of `role`, rows and columns of which 0 stands for all; None is
        the whole tensor. None where each rank has whole tiles."""
        return next(
            (
                self.group
                for one, dim in self.split
                if one == role and (tile is None or tile[dim] == 0)
            ),
            None,
        )

    def amax(self, part: Tensor, role: int) -> Tensor:
        """The amax of a tensor of `role` from that of this rank's `part`. All ranks call it at the same points."""
        return largest(part, self.group) if self.over(role) else part

    def without(self, roles: tuple[int, ...]) -> AmaxGroup | None:
        """The group for tensors of other roles, if there are any."""
        left = tuple(one for one in self.split if one[0] not in roles)
        return AmaxGroup(left, self.group) if left else None


def largest(t: Tensor, group: Any) -> Tensor:
    """The elementwise maximum over the ranks of the process group of that name; a new tensor, without a gradient."""
    return waited(collectives.all_reduce, t.detach(), "max", group=group)


def largest_or_nan(t: Tensor, group: Any) -> Tensor:
    """`largest` of float32 numbers that are not negative, NaN where a rank has NaN: by their bits, since a maximum of floats may
    leave NaN out."""
    return largest(t.detach().view(torch.int32), group).view(torch.float32)
