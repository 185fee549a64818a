"""Overlapped gradient sums: all-reduces of whole gradients in buckets, each started in the backward pass once its gradients are
there, as torch's DistributedDataParallel does, which takes neither FP8 weights nor float32 gradients of bf16 ones.

Where every rank is to have all gradients: `storage.shard=none`, and zero1 with owners of whole tensors. In pipeline stages each
has a last backward pass of its own, among those of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.numerics.waited_collective import wait
from fp8cfg.training.distributed.traffic import on_ring
from fp8cfg.training.distributed.world import World

FIRST, LATER = 1 << 20, 25 << 20
"""Bytes after which a bucket is full: of the first, which starts early, and of others (DistributedDataParallel's defaults)."""


class Bucket(NamedTuple):
    """Parameters whose gradients are sent together in `dtype`."""

    params: list[nn.Parameter]
    dtype: torch.dtype


class Started(NamedTuple):
    """A sum under way, and the gradients of another dtype than that of their bucket, each with the part that it is to have."""

    others: list[tuple[Tensor, Tensor]]
    work: dist.Work | None


class OverlappedSums:
    """The gradients of parameters, each to be sent in its dtype, over the ranks of `world`. Parameters come in the order of the
    forward pass, and their gradients about in the reverse one; all ranks start buckets in the same order. Each gradient that is
    sent in its own dtype becomes a part of its bucket, so that no memory but one bucket's is taken."""

    def __init__(self, params: Iterable[tuple[nn.Parameter, torch.dtype]], world: World) -> None:
        self.world, self.buckets = world, _buckets(params)
        self.summed = self._last = False
        self._ready: set[nn.Parameter] = set()
        self._started: list[Started] = []
        for bucket in self.buckets:
            for p in bucket.params:
                p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Around the last backward pass of a step: at its end all gradients are summed, and `summed` says so."""
        self.begin()
        self._last = True
        try:
            yield
        finally:
            self._last = False
        self.end()

    def begin(self) -> None:
        """Before the passes of a step."""
        self._ready, self._started, self._last = set(), [], False

    def backward(self, layers: Sequence[nn.Module], first: bool, last: bool) -> None:
        """Before a backward pass through `layers`, which is their `last` or another."""
        self._last = last

    def end(self) -> None:
        """After the passes of a step: all gradients are summed."""
        self._last = False
        for bucket in self.buckets[len(self._started):]:
            self._start(bucket)
        for others, work in self._started:
            if work is not None:
                wait(work, dist.all_reduce, self.world.group)
            for gradient, part in others:
                gradient.copy_(part)
        self._started, self.summed = [], True

    def _arrived(self, p: nn.Parameter) -> None:
        if not self._last:
            return
        self._ready.add(p)
        while len(self._started) < len(self.buckets) and self._ready.issuperset(self.buckets[len(self._started)].params):
            self._start(self.buckets[len(self._started)])

    def _start(self, bucket: Bucket) -> None:
        there = [(p, p.grad) for p in bucket.params if p.grad is not None]
        if not there:
            self._started.append(Started([], None))
            return
        flat, others = there[0][1].new_empty(sum(g.numel() for _, g in there), dtype=bucket.dtype), list[tuple[Tensor, Tensor]]()
        parts = [part.view(p.shape) for (p, _), part in zip(there, torch.split(flat, [g.numel() for _, g in there]), strict=True)]
        torch._foreach_copy_(parts, [g.detach() for _, g in there])  # a cat would have a copy of those of another dtype beside it
        for (p, gradient), part in zip(there, parts, strict=True):
            if gradient.dtype == bucket.dtype:
                p.grad = part
            else:
                others.append((gradient, part))
        self.world.traffic.add("gradients", on_ring(flat, self.world.size))
        self._started.append(Started(others, dist.all_reduce(flat, group=self.world.group, async_op=True)))


def _buckets(params: Iterable[tuple[nn.Parameter, torch.dtype]]) -> list[Bucket]:
    """Buckets in the order in which they are full."""
    full, filling = list[Bucket](), dict[torch.dtype, Bucket]()
    for p, dtype in reversed(list(params)):
        bucket = filling.setdefault(dtype, Bucket([], dtype))
        bucket.params.append(p)
        if sum(q.numel() for q in bucket.params) * dtype.itemsize >= (LATER if full else FIRST):
            full.append(filling.pop(dtype))
    return [*full, *filling.values()]
