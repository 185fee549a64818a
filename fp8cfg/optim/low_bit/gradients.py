"""Stored gradients: quantized in a codec, apart from `.grad`, from the backward pass until a step has read them.

A gradient with a scale of the whole tensor takes three launches on a GPU, its amax, the scale and the values, and so do several
together: as they come in a backward pass, small ones wait for the next ones there.

A rank that has a part of a gradient, of FSDP2's once that has summed it, stores that. Parts of one layer wait for one another, for
scales of whole tensors are made of their largest amaxes over the ranks, which one collective finds for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8cfg.numerics.codecs import Codec, EncodedTensor, chunk_ranges
from fp8cfg.optim.low_bit.adam_step import (
    REDUCED,
    compiled_code,
    compiles,
    in_one_piece,
    launch_groups,
    together,
)
from fp8cfg.optim.low_bit.adam_update import ROW
from fp8cfg.optim.low_bit.columns import local

WAITING = 1 << 26
"""Elements of gradients that wait at most: 256 MiB in float32. What is larger takes longer than its launches."""


class StoredGradients:
    """The gradients of the parameters in `codecs`, in `stored` by parameter. `key` gives the random numbers of a parameter's
    rounding, `names` what errors call it. Where parameters are parts `largest` is the elementwise maximum over the ranks that have
    the others, and `groups` has for each those whose gradients are stored with its own."""

    def __init__(
        self, names: Mapping[nn.Parameter, str], key: Callable[[nn.Parameter, str], Tensor]
    ) -> None:
        self.codecs: dict[nn.Parameter, Codec] = {}
        self.stored: dict[nn.Parameter, EncodedTensor] = {}
        self.spent = False
        """Whether a step has read what is stored; the next one takes its place, for a Trainer calls the model's zero_grad, which
        does not know of them."""
        self.largest: Callable[[Tensor], Tensor] | None = None
        self.groups: Mapping[nn.Parameter, Set[nn.Parameter]] = {}
        self._names, self._key = names, key

    def of(self, p: nn.Parameter) -> EncodedTensor | None:
        """The gradient for a step: `.grad`, or the stored one where that is None."""
        return self.stored.get(p) if p.grad is None else (local(p.grad),)

    def store_all(self) -> None:
        """Move each `.grad` that has a codec into `stored`. Raises RuntimeError where there already is one: gradients are summed
        first, and rounded once."""
        self.store([p for p in self.codecs if p.grad is not None])

    @torch.no_grad()
    def store(self, params: Sequence[nn.Parameter], add: Container[nn.Parameter] = ()) -> None:
        """Move the `.grad` of each of `params` into `stored`; those of `add` are added to the gradient stored there."""
        if self.spent and params:
            self.clear()
        for p in params:
            if p in self.stored and p not in add:
                raise RuntimeError(
                    f"the gradient of {self._names[p]} was stored before a backward pass; zero_grad"
                    " comes first"
                )
            if p in self.stored:
                self._gradient(p).add_(self.codecs[p].decode(self.stored[p]))
        scales = self._scales_of_whole([p for p in params if self.codecs[p].per_tensor])
        for group in launch_groups(
            [self._kind(p) for p in params], together(params[0].device) if params else 1
        ):
            self._store_group([params[i] for i in group], scales)

    def _scales_of_whole(self, params: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The inverse scales, [], of the whole gradients of which this rank has shards; empty where it has all of each. NaN becomes
        infinity: the maximum of NaN and a number may be either."""
        if self.largest is None or not params:
            return {}
        shards = [self._gradient(p) for p in params]
        found = torch.stack(
            [
                torch.linalg.vector_norm(g, math.inf) if g.numel() else g.new_zeros(())
                for g in shards
            ]
        )
        known = self.largest(torch.where(found.isfinite(), found, math.inf))
        scales = torch.stack(
            [self.codecs[p].scale_inv(each) for p, each in zip(params, known.unbind(), strict=True)]
        )
        aligned = F.pad(scales[:, None], (0, 3))[:, 0]  # what is not compiled code copies
        return dict(zip(params, aligned.unbind(), strict=True))

    @staticmethod
    def _gradient(p: nn.Parameter) -> Tensor:
        assert p.grad is not None, "asked by the caller"
        return local(p.grad)

    def _kind(self, p: nn.Parameter) -> Hashable:
        """What gradients that are stored together have in common. Without a scale of the whole tensor one launch stores each."""
        codec = self.codecs[p]
        gradient = self._gradient(p)
        return (
            codec if codec.per_tensor else p,
            gradient.dtype,
            in_one_piece(gradient.numel(), codec.block or 1),
        )

    def _store_group(
        self, params: Sequence[nn.Parameter], scales: Mapping[nn.Parameter, Tensor]
    ) -> None:
        codec, values, keys = self.codecs[params[0]], list[Tensor](), list[Tensor | None]()
        for p in params:
            values.append(self._gradient(p))
            keys.append(self._key(p, "grad") if codec.rounding == "stochastic" else None)
        for p, stored in zip(
            params, _encoded(codec, values, keys, [scales.get(p) for p in params]), strict=True
        ):
            self.stored[p], p.grad = stored, None

    @contextmanager
    def storing(self, add: bool) -> Iterator[None]:
        """Context manager for backward passes: gradients are stored soon after they are complete, and at its end; with `add` each
        at once, or with those that it was summed with, added to the gradient stored there."""
        here: set[nn.Parameter] = (
            set()
        )  # reentrant checkpointing of a shared layer brings a gradient in parts
        waiting: dict[nn.Parameter, None] = {}

        def arrived(p: Tensor) -> None:
            assert isinstance(p, nn.Parameter), "hooks are those of parameters"
            waiting[p] = None
            if p in self.groups:
                full = waiting.keys() >= self.groups[p]
            else:
                full = (
                    len(waiting) >= together(p.device)
                    or sum(each.numel() for each in waiting) > WAITING
                    or add
                )
            if full or not self.codecs[p].per_tensor:
                store()

        def store() -> None:
            # A step, or zero_grad, inside of the context has stored or dropped what waited.
            self.store([p for p in waiting if p.grad is not None], self.codecs if add else here)
            here.update(waiting)
            waiting.clear()

        def alone(p: Tensor) -> None:
            if (
                p.grad is not None
                and local(p.grad).untyped_storage().nbytes() > local(p.grad).nbytes
            ):
                p.grad = (
                    p.grad.clone()
                )  # else a norm's shard keeps the memory of all that FSDP2 has summed it with

        watched = self._names if self.codecs else ()  # where none is stored that memory stays
        handles = [
            p.register_post_accumulate_grad_hook(arrived if p in self.codecs else alone)
            for p in watched
        ]
        try:
            yield
            store()
        finally:
            for handle in handles:
                handle.remove()

    def clear(self) -> None:
        """Drop all stored gradients."""
        self.spent = False
        self.stored.clear()


def _encoded(
    codec: Codec,
    values: Sequence[Tensor],
    keys: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
) -> list[EncodedTensor]:
    """`values`, of one float dtype, in `codec`, by the `scales` of whole tensors of which they are parts: on a GPU together, by
    compiled code, else each a piece at a time."""
    if all(compiles(x.device) and in_one_piece(x.numel(), codec.block or 1) for x in values):
        encode = compiled_code(_encode, codec, more=REDUCED if codec.per_tensor else ())
        made = encode([_flat(x.contiguous(), codec) for x in values], keys, scales)
        return [
            (data.view(x.shape), *scale_inv)
            for x, (data, *scale_inv) in zip(values, made, strict=True)
        ]
    found = [codec.zeros(x.shape, x.device) for x in values]
    for x, stored, key, scale_inv in zip(values, found, keys, scales, strict=True):
        codec.store(x, stored, key, scale_inv)
    return found


def _encode(
    codec: Codec,
    values: Sequence[Tensor],
    keys: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
) -> list[EncodedTensor]:
    return [
        codec.encode(x.float(), key, scale_inv)
        for x, key, scale_inv in zip(values, keys, scales, strict=True)
    ]


def _flat(data: Tensor, codec: Codec) -> Tensor:
    """`data` as compiled code takes it: in a flat tensor a compiler cannot tell which elements share a scale."""
    return data.view(-1, codec.block) if codec.block else data.view(-1)


def norms(codecs: Sequence[Codec], stored: Sequence[EncodedTensor]) -> list[Tensor]:
    """The 2-norms of stored tensors, float32 []. On a GPU they are taken together, in few launches: of those with scales the norms
    of rows first, by compiled code."""
    pairs = list(zip(codecs, stored, strict=True))
    rows = {
        i: each[0]
        for i, (codec, each) in enumerate(pairs)
        if codec.scaling == "none" and each[0].is_cuda and each[0].numel()
    }
    scaled = [i for i, (codec, each) in enumerate(pairs) if _in_one(codec, each)]
    kinds = [(codecs[i], stored[i][0].dtype, stored[i][0].numel() % ROW == 0) for i in scaled]
    for group in launch_groups(kinds, together(stored[0][0].device) if stored else 1):
        codec, places = codecs[scaled[group[0]]], [scaled[i] for i in group]
        flat = [(_flat(stored[i][0], codec), *stored[i][1:]) for i in places]
        rows |= zip(places, compiled_code(row_norms, codec, more=REDUCED)(flat), strict=True)
    found = torch._foreach_norm([*rows.values()], 2, torch.float32) if rows else ()
    made = dict(zip(rows, found, strict=True))
    return [made[i] if i in made else norm(codec, t) for i, (codec, t) in enumerate(pairs)]


def _in_one(codec: Codec, stored: EncodedTensor) -> bool:
    """Whether compiled code takes the norms of rows of a stored tensor."""
    data = stored[0]
    return (
        codec.scaling != "none"
        and compiles(data.device)
        and in_one_piece(data.numel(), codec.block or 1)
    )


def row_norms(codec: Codec, stored: Sequence[EncodedTensor]) -> list[Tensor]:
    """The 2-norms, float32 [rows], of rows of ROW elements of each stored tensor, where these divide it, else of the whole."""
    values = [codec.decode(each) for each in stored]
    return [
        torch.linalg.vector_norm(
            x.reshape(-1, ROW) if x.numel() % ROW == 0 else x.reshape(1, -1), dim=1
        )
        for x in values
    ]


def norm(codec: Codec, stored: EncodedTensor) -> Tensor:
    """The 2-norm of a stored tensor, float32 []; decoded a piece at a time."""
    data = stored[0]
    parts = [
        torch.linalg.vector_norm(codec.decode(codec.part(stored, a, b)))
        for a, b in chunk_ranges(data.numel(), data.device)
    ]
    return (
        torch.linalg.vector_norm(torch.stack(parts))
        if parts
        else torch.zeros((), dtype=torch.float32, device=data.device)
    )
