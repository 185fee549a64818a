"""Amax group: the ranks that have parts of one tensor, and quantize them with one scale.

Tensor parallelism splits a layer's weight, and either its input or its output's gradient. The amax of a tensor is then the largest
over its parts: with a scale of its own on each rank the products of the parts would be those of another model on every layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed._functional_collectives as collectives
from torch import Tensor

from fp8cfg.numerics.waited_collective import waited


class AmaxGroup(NamedTuple):
    """The roles (INPUT, WEIGHT, GRAD_OUTPUT) of the tensors of a layer that are split, and the name of the process group that has
    their parts. Static, so that a compiler specialises on it."""

    roles: tuple[int, ...]
    group: str

    def amax(self, part: Tensor, role: int) -> Tensor:
        """The amax of a tensor of `role` from that of this rank's `part`. All ranks call it at the same points."""
        return largest(part, self.group) if role in self.roles else part

    def without(self, roles: tuple[int, ...]) -> AmaxGroup | None:
        """The group for tensors of other roles, if there are any."""
        left = tuple(role for role in self.roles if role not in roles)
        return AmaxGroup(left, self.group) if left else None


def largest(t: Tensor, group: Any) -> Tensor:
    """The elementwise maximum over the ranks of the process group of that name; a new tensor, without a gradient."""
    return waited(collectives.all_reduce, t.detach(), "max", group=group)
