"""Shards of parameters: a rank's part of a tensor that FSDP2 splits by rows, or tensor parallelism by rows or columns, whose state
is encoded as those elements of the whole.

Blocks that share a scale are of flat elements. Where each part is whole blocks they are those of the whole tensor, and so are the
numbers of stochastic rounding, which go by the place of an element; a scale of a whole tensor is of the largest amax over the
parts. Where a cut goes through blocks (a norm's vector over many ranks, uneven rows, narrow columns) moments and gradients stay in
float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Size, Tensor

from fp8cfg.numerics.codecs import Codec
from fp8cfg.numerics.shard_scales import first_row
from fp8cfg.numerics.stochastic_rounding import Start, Strided, elements
from fp8cfg.optim.low_bit.columns import Columns

FLOAT32 = Columns()
"""Everything in float32."""


def local(t: Tensor) -> Tensor:
    """The plain tensor in the memory of this rank that `t` is, or is a part of."""
    here: Any = t.to_local() if hasattr(t, "to_local") else t
    inner: Tensor = getattr(here, "_tensor", here)  # of a shard that is gathered in FP8
    return inner


def first_element(p: Tensor, part: Strided | None) -> Start:
    """The place, flat, of the first element of this rank's shard in the whole of `p`, which is a `part` of a tensor where tensor
    parallelism splits that."""
    first = 0
    if hasattr(p, "placements"):
        _, ranks, rank = _split(p)
        first = first_row(p.shape[0], ranks, rank) * (p.numel() // max(1, p.shape[0]))
    return first if part is None else part._replace(start=first)


def fits(shape: Size | tuple[int, ...], ranks: int, block: int) -> bool:
    """Whether each of `ranks` shards of a tensor of `shape` is whole blocks of so many flat elements, and as many as the others; or
    the whole tensor."""
    if ranks == 1:
        return True
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0] % ranks == 0 and (shape[0] // ranks * columns) % block == 0


def columns_of_shard(columns: Columns, p: Tensor, part: Strided | None) -> Columns:
    """`columns` for the state of this rank's shard of `p`, a `part` of a tensor where tensor parallelism splits that: moments and
    gradients in blocks are float32 where cuts would go through these. A shard of FSDP2 is its own master.
    """
    if by_rows := hasattr(p, "placements"):
        columns = columns._replace(weight=FLOAT32.weight, master=None)

    def cut(block: int) -> bool:
        return bool(part and part.run % block) or (
            by_rows and not fits(p.shape, _split(p)[1], block)
        )

    if columns.grad is not None and columns.grad.block and cut(columns.grad.block):
        columns = columns._replace(grad=None)
    kept = {
        m: FLOAT32.exp_avg
        for m in ("exp_avg", "exp_avg_sq")
        if (block := getattr(columns, m).block) and cut(block)
    }
    return columns._replace(**kept)


def of_shards(part: Tensor, p: Tensor, data: bool) -> Tensor:
    """What this rank has of a tensor of the state of `p`, as a part of the whole: its `data`, or the scales of its blocks."""
    if not hasattr(p, "placements") or not part.dim():
        return part
    import torch
    from torch.distributed.tensor import DTensor

    mesh, ranks, _ = _split(p)
    whole = torch.empty(
        p.shape if data else (part.shape[0] * ranks, *part.shape[1:]),
        dtype=part.dtype,
        device="meta",
    )
    return DTensor.from_local(
        part, mesh, p.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def decoded_part(codec: Codec, data: Tensor, scales: Tensor, first: Start) -> Tensor:
    """The float32 values of `data`, elements from `first` on of a tensor whose blocks have `scales`."""
    of_each = scales[elements(first, data.numel(), data.device, torch.int64) // codec.block]
    return replace(codec, block=1).decode((data.reshape(-1), of_each)).view(data.shape)


def _split(p: Any) -> tuple[Any, int, int]:
    """The mesh of a split tensor, the ranks that have its shards, and the number of this one."""
    mesh = p.device_mesh
    axis = mesh.ndim - 1
    return mesh, mesh.size(axis), mesh.get_local_rank(axis)
