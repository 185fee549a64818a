"""Two-hop quantized all-reduce of gradients, and gather of weights: encoded values are sent, sums are taken in float32.

An FP8 sum over all ranks takes two hops:

    scales of every tensor       all-gather         one message for all tensors
    codes of each rank's share   all-to-all         a rank receives its share of every rank's gradient
    their float32 sum; its amax  all-reduce MAX     one message for all tensors
    codes of the sum             all-gather

A gradient is rounded twice, however many ranks there are. Where FP8 itself is added up on the way, as MS-AMP's NCCL does, it is
rounded by every rank it passes, and needs headroom for the sum: errors grow with the ranks. Gradients that are already stored
in FP8 are sent as they are.

Scales are those of whole tensors, though their parts are summed by several ranks. A tensor that holds an infinity or NaN on
any rank, or whose sum overflows float32, comes out on all ranks as NaN throughout under a codec with scales. All ranks call
these functions at the same points, with tensors of the same shapes on one device; one rank alone has nothing to send, and its
tensors stay as they are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8cfg.numerics.amax import compute_amax_or_nan
from fp8cfg.numerics.codecs import Codec, EncodedTensor, get_codec
from fp8cfg.parallel.process_group import Kind, on_ring

if TYPE_CHECKING:
    from fp8cfg.parallel.process_group import World

_all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name until torch >= 2.13 is required


def reduced(data: Tensor, kind: Kind, world: World, largest: bool = False) -> Tensor:
    """The sum of `data` over the ranks in its dtype, in place, or the `largest` of each element."""
    world.traffic.add(kind, on_ring(data, world.size))
    dist.all_reduce(data, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=world.group)
    return data


def gathered(data: Tensor, kind: Kind, world: World) -> Tensor:
    """[ranks, numel]: what each rank has given, as many elements as the others."""
    world.traffic.add(kind, (world.size - 1) * data.nbytes)
    back = data.new_empty(world.size * data.numel())
    _all_gather(back, data, group=world.group)
    return back.view(world.size, -1)


def exchanged(data: Tensor, counts: Sequence[int], kind: Kind, world: World) -> Tensor:
    """What each rank has for this one of its `data`, bytes, of which `counts[r]` are for rank r; one behind the other."""
    mine = counts[world.rank]
    world.traffic.add(kind, data.nbytes - mine)
    back = data.new_empty(world.size * mine)
    dist.all_to_all_single(back, data, [mine] * world.size, list(counts), group=world.group)
    return back


MESSAGE = 32 * 1024 * 1024
"""Elements that the shares of all ranks in one message have together, at most."""


class Segment(NamedTuple):
    """Elements `start` to `stop`, flat, of tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


Share = list[Segment]
"""What one rank has of one message."""


def length(share: Share) -> int:
    """Elements of a share."""
    return sum(segment.stop - segment.start for segment in share)


def even_shares(sizes: Sequence[int], ranks: int) -> Iterator[list[Share]]:
    """For each message the share of every rank, where tensors of `tile_shape` elements, one behind the other, are dealt out evenly:
    a tensor may be cut anywhere, and only the shares of the last ranks may be smaller."""
    row = _Row(sizes, range(len(sizes)))
    for start in range(0, row.end, MESSAGE):
        stop = min(start + MESSAGE, row.end)
        part = -(-(stop - start) // ranks)
        yield [
            row.cut(min(start + r * part, stop), min(start + (r + 1) * part, stop))
            for r in range(ranks)
        ]


def owned_shares(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> Iterator[list[Share]]:
    """For each message the share of every rank, where tensor i is wholly that of rank `owners[i]`."""
    rows = [
        _Row(sizes, [i for i, owner in enumerate(owners) if owner == rank]) for rank in range(ranks)
    ]
    part = max(MESSAGE // ranks, 1)
    for start in range(0, max((row.end for row in rows), default=0), part):
        yield [row.cut(min(start, row.end), min(start + part, row.end)) for row in rows]


class _Row:
    """Tensors one behind the other."""

    def __init__(self, sizes: Sequence[int], tensors: Sequence[int]) -> None:
        self.tensors = tensors
        self.bounds = [0, *accumulate(sizes[i] for i in tensors)]
        self.end = self.bounds[-1]

    def cut(self, start: int, stop: int) -> Share:
        share = []
        while start < stop:
            at = bisect_right(self.bounds, start) - 1  # past empty tensors
            upto = min(stop, self.bounds[at + 1])
            share.append(Segment(self.tensors[at], start - self.bounds[at], upto - self.bounds[at]))
            start = upto
        return share


Sums = list[tuple[list[Share], Tensor]]
"""The shares of a message, and the float32 sum of this rank's."""


def all_reduce(flats: Sequence[Tensor], dtype: torch.dtype, world: World) -> None:
    """Sum flat tensors by an all-reduce in `dtype`, in place."""
    for (share,) in even_shares([flat.numel() for flat in flats], 1):
        sent = torch.cat([flats[tensor][start:stop].to(dtype) for tensor, start, stop in share])
        for (tensor, start, stop), part in pieces(share, reduced(sent, "gradients", world)):
            flats[tensor][start:stop].copy_(part)


def two_hop_all_reduce(stored: Sequence[EncodedTensor], c: Codec, world: World) -> None:
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
    stored: Sequence[EncodedTensor],
    owners: Sequence[int],
    c: Codec,
    world: World,
    flats: Sequence[Tensor],
) -> None:
    """Sum stored tensors into `flats`, those that this rank owns."""
    shares_of = owned_shares([data.numel() for data, *_ in stored], owners, world.size)
    for shares, total in _first_hop(stored, c, shares_of, world):
        for (tensor, start, stop), part in pieces(shares[world.rank], total):
            flats[tensor][start:stop].copy_(part)


def reduce_stored_to_owners(
    stored: Sequence[EncodedTensor], owners: Sequence[int], c: Codec, world: World
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
    """The segments of a share with their elements of the last dimension of `data`."""
    at = 0
    for segment in share:
        count = segment.stop - segment.start
        yield segment, data[..., at : at + count]
        at += count


def _first_hop(
    stored: Sequence[EncodedTensor], c: Codec, rounds: Iterable[list[Share]], world: World
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


def _amaxes(sums: Sums, rank: int, stored: Sequence[EncodedTensor]) -> Tensor:
    """The amax of this rank's part of each tensor. NaN becomes infinity: the maximum of NaN and a number may be either."""
    found = [torch.zeros_like(scale_inv) for _, scale_inv in stored]
    for shares, total in sums:
        for (tensor, _, _), part in pieces(shares[rank], total):
            found[tensor] = torch.maximum(found[tensor], compute_amax_or_nan(part))
    amaxes = torch.stack(found)
    return torch.where(amaxes.isfinite(), amaxes, math.inf)


def _flat(data: Tensor) -> Tensor:
    return data.detach().view(-1)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


CODECS = ("fp32", "bf16", "fp16", "fp8", "fp8_pow2")
"""What gradients can be sent in."""


@torch.no_grad()
def sum_over_ranks(tensors: Sequence[Tensor], codec_name: str, world: World) -> None:
    """Add up float32, bfloat16 or float16 tensors over the ranks, in place: fp32, bf16 and fp16 by a plain all-reduce in that
    dtype, fp8 and fp8_pow2 in two hops. Raises ValueError for other codecs."""
    c = _gradient_codec(codec_name)
    if world.size == 1:
        return
    flats = [t.detach().reshape(-1) for t in tensors]
    if c.scaling == "none":
        all_reduce(flats, c.format.dtype, world)
    else:
        stored = [_stored(c, flat) for flat in flats]
        two_hop_all_reduce(stored, c, world)
        for flat, entry in zip(flats, stored, strict=True):
            flat.copy_(c.decode(entry))
    _put_back(tensors, flats)


@torch.no_grad()
def sum_stored(stored: Sequence[EncodedTensor], c: Codec, world: World) -> None:
    """Add up tensors stored under an FP8 codec with one scale a tensor over the ranks, in two hops and in place. Raises
    ValueError for other codecs."""
    _check_stored(c)
    if world.size > 1:
        two_hop_all_reduce(stored, c, world)


@torch.no_grad()
def sum_to_owners(
    tensors: Sequence[Tensor], owners: Sequence[int], codec_name: str, world: World
) -> None:
    """Add up tensors over the ranks, each in place on the rank that `owners` names, in one hop for every codec; on the other
    ranks they keep what they held. Raises ValueError for codecs that gradients cannot be sent in.
    """
    c = _gradient_codec(codec_name)
    if world.size > 1:
        flats = [t.detach().reshape(-1) for t in tensors]
        reduce_to_owners([_stored(c, flat) for flat in flats], owners, c, world, flats)
        _put_back(tensors, flats)


@torch.no_grad()
def sum_stored_to_owners(
    stored: Sequence[EncodedTensor], owners: Sequence[int], c: Codec, world: World
) -> None:
    """The same for tensors stored under an FP8 codec with one scale a tensor; an owner gets the bits that `sum_stored` gives to
    all ranks."""
    _check_stored(c)
    if world.size > 1:
        reduce_stored_to_owners(stored, owners, c, world)


@torch.no_grad()
def gather_from_owners(
    stored: Sequence[EncodedTensor], owners: Sequence[int], world: World
) -> None:
    """Copy stored tensors, data and scales, from the rank that owns each to all others, in place and bit for bit. Any codec and
    any dtype will do; `(p.detach(),)` is a parameter that is stored as it is. Data are contiguous.
    """
    if world.size == 1:
        return
    kinds: tuple[Kind, Kind] = ("weights", "scales")
    for part, kind in enumerate(kinds):
        chosen = [
            (entry[part], owner)
            for entry, owner in zip(stored, owners, strict=True)
            if len(entry) > part
        ]
        gather_owned([t for t, _ in chosen], [owner for _, owner in chosen], world, kind)


def _gradient_codec(name: str) -> Codec:
    if name not in CODECS:
        raise ValueError(f"gradients are sent in {', '.join(CODECS)}, not in {name!r}")
    return get_codec(name)


def _check_stored(c: Codec) -> None:
    if not c.per_tensor or c.format.dtype.itemsize > 1:
        raise ValueError(
            f"tensors stored as {c} are not summed as they are; FP8 with one scale a tensor is"
        )


def _stored(c: Codec, flat: Tensor) -> EncodedTensor:
    if flat.dtype == c.format.dtype:
        return (flat,)
    entry = c.zeros(flat.shape, flat.device)
    c.store(flat, entry)
    return entry


def _put_back(tensors: Sequence[Tensor], flats: list[Tensor]) -> None:
    """Copy what is flat into tensors whose memory is not."""
    for t, flat in zip(tensors, flats, strict=True):
        if not t.is_contiguous():
            t.detach().copy_(flat.view(t.shape))
