"""Steps of the quantized all-reduce and of the weight gather on one rank; quantized_allreduce.py has the algorithm.

Stored tensors are worked on flat, and by shares. Sums are float32 and go in the order of the ranks, and a rank's own part is
rounded like any other: who sums what changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8cfg.numerics.codecs import CHUNK, Codec, Stored
from fp8cfg.numerics.exact_float32 import largest
from fp8cfg.training.distributed.collectives import exchanged, gathered, reduced
from fp8cfg.training.distributed.shards import Segment, Share, even_shares, length, owned_shares
from fp8cfg.training.distributed.traffic import Kind

if TYPE_CHECKING:
    from fp8cfg.training.distributed.world import World

Sums = list[tuple[list[Share], Tensor]]
"""The shares of a message, and the float32 sum of this rank's."""


def all_reduce(flats: Sequence[Tensor], dtype: torch.dtype, world: World) -> None:
    """Sum flat tensors by an all-reduce in `dtype`, in place."""
    for (share,) in even_shares([flat.numel() for flat in flats], 1):
        sent = torch.cat([flats[tensor][start:stop].to(dtype) for tensor, start, stop in share])
        for (tensor, start, stop), part in pieces(share, reduced(sent, "gradients", world)):
            flats[tensor][start:stop].copy_(part)


def two_hop_all_reduce(stored: Sequence[Stored], c: Codec, world: World) -> None:
    """Sum stored tensors that have a scale each, in place: codes and scales."""
    if not stored:
        return
    datas = [_flat(data) for data, *_ in stored]
    sums = _first_hop(stored, c, even_shares([data.numel() for data in datas], world.size), world)
    scales = c.scale_inv(reduced(_amaxes(sums, world.rank, stored), "scales", world, largest=True))
    for shares, total in sums:
        sent = total.new_zeros(max(map(length, shares)), dtype=c.format.dtype)
        own = shares[world.rank]
        for ((tensor, _, _), part), (_, codes) in zip(
            pieces(own, total), pieces(own, sent), strict=True
        ):
            c.write(part, (codes,), scales[tensor])
        for share, row in zip(
            shares, gathered(_bytes(sent), "gradients", world).view(c.format.dtype), strict=True
        ):
            for (tensor, start, stop), codes in pieces(share, row):
                datas[tensor][start:stop].copy_(codes)
    for (_, scale_inv), scale in zip(stored, scales, strict=True):
        scale_inv.copy_(scale)


def reduce_to_owners(
    stored: Sequence[Stored], owners: Sequence[int], c: Codec, world: World, flats: Sequence[Tensor]
) -> None:
    """Sum stored tensors into `flats`, those that this rank owns."""
    shares_of = owned_shares([data.numel() for data, *_ in stored], owners, world.size)
    for shares, total in _first_hop(stored, c, shares_of, world):
        for (tensor, start, stop), part in pieces(shares[world.rank], total):
            flats[tensor][start:stop].copy_(part)


def reduce_stored_to_owners(
    stored: Sequence[Stored], owners: Sequence[int], c: Codec, world: World
) -> None:
    """Sum stored tensors that have a scale each, in place, those that this rank owns."""
    if not stored:
        return
    sums = _first_hop(
        stored, c, owned_shares([data.numel() for data, *_ in stored], owners, world.size), world
    )
    scales = c.scale_inv(_amaxes(sums, world.rank, stored))
    for shares, total in sums:
        for (tensor, start, stop), part in pieces(shares[world.rank], total):
            c.write(part, (_flat(stored[tensor][0])[start:stop],), scales[tensor])
    for (_, scale_inv), scale, owner in zip(stored, scales, owners, strict=True):
        if owner == world.rank:
            scale_inv.copy_(scale)


def gather_owned(
    tensors: Sequence[Tensor], owners: Sequence[int], world: World, kind: Kind
) -> None:
    """Copy tensors of any dtype from their owners to the other ranks."""
    flats = [_bytes(_flat(t)) for t in tensors]
    for shares in owned_shares([flat.numel() for flat in flats], owners, world.size):
        sent = flats[0].new_zeros(max(map(length, shares)))
        for (tensor, start, stop), part in pieces(shares[world.rank], sent):
            part.copy_(flats[tensor][start:stop])
        for owner, row in enumerate(gathered(sent, kind, world)):
            for (tensor, start, stop), part in pieces(
                shares[owner] if owner != world.rank else [], row
            ):
                flats[tensor][start:stop].copy_(part)


def pieces(share: Share, data: Tensor) -> Iterator[tuple[Segment, Tensor]]:
    """The segments of a share, cut to what a CPU's caches hold, with their elements of the last dimension of `data`."""
    at = 0
    for tensor, first, last in share:
        step = CHUNK if data.device.type == "cpu" else max(last - first, 1)
        for start in range(first, last, step):
            stop = min(start + step, last)
            yield Segment(tensor, start, stop), data[..., at : at + stop - start]
            at += stop - start


def _first_hop(
    stored: Sequence[Stored], c: Codec, rounds: Iterable[list[Share]], world: World
) -> Sums:
    """Every rank gets its share of what all have, codes as they are, and adds up what they stand for."""
    scales = None
    if c.scaling != "none" and stored:
        scales = gathered(torch.stack([scale_inv for _, scale_inv in stored]), "scales", world)
    sums = []
    for shares in rounds:
        sent = torch.cat(
            [
                _bytes(_flat(stored[tensor][0])[start:stop])
                for share in shares
                for tensor, start, stop in share
            ]
        )
        counts = [length(share) * c.format.dtype.itemsize for share in shares]
        rows = (
            exchanged(sent, counts, "gradients", world)
            .view(c.format.dtype)
            .view(world.size, length(shares[world.rank]))
        )
        sums.append((shares, _added_up(c, shares[world.rank], scales, rows)))
    return sums


def _added_up(c: Codec, share: Share, scales: Tensor | None, rows: Tensor) -> Tensor:
    """The float32 sum of `rows`, the codes of one share by every rank; `scales` are [ranks, tensors]."""
    total = torch.empty_like(rows[0], dtype=torch.float32)
    for ((tensor, _, _), codes), (_, out) in zip(
        pieces(share, rows), pieces(share, total), strict=True
    ):
        for rank, row in enumerate(codes):
            part = c.decode((row,) if scales is None else (row, scales[rank, tensor]))
            out.copy_(part if rank == 0 else out + part)
    return total


def _amaxes(sums: Sums, rank: int, stored: Sequence[Stored]) -> Tensor:
    """The amax of this rank's part of each tensor. NaN becomes infinity: the maximum of NaN and a number may be either."""
    found = [torch.zeros_like(scale_inv) for _, scale_inv in stored]
    for shares, total in sums:
        for (tensor, _, _), part in pieces(shares[rank], total):
            found[tensor] = torch.maximum(found[tensor], largest(part))
    amaxes = torch.stack(found)
    return torch.where(amaxes.isfinite(), amaxes, math.inf)


def _flat(data: Tensor) -> Tensor:
    return data.detach().view(-1)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)
