"""Weight initialization: random numbers of a parameter, block of rows by block, the same whoever draws them.

Each block of a weight's rows has a generator state of its own, of the seed, the parameter's name and the block's number. So a rank
draws the rows that it has and no more than two blocks beside, and one seed gives one model whatever the layout: whole on every
rank, split over data-parallel or tensor-parallel ranks, or a pipeline stage. A rank that has columns draws whole rows and keeps its
own.

Torch's generator on a CPU keeps 32 bits of a seed: among the hundred thousand blocks of eight billion parameters two may be alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fp8cfg.models.config import TransformerConfig


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


BLOCK = 1 << 16
"""Elements of a block, at least one row. Seeding costs as much as drawing some hundred numbers."""
RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


def fill_first(
    out: Tensor,
    name: str,
    config: TransformerConfig,
    seed: int,
    columns: int | None = None,
    first: tuple[int, ...] = (0, 0),
    device: str = "cpu",
) -> None:
    """Fill `out` with what the parameter `name` of a Transformer of `config` has from `first` on: norms so that they multiply by 1,
    biases with 0, weights from normal(0, init_std), as Megatron; the other arguments are those of `draw_normal`.

    Layers that write into the residual stream are scaled by 1 / sqrt(2 * num_layers), so that its variance does not grow with
    depth."""
    if out.dim() == 1:
        out.fill_(0.0 if name.endswith(".bias") or config.layernorm_zero_centered_gamma else 1.0)
    else:
        draw_normal(out, init_std(config, name), seed, name, columns, (first[0], first[1]), device)


def init_std(config: TransformerConfig, name: str) -> float:
    """The standard deviation of the first values of a weight."""
    return (
        config.init_std / math.sqrt(2 * config.num_layers)
        if name.endswith(RESIDUAL_OUTPUTS)
        else config.init_std
    )


@torch.no_grad()
def draw_normal(
    out: Tensor,
    std: float,
    seed: int,
    name: str,
    columns: int | None = None,
    first: tuple[int, int] = (0, 0),
    device: str = "cpu",
) -> None:
    """Fill `out` [r, c], of any floating dtype and device, from normal(0, `std`): with the rows and columns from `first` on of the
    parameter `name`, which has as many `columns`, by default those of `out`. Numbers are drawn in float32 on `device`; those of a
    GPU are others than those of a CPU."""
    row, column = first
    columns = columns or out.shape[1]
    rows = max(1, BLOCK // columns)
    generator = torch.Generator(device)
    drawn = torch.empty(rows, columns, dtype=torch.float32, device=device)
    last = row + len(out)
    for block in range(row // rows, -(-last // rows)) if out.numel() else ():
        at = block * rows
        generator.manual_seed(block_seed(seed, name, block))
        drawn.normal_(0.0, std, generator=generator)
        start, stop = max(at, row), min(at + rows, last)
        out[start - row : stop - row].copy_(
            drawn[start - at : stop - at, column : column + out.shape[1]]
        )


def block_seed(seed: int, name: str, block: int) -> int:
    """The seed of a block, 63 bits."""
    digest = hashlib.blake2b(repr((seed, name, block)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def local_parts(
    parameter: Tensor, shard: TensorShard | None = None
) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The boxes of a parameter that this rank has, each with its place in the whole: one, or one for each piece of a tensor
    `shard`, which may itself be split by FSDP2."""
    part, first = local_part(parameter)
    if shard is None:
        yield part, first
        return
    dim, begins = shard.dim, first[shard.dim]
    for start, stop, at in shard.boxes(parameter.shape[dim]):
        low, high = max(start, begins), min(stop, begins + part.shape[dim])
        if low < high:
            place = (*first[:dim], at + low - start, *first[dim + 1 :])
            yield part.narrow(dim, low - begins, high - low), place


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter, and where in the whole it begins: of a DTensor the local tensor, or else all of it."""
    whole: Any = parameter
    if not hasattr(whole, "to_local"):
        return parameter, (0,) * parameter.dim()
    from torch.distributed.tensor._utils import (
        compute_local_shape_and_global_offset,
    )  # inside: it takes a second to load

    _, first = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    return whole.to_local(), tuple(first)
