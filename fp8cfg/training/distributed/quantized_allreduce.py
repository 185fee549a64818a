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

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8cfg.numerics.codecs import Codec, Stored, codec
from fp8cfg.training.distributed.allreduce_steps import (
    all_reduce,
    gather_owned,
    pieces,
    reduce_stored_to_owners,
    reduce_to_owners,
    two_hop_all_reduce,
)
from fp8cfg.training.distributed.shards import Segment
from fp8cfg.training.distributed.traffic import Kind

if TYPE_CHECKING:
    from fp8cfg.training.distributed.world import World

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
            for (_, start, stop), part in pieces([Segment(0, 0, flat.numel())], flat):
                part.copy_(c.decode(c.part(entry, start, stop)))
    _put_back(tensors, flats)


@torch.no_grad()
def sum_stored(stored: Sequence[Stored], c: Codec, world: World) -> None:
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
    stored: Sequence[Stored], owners: Sequence[int], c: Codec, world: World
) -> None:
    """The same for tensors stored under an FP8 codec with one scale a tensor; an owner gets the bits that `sum_stored` gives to
    all ranks."""
    _check_stored(c)
    if world.size > 1:
        reduce_stored_to_owners(stored, owners, c, world)


@torch.no_grad()
def gather_from_owners(stored: Sequence[Stored], owners: Sequence[int], world: World) -> None:
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
    return codec(name)


def _check_stored(c: Codec) -> None:
    if not c.per_tensor or c.format.dtype.itemsize > 1:
        raise ValueError(
            f"tensors stored as {c} are not summed as they are; FP8 with one scale a tensor is"
        )


def _stored(c: Codec, flat: Tensor) -> Stored:
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
