"""Overlapped gradient sums: all-reduces of whole gradients in buckets, each started in the backward pass once its gradients are
there, as torch's DistributedDataParallel does, which takes neither FP8 weights nor float32 gradients of bf16 ones.

Where every rank is to have all gradients: `storage.shard=none`, and zero1 with owners of whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.training.distributed.collectives import Message
from fp8cfg.training.distributed.world import World

FIRST, LATER = 1 << 20, 25 << 20
"""Bytes after which a bucket is full: of the first, which starts early, and of others (DistributedDataParallel's defaults)."""


class Bucket(NamedTuple):
    """Parameters whose gradients are sent together in `dtype`."""

    params: list[nn.Parameter]
    dtype: torch.dtype


class OverlappedSums:
    """The gradients of parameters, each to be sent in its dtype, over the ranks of `world`. Parameters come in the order of the
    forward pass, and their gradients about in the reverse one; all ranks start buckets in the same order. Each gradient that is
    sent in its own dtype becomes a part of its bucket, so that no memory but one bucket's is taken."""

    def __init__(self, params: Iterable[tuple[nn.Parameter, torch.dtype]], world: World) -> None:
        self.world, self.buckets = world, _buckets(params)
        self.summed = False
        self._ready: set[nn.Parameter] | None = None
        self._started: list[tuple[Bucket, Tensor, dist.Work | None]] = []
        for bucket in self.buckets:
            for p in bucket.params:
                p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Around the last backward pass of a step: at its end all gradients are summed, and `summed` says so."""
        self._ready, self._started = set(), []
        try:
            yield
        finally:
            self._ready = None
        for bucket in self.buckets[len(self._started):]:
            self._start(bucket)
        for bucket, flat, work in self._started:
            if work is not None:
                work.wait()
            _hand_out(bucket, flat)
        self._started, self.summed = [], True

    def _arrived(self, p: nn.Parameter) -> None:
        if self._ready is None:
            return
        self._ready.add(p)
        while len(self._started) < len(self.buckets) and self._ready.issuperset(self.buckets[len(self._started)].params):
            self._start(self.buckets[len(self._started)])

    def _start(self, bucket: Bucket) -> None:
        gradients = [p.grad for p in bucket.params if p.grad is not None]
        if not gradients:
            self._started.append((bucket, torch.empty(0), None))
            return
        flat = torch.cat([g.detach().reshape(-1).to(bucket.dtype) for g in gradients])
        if all(g.dtype == bucket.dtype for g in gradients):
            _hand_out(bucket, flat)  # the gradients themselves are free now
        self.world.traffic.count(Message("sum", flat, "gradients"), self.world.rank, self.world.size)
        self._started.append((bucket, flat, dist.all_reduce(flat, group=self.world.group, async_op=True)))


def _buckets(params: Iterable[tuple[nn.Parameter, torch.dtype]]) -> list[Bucket]:
    """Buckets in the order in which they are full."""
    full, filling = list[Bucket](), dict[torch.dtype, Bucket]()
    for p, dtype in reversed(list(params)):
        bucket = filling.setdefault(dtype, Bucket([], dtype))
        bucket.params.append(p)
        if sum(q.numel() for q in bucket.params) * dtype.itemsize >= (LATER if full else FIRST):
            full.append(filling.pop(dtype))
    return [*full, *filling.values()]


@torch.no_grad()
def _hand_out(bucket: Bucket, flat: Tensor) -> None:
    """Let the gradients of a bucket be its parts, or have their numbers where they are of another dtype."""
    there = [p for p in bucket.params if p.grad is not None]
    for p, part in zip(there, torch.split(flat, [p.numel() for p in there]) if there else (), strict=True):
        if p.grad is not None and p.grad.dtype == bucket.dtype:
            p.grad = part.view(p.shape)
        elif p.grad is not None:
            p.grad.copy_(part.view(p.shape))
