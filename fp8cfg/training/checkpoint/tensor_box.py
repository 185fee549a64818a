"""Tensor box: a part of a tensor that one rank has, and where in the whole it stands; which rank writes what several have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fp8cfg.report.memory.owners import owners

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class TensorBox:
    """`tensor`, plain, stands at `offsets` in the tensor `name`, whose whole has `shape`. It is copy number `copy` of `copies`, on
    the ranks along the axes `along`, each of which lists the same boxes along these in the same order. `also` are other names of
    the tensor.

    The layout of a run says nothing else of itself to a checkpoint: whatever splits a model lists the boxes of each rank.
    """

    name: str
    shape: Offsets
    offsets: Offsets
    tensor: Tensor
    copy: int = 0
    copies: int = 1
    along: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


Boxes = list[TensorBox]
Groups = dict[str, Boxes]
"""Boxes by the group of tensors that they belong to: model, optimizer, fp8."""


def to_write(groups: Mapping[str, Sequence[TensorBox]]) -> Groups:
    """The boxes that this rank writes: of those that several ranks have about the same bytes each."""
    alike = defaultdict[tuple[int, int, tuple[str, ...]], list[tuple[str, TensorBox]]](list)
    for group, boxes in groups.items():
        for box in boxes:
            alike[box.copy, box.copies, box.along].append((group, box))
    kept: Groups = {group: [] for group in groups}
    for (copy, copies, _), found in alike.items():
        chosen = owners([box.tensor.nbytes for _, box in found], copies)
        for (group, box), owner in zip(found, chosen, strict=True):
            if owner == copy:
                kept[group].append(box)
    return kept
