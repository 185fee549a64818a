"""Weight initialization with values that don't depend on the layout.

The rows of a weight are drawn in blocks. Each block has its own generator state, from the seed, the
parameter's name and the block's number. So a rank draws only the blocks that overlap its rows, and
one seed gives one model: on one rank, split over data-parallel or tensor-parallel ranks, or in
pipeline stages. A rank with some of the columns draws full rows and keeps its columns.

torch's CPU generator uses 32 bits of a seed. Among the hundred thousand blocks of eight billion
parameters two may be equal.
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

BLOCK = 1 << 16
"""Elements of a block of at least one row. Seeding costs as much as some hundred numbers."""
RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class TensorShard:
    """One of several equal parts of a parameter.

    Attributes:
        rank: Number of the part.
        ranks: Number of parts.
        dim: The dimension that is split.
        pieces: Number of concatenated matrices in the parameter, such as gate and up projection.
            The part then has that part of each matrix.
    """

    rank: int
    ranks: int
    dim: int = 0
    pieces: int = 1

    def part(self, full: Tensor) -> Tensor:
        """Returns this part of a full tensor."""
        chunks = [
            piece.chunk(self.ranks, self.dim)[self.rank]
            for piece in full.chunk(self.pieces, self.dim)
        ]
        if self.pieces == 1:
            return chunks[0]  # a view
        return torch.cat(chunks, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the full tensor from the parts of all ranks, in their order."""
        pieces_by_rank = [part.chunk(self.pieces, self.dim) for part in parts]
        chunks = [pieces[piece] for piece in range(self.pieces) for pieces in pieces_by_rank]
        return torch.cat(chunks, self.dim)

    def run(self, shape: Sequence[int]) -> int:
        """Returns how many adjacent elements of a part are adjacent in the full tensor too.

        Args:
            shape: Shape of the part.
        """
        return prod(shape[self.dim :]) // self.pieces

    def boxes(self, length: int) -> Iterator[tuple[int, int, int]]:
        """Yields the range of each piece along the split dimension.

        Args:
            length: Size of the part along that dimension.

        Yields:
            Start and stop in the part, and start in the full tensor.
        """
        size = length // self.pieces
        for piece in range(self.pieces):
            yield piece * size, (piece + 1) * size, (piece * self.ranks + self.rank) * size


def init_parameter(
    out: Tensor,
    name: str,
    config: TransformerConfig,
    seed: int,
    columns: int | None = None,
    offset: tuple[int, ...] = (0, 0),
) -> None:
    """Fills a part of a parameter with its initial values.

    Weights are drawn from normal(0, init_std), as in Megatron. Norms multiply by 1, biases are 0.
    Layers that write into the residual stream have init_std / sqrt(2 * num_layers): the variance of
    the stream then does not grow with the depth.

    Args:
        out: The part, any float dtype and device.
        name: Name of the parameter.
        config: The model's shapes.
        seed: See `draw_normal`.
        columns: See `draw_normal`.
        offset: See `draw_normal`. Vectors ignore it.
    """
    if out.dim() > 1:
        place = (offset[0], offset[1])
        draw_normal(out, init_std(config, name), seed, name, columns, place)
    elif name.endswith(".bias") or config.layernorm_zero_centered_gamma:
        out.fill_(0.0)
    else:
        out.fill_(1.0)


def init_std(config: TransformerConfig, name: str) -> float:
    """Returns the standard deviation of the initial values of the weight `name`."""
    if name.endswith(RESIDUAL_OUTPUTS):
        return config.init_std / math.sqrt(2 * config.num_layers)
    return config.init_std


@torch.no_grad()
def draw_normal(
    out: Tensor,
    std: float,
    seed: int,
    name: str,
    columns: int | None = None,
    offset: tuple[int, int] = (0, 0),
) -> None:
    """Fills a part of a weight from normal(0, `std`), drawn in float32 on the CPU.

    Args:
        out: The part [rows, columns], any float dtype and device.
        std: Standard deviation.
        seed: Seed of the model.
        name: Name of the weight.
        columns: Columns of the full weight. Defaults to the columns of `out`.
        offset: First row and column of the part in the full weight.
    """
    first_row, first_column = offset
    columns = columns or out.shape[1]
    rows_per_block = max(1, BLOCK // columns)
    last_row = first_row + len(out)
    if out.numel() == 0:
        return
    # On the CPU: a GPU draws other numbers.
    generator = torch.Generator("cpu")
    values = torch.empty(rows_per_block, columns, dtype=torch.float32, device="cpu")
    for block in range(first_row // rows_per_block, math.ceil(last_row / rows_per_block)):
        block_start = block * rows_per_block
        generator.manual_seed(block_seed(seed, name, block))
        values.normal_(0.0, std, generator=generator)
        start = max(block_start, first_row)
        stop = min(block_start + rows_per_block, last_row)
        part = values[
            start - block_start : stop - block_start, first_column : first_column + out.shape[1]
        ]
        out[start - first_row : stop - first_row].copy_(part)


def block_seed(seed: int, name: str, block: int) -> int:
    """Returns the seed of a block, 63 bits."""
    digest = hashlib.blake2b(repr((seed, name, block)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def local_parts(
    parameter: Tensor, shard: TensorShard | None = None
) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yields the parts of a parameter that this rank has.

    Args:
        parameter: The parameter. FSDP2 may have split it.
        shard: The part of tensor parallelism that `parameter` is, or None.

    Yields:
        Each part with its offset in the full parameter: one part, or one for each piece of `shard`.
    """
    part, offset = local_part(parameter)
    if shard is None:
        yield part, offset
        return
    dim = shard.dim
    # FSDP2 split the tensor-parallel part again, so the ranges of both intersect.
    part_start = offset[dim]
    part_stop = part_start + part.shape[dim]
    for box_start, box_stop, full_start in shard.boxes(parameter.shape[dim]):
        start, stop = max(box_start, part_start), min(box_stop, part_stop)
        if start < stop:
            full_offset = (*offset[:dim], full_start + start - box_start, *offset[dim + 1 :])
            yield part.narrow(dim, start - part_start, stop - start), full_offset


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Returns this rank's part of a parameter and its offset in the full one.

    The part of a DTensor is its local tensor. Any other tensor is returned as it is.
    """
    dtensor: Any = parameter
    if not hasattr(dtensor, "to_local"):
        return parameter, (0,) * parameter.dim()
    # Imported here because it takes a second to load.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        dtensor.shape, dtensor.device_mesh, dtensor.placements
    )
    return dtensor.to_local(), tuple(offset)
