"""Shards of parameters: a rank's part of a tensor that FSDP2 splits by rows, whose state is encoded as those elements of the whole.

Blocks that share a scale are of flat elements. Where each shard is whole blocks they are those of the unsharded tensor, and so are
the numbers of stochastic rounding, which go by the place of an element; a scale of a whole tensor is of the largest amax over the
shards. Where a cut goes through blocks (a norm's vector over many ranks, uneven rows) moments stay in float32.
"""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor

from fp8cfg.numerics.codecs import Codec
from fp8cfg.optim.low_bit.columns import Columns

FLOAT32 = Columns()
"""Everything in float32."""


def local(t: Tensor) -> Tensor:
    """The plain tensor in the memory of this rank that `t` is, or is a part of."""
    here: Any = t.to_local() if hasattr(t, "to_local") else t
    inner: Tensor = getattr(here, "_tensor", here)  # of a shard that is gathered in FP8
    return inner


def first_element(p: Tensor) -> int:
    """The place, flat, of the first element of this rank's part in the whole of `p`."""
    if not hasattr(p, "placements"):
        return 0
    _, ranks, rank = _split(p)
    rows = p.shape[0]
    return min(rank * -(-rows // ranks), rows) * (p.numel() // max(1, rows))


def fits(shape: Size | tuple[int, ...], ranks: int, block: int) -> bool:
    """Whether each of `ranks` shards of a tensor of `shape` is whole blocks of so many flat elements, and as many as the others."""
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0] % ranks == 0 and (shape[0] // ranks * columns) % block == 0


def columns_of_shard(columns: Columns, p: Tensor) -> Columns:
    """`columns` for the state of a shard of `p`, which is its own master: moments in blocks are float32 where shards would cut
    these."""
    columns = columns._replace(weight=FLOAT32.weight, master=None, grad=None)
    _, ranks, _ = _split(p)
    kept = {m: FLOAT32.exp_avg for m in ("exp_avg", "exp_avg_sq")
            if (block := getattr(columns, m).block) and not fits(p.shape, ranks, block)}
    return columns._replace(**kept)


def of_shards(part: Tensor, p: Tensor, data: bool) -> Tensor:
    """What this rank has of a tensor of the state of `p`, as a part of the whole: its `data`, or the scales of its blocks."""
    if not hasattr(p, "placements") or not part.dim():
        return part
    import torch
    from torch.distributed.tensor import DTensor

    mesh, ranks, _ = _split(p)
    whole = torch.empty(p.shape if data else (part.shape[0] * ranks, *part.shape[1:]), device="meta")
    return DTensor.from_local(part, mesh, p.placements, run_check=False, shape=whole.shape, stride=whole.stride())


def decoded_part(codec: Codec, data: Tensor, scales: Tensor, first: int) -> Tensor:
    """The float32 values of `data`, elements from `first` on of a tensor whose blocks have `scales`."""
    before, flat = first % codec.block, data.reshape(-1)
    padded = flat.new_zeros(before + flat.numel())
    padded[before:] = flat
    here = scales[first // codec.block: -(-(first + flat.numel()) // codec.block)]
    return codec.decode((padded, here))[before:].view(data.shape) if flat.numel() else data.float()


def _split(p: Any) -> tuple[Any, int, int]:
    """The mesh of a split tensor, the ranks that have its shards, and the number of this one."""
    mesh = p.device_mesh
    axis = mesh.ndim - 1
    return mesh, mesh.size(axis), mesh.get_local_rank(axis)
