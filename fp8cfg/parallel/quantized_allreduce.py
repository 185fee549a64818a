"""Two-hop quantized all-reduce of gradients and broadcast of weights from their owners.

Ranks send encoded values and sum them in float32. Only sums over all ranks in fp32, bf16 or fp16
take one all-reduce in that dtype. An FP8 sum over all ranks takes two hops:

    scales of every tensor        all-gather         one message for all tensors
    codes of each rank's share    all-to-all         a rank receives its share of every gradient
    amaxes of the float32 sums    all-reduce (MAX)   one message for all tensors
    codes of the sums             all-gather

A gradient is rounded twice, for any number of ranks. MS-AMP's NCCL sums FP8 values along the ring
instead. There each rank rounds the sum and needs headroom for it, so errors grow with the number of
ranks. Gradients already stored in FP8 are sent without another conversion.

A scale belongs to a full tensor, although several ranks sum parts of it. If a tensor has an
infinity or NaN on any rank, or its sum overflows float32, codecs with scales turn the full tensor
into NaN on all ranks.

All ranks call these functions at the same points, with tensors of the same shapes and device. A
single rank sends nothing and keeps its tensors.
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
from fp8cfg.parallel.process_group import Kind, ring_bytes

if TYPE_CHECKING:
    from fp8cfg.parallel.process_group import World

# all_gather_single is new in torch 2.13. Remove the fallback when pyproject.toml requires 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

CODECS = ("fp32", "bf16", "fp16", "fp8", "fp8_pow2")
"""Codecs that can send gradients."""
MESSAGE = 32 * 1024 * 1024
"""Most elements of one message, over the shares of all ranks."""


@torch.no_grad()
def sum_over_ranks(tensors: Sequence[Tensor], codec_name: str, world: World) -> None:
    """Sums tensors over the ranks, in place.

    Args:
        tensors: float32, bfloat16 or float16.
        codec_name: fp32, bf16 and fp16 take one all-reduce in that dtype, fp8 and fp8_pow2 two
            hops.
        world: The ranks.

    Raises:
        ValueError: For other codecs.
    """
    codec = _gradient_codec(codec_name)
    if world.size == 1:
        return
    # For a tensor that is not contiguous `reshape` copies, hence _copy_back.
    flats = [tensor.detach().reshape(-1) for tensor in tensors]
    if codec.scaling == "none":
        _all_reduce_flats(flats, codec.format.dtype, world)
    else:
        entries = [_encode(codec, flat) for flat in flats]
        _two_hop_all_reduce(entries, codec, world)
        for flat, entry in zip(flats, entries, strict=True):
            flat.copy_(codec.decode(entry))
    _copy_back(tensors, flats)


@torch.no_grad()
def sum_stored(entries: Sequence[EncodedTensor], codec: Codec, world: World) -> None:
    """Sums encoded tensors over the ranks, in two hops and in place.

    Args:
        entries: Codes and scale of each tensor.
        codec: An FP8 codec with one scale per tensor.
        world: The ranks.

    Raises:
        ValueError: For other codecs.
    """
    _check_stored(codec)
    if world.size > 1:
        _two_hop_all_reduce(entries, codec, world)


@torch.no_grad()
def sum_to_owners(
    tensors: Sequence[Tensor], owners: Sequence[int], codec_name: str, world: World
) -> None:
    """Sums each tensor on one rank, in place, in one hop. Other ranks keep their values.

    Args:
        tensors: float32, bfloat16 or float16.
        owners: The rank of each tensor.
        codec_name: One of CODECS.
        world: The ranks.

    Raises:
        ValueError: For other codecs.
    """
    codec = _gradient_codec(codec_name)
    if world.size == 1:
        return
    flats = [tensor.detach().reshape(-1) for tensor in tensors]
    entries = [_encode(codec, flat) for flat in flats]
    # A rank's share of a message has its own tensors only.
    messages = owned_shares([flat.numel() for flat in flats], owners, world.size)
    for shares, total in _exchange_and_sum(entries, codec, messages, world):
        for (tensor, start, stop), part in _split(shares[world.rank], total):
            flats[tensor][start:stop].copy_(part)
    _copy_back(tensors, flats)


@torch.no_grad()
def sum_stored_to_owners(
    entries: Sequence[EncodedTensor], owners: Sequence[int], codec: Codec, world: World
) -> None:
    """Sums each encoded tensor on one rank, in place. Bits are as in `sum_stored`.

    Args and Raises: See `sum_stored` and `sum_to_owners`.
    """
    _check_stored(codec)
    if world.size == 1 or not entries:
        return
    datas = [_flat(data) for data, *_ in entries]
    messages = owned_shares([data.numel() for data in datas], owners, world.size)
    sums = _exchange_and_sum(entries, codec, messages, world)
    # The owner has the full sum, so its amax needs no collective.
    scales = codec.scale_inv(_compute_amaxes(sums, world.rank, entries))
    for shares, total in sums:
        for (tensor, start, stop), part in _split(shares[world.rank], total):
            codec.write(part, (datas[tensor][start:stop],), scales[tensor])
    for (_, scale_inv), scale, owner in zip(entries, scales, owners, strict=True):
        if owner == world.rank:
            scale_inv.copy_(scale)


@torch.no_grad()
def gather_from_owners(
    entries: Sequence[EncodedTensor], owners: Sequence[int], world: World
) -> None:
    """Copies encoded tensors from the rank that owns each to all others, bit for bit, in place.

    Args:
        entries: Contiguous data and, if the codec has scales, their scales. Any codec and dtype:
            `(parameter.detach(),)` is a parameter that is stored as it is.
        owners: The rank of each tensor.
        world: The ranks.
    """
    if world.size == 1:
        return
    kinds: tuple[Kind, Kind] = ("weights", "scales")
    # Data and scales in separate messages, so that traffic is counted by kind.
    for field, kind in enumerate(kinds):
        tensors = []
        tensor_owners = []
        for entry, owner in zip(entries, owners, strict=True):
            if len(entry) > field:
                tensors.append(entry[field])
                tensor_owners.append(owner)
        _gather_tensors(tensors, tensor_owners, world, kind)


def _gather_tensors(
    tensors: Sequence[Tensor], owners: Sequence[int], world: World, kind: Kind
) -> None:
    """Copies tensors from their owners to all ranks, as bytes, in place."""
    flats = [_bytes(_flat(tensor)) for tensor in tensors]
    for shares in owned_shares([flat.numel() for flat in flats], owners, world.size):
        # An all-gather needs equal sizes: shorter shares are padded.
        sent = flats[0].new_zeros(max(map(count_elements, shares)))
        for (tensor, start, stop), part in _split(shares[world.rank], sent):
            part.copy_(flats[tensor][start:stop])
        for owner, row in enumerate(_all_gather_rows(sent, kind, world)):
            if owner == world.rank:
                continue
            for (tensor, start, stop), part in _split(shares[owner], row):
                flats[tensor][start:stop].copy_(part)


def _all_reduce_flats(flats: Sequence[Tensor], dtype: torch.dtype, world: World) -> None:
    """Sums flat tensors by all-reduces in `dtype`, in place."""
    # One share: messages limit the memory for the copies, but are not split over ranks.
    for (share,) in even_shares([flat.numel() for flat in flats], 1):
        sent = torch.cat([flats[tensor][start:stop].to(dtype) for tensor, start, stop in share])
        total = all_reduce_counted(sent, "gradients", world)
        for (tensor, start, stop), part in _split(share, total):
            flats[tensor][start:stop].copy_(part)


def _two_hop_all_reduce(entries: Sequence[EncodedTensor], codec: Codec, world: World) -> None:
    """Sums encoded tensors with one scale each, in place: codes and scales."""
    if not entries:
        return
    datas = [_flat(data) for data, *_ in entries]
    dtype = codec.format.dtype

    # First hop: this rank gets the float32 sum of its share of each message.
    messages = even_shares([data.numel() for data in datas], world.size)
    sums = _exchange_and_sum(entries, codec, messages, world)

    # Several ranks have parts of one tensor. They share its scale.
    amaxes = _compute_amaxes(sums, world.rank, entries)
    amaxes = all_reduce_counted(amaxes, "scales", world, dist.ReduceOp.MAX)
    scales = codec.scale_inv(amaxes)

    # Second hop: encoded sums go to all ranks.
    for shares, total in sums:
        # An all-gather needs equal sizes: shorter shares are padded.
        sent = total.new_zeros(max(map(count_elements, shares)), dtype=dtype)
        share = shares[world.rank]
        for ((tensor, _, _), part), (_, codes) in zip(
            _split(share, total), _split(share, sent), strict=True
        ):
            codec.write(part, (codes,), scales[tensor])
        rows = _all_gather_rows(_bytes(sent), "gradients", world).view(dtype)
        for share, row in zip(shares, rows, strict=True):
            for (tensor, start, stop), codes in _split(share, row):
                datas[tensor][start:stop].copy_(codes)
    for (_, scale_inv), scale in zip(entries, scales, strict=True):
        scale_inv.copy_(scale)


def _exchange_and_sum(
    entries: Sequence[EncodedTensor],
    codec: Codec,
    messages: Iterable[list[Share]],
    world: World,
) -> Sums:
    """Sends each rank its share of the codes and sums the shares that this rank receives."""
    scales = None
    if codec.scaling != "none" and entries:
        # Each rank has encoded its gradients with its own scales.
        scales = _all_gather_rows(
            torch.stack([scale_inv for _, scale_inv in entries]), "scales", world
        )
    dtype = codec.format.dtype
    sums = []
    for shares in messages:
        segments = [segment for share in shares for segment in share]
        sent = torch.cat(
            [_bytes(_flat(entries[tensor][0])[start:stop]) for tensor, start, stop in segments]
        )
        byte_counts = [count_elements(share) * dtype.itemsize for share in shares]
        received = _all_to_all(sent, byte_counts, "gradients", world)
        share = shares[world.rank]
        rows = received.view(dtype).view(world.size, count_elements(share))
        sums.append((shares, _sum_decoded(codec, share, scales, rows)))
    return sums


def _sum_decoded(codec: Codec, share: Share, scales: Tensor | None, rows: Tensor) -> Tensor:
    """Returns the float32 sum of the codes of one share.

    Args:
        codec: The codec.
        share: The segments.
        scales: [ranks, tensors], None for a codec without scales.
        rows: Codes, [ranks, elements of the share].
    """
    total = torch.empty_like(rows[0], dtype=torch.float32)
    for ((tensor, _, _), codes), (_, out) in zip(
        _split(share, rows), _split(share, total), strict=True
    ):
        # In the order of the ranks: float32 sums depend on it.
        for rank, row in enumerate(codes):
            encoded = (row,) if scales is None else (row, scales[rank, tensor])
            part = codec.decode(encoded)
            out.copy_(part if rank == 0 else out + part)
    return total


def _compute_amaxes(sums: Sums, rank: int, entries: Sequence[EncodedTensor]) -> Tensor:
    """Returns the amax of this rank's part of each tensor, [tensors]. NaN becomes infinity.

    The maximum of NaN and a number may be either, so NaN could get lost in an all-reduce.
    """
    # 0 for tensors without a segment in this rank's share.
    amaxes = [torch.zeros_like(scale_inv) for _, scale_inv in entries]
    for shares, total in sums:
        for (tensor, _, _), part in _split(shares[rank], total):
            amaxes[tensor] = torch.maximum(amaxes[tensor], compute_amax_or_nan(part))
    stacked = torch.stack(amaxes)
    return torch.where(stacked.isfinite(), stacked, math.inf)


class Segment(NamedTuple):
    """Elements `start` to `stop`, flat, of tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


Share = list[Segment]
"""One rank's part of a message."""
Sums = list[tuple[list[Share], Tensor]]
"""The shares of each message, and the float32 sum of this rank's share."""


def count_elements(share: Share) -> int:
    """Returns the number of elements in a share."""
    return sum(segment.stop - segment.start for segment in share)


def even_shares(sizes: Sequence[int], ranks: int) -> Iterator[list[Share]]:
    """Splits tensors into messages, and each message evenly over the ranks.

    Cuts go through tensors. Only the shares of the last ranks may be smaller.

    Args:
        sizes: Elements of each tensor.
        ranks: The number of ranks.

    Yields:
        The share of every rank, for each message.
    """
    row = _Concatenation(sizes, range(len(sizes)))
    for start in range(0, row.end, MESSAGE):
        stop = min(start + MESSAGE, row.end)
        # Rounded up, so that the shares cover the message.
        share_size = math.ceil((stop - start) / ranks)
        cuts = [min(start + rank * share_size, stop) for rank in range(ranks + 1)]
        yield [row.cut(cuts[rank], cuts[rank + 1]) for rank in range(ranks)]


def owned_shares(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> Iterator[list[Share]]:
    """Splits tensors into messages. Each rank's share has elements of its own tensors.

    Args:
        sizes: Elements of each tensor.
        owners: The rank of each tensor.
        ranks: The number of ranks.

    Yields:
        The share of every rank, for each message.
    """
    rows = []
    for rank in range(ranks):
        owned = [tensor for tensor, owner in enumerate(owners) if owner == rank]
        rows.append(_Concatenation(sizes, owned))
    share_size = max(MESSAGE // ranks, 1)
    # Ranks with fewer elements have empty shares in the last messages.
    longest = max((row.end for row in rows), default=0)
    for start in range(0, longest, share_size):
        yield [row.cut(min(start, row.end), min(start + share_size, row.end)) for row in rows]


class _Concatenation:
    """Some tensors, flattened and concatenated."""

    def __init__(self, sizes: Sequence[int], tensors: Sequence[int]) -> None:
        self.tensors = tensors
        self.bounds = [0, *accumulate(sizes[tensor] for tensor in tensors)]
        self.end = self.bounds[-1]

    def cut(self, start: int, stop: int) -> Share:
        """Returns the segments of the elements from `start` to `stop`."""
        share = []
        while start < stop:
            index = bisect_right(self.bounds, start) - 1  # skips empty tensors
            segment_stop = min(stop, self.bounds[index + 1])
            offset = self.bounds[index]
            share.append(Segment(self.tensors[index], start - offset, segment_stop - offset))
            start = segment_stop
        return share


def _split(share: Share, data: Tensor) -> Iterator[tuple[Segment, Tensor]]:
    """Yields each segment of a share with its elements of the last dimension of `data`."""
    offset = 0
    for segment in share:
        count = segment.stop - segment.start
        yield segment, data[..., offset : offset + count]
        offset += count


def all_reduce_counted(
    data: Tensor, kind: Kind, world: World, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """All-reduces `data` in its dtype, in place, and counts the bytes sent. Returns `data`."""
    world.traffic.add(kind, ring_bytes(data, world.size))
    dist.all_reduce(data, op, group=world.group)
    return data


def _all_gather_rows(data: Tensor, kind: Kind, world: World) -> Tensor:
    """Gathers `data`, [numel] on each rank, into [ranks, numel]."""
    world.traffic.add(kind, (world.size - 1) * data.nbytes)
    rows = data.new_empty(world.size * data.numel())
    _all_gather(rows, data, group=world.group)
    return rows.view(world.size, -1)


def _all_to_all(data: Tensor, counts: Sequence[int], kind: Kind, world: World) -> Tensor:
    """Sends `counts[rank]` bytes of `data` to each rank. Returns the bytes received, in order."""
    count = counts[world.rank]
    world.traffic.add(kind, data.nbytes - count)
    received = data.new_empty(world.size * count)
    # Every rank sends this rank's share, so all parts received have `count` bytes.
    dist.all_to_all_single(received, data, [count] * world.size, list(counts), group=world.group)
    return received


def _flat(data: Tensor) -> Tensor:
    """Returns a flat view."""
    return data.detach().view(-1)


def _bytes(flat: Tensor) -> Tensor:
    """Returns a view of the bytes."""
    return flat.view(torch.uint8)


def _encode(codec: Codec, flat: Tensor) -> EncodedTensor:
    """Encodes a flat tensor, without a copy if it has the codec's dtype."""
    if flat.dtype == codec.format.dtype:
        return (flat,)
    entry = codec.zeros(flat.shape, flat.device)
    codec.store(flat, entry)
    return entry


def _copy_back(tensors: Sequence[Tensor], flats: list[Tensor]) -> None:
    """Copies sums into tensors of which `reshape` made a copy instead of a view."""
    for tensor, flat in zip(tensors, flats, strict=True):
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))


def _gradient_codec(name: str) -> Codec:
    """Returns a codec by name. Raises ValueError if it cannot send gradients."""
    if name not in CODECS:
        raise ValueError(f"gradients are sent in {', '.join(CODECS)}, not in {name!r}")
    return get_codec(name)


def _check_stored(codec: Codec) -> None:
    """Raises ValueError unless a codec is FP8 with one scale per tensor."""
    if not codec.per_tensor or codec.format.dtype.itemsize > 1:
        raise ValueError(
            f"codec={codec}: cannot sum encoded tensors; use FP8 with one scale per tensor"
        )
