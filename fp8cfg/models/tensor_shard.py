"""Tensor shard: the part of a parameter that one tensor-parallel rank has, and where in the whole it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorShard:
    """Part number `rank` of `ranks` equal ones along dimension `dim`. Of a parameter of several `pieces`, matrices one behind the
    other such as gate and up projection, it is that part of each of them."""

    rank: int
    ranks: int
    dim: int = 0
    pieces: int = 1

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        chunks = [
            piece.chunk(self.ranks, self.dim)[self.rank]
            for piece in whole.chunk(self.pieces, self.dim)
        ]
        return torch.cat(chunks, self.dim) if self.pieces > 1 else chunks[0]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of the parts of all ranks, in their order."""
        chunks = [part.chunk(self.pieces, self.dim) for part in parts]
        return torch.cat(
            [of_rank[piece] for piece in range(self.pieces) for of_rank in chunks], self.dim
        )

    def run(self, shape: Sequence[int]) -> int:
        """How many elements of a part of that `shape` stand one behind the other in the whole too."""
        return prod(shape[self.dim :]) // self.pieces

    def boxes(self, length: int) -> Iterator[tuple[int, int, int]]:
        """For each piece where it begins and ends in a part that is `length` long, and where it begins in the whole."""
        size = length // self.pieces
        for piece in range(self.pieces):
            yield piece * size, (piece + 1) * size, (piece * self.ranks + self.rank) * size
