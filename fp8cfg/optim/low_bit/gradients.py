"""Stored gradients: quantized outside of `.grad`, from the backward pass until a step reads them.

On a GPU a gradient with a per-tensor scale needs three launches: its amax, the scale and the
values. Several gradients together need as many. Small gradients of a backward pass therefore wait
for the next ones.

A rank with a shard of a gradient stores the shard, once FSDP2 has reduced it. Per-tensor scales
need the largest amax over all ranks. Shards of a layer wait for each other, so that one collective
finds all their amaxes.
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
"""Largest number of waiting elements, 256 MiB in float32. Beyond it launches cost little."""


class StoredGradients:
    """The stored gradients of an optimizer.

    Args:
        names: Names of the parameters, for errors.
        key: Returns the random key for rounding the gradient of a parameter.

    Attributes:
        codecs: Codecs of the parameters with stored gradients.
        stored: Stored gradients.
        spent: Whether a step has read them. New gradients then replace them.
        largest: Elementwise maximum over the ranks that share parameters, or None.
        groups: Parameters whose gradients are stored together, for each parameter.
    """

    def __init__(
        self, names: Mapping[nn.Parameter, str], key: Callable[[nn.Parameter, str], Tensor]
    ) -> None:
        self.codecs: dict[nn.Parameter, Codec] = {}
        self.stored: dict[nn.Parameter, EncodedTensor] = {}
        # transformers.Trainer calls zero_grad of the model, which does not clear stored gradients.
        self.spent = False
        self.largest: Callable[[Tensor], Tensor] | None = None
        self.groups: Mapping[nn.Parameter, Set[nn.Parameter]] = {}
        self._names, self._key = names, key

    def of(self, p: nn.Parameter) -> EncodedTensor | None:
        """Returns the gradient for a step: `.grad`, or the stored one, or None."""
        return self.stored.get(p) if p.grad is None else (local(p.grad),)

    def store_all(self) -> None:
        """Stores each `.grad` that has a codec.

        Raises:
            RuntimeError: A gradient is stored already. Gradients are summed first and rounded once.
        """
        self.store([p for p in self.codecs if p.grad is not None])

    @torch.no_grad()
    def store(self, params: Sequence[nn.Parameter], add: Container[nn.Parameter] = ()) -> None:
        """Stores the `.grad` of parameters and clears it.

        Args:
            params: The parameters.
            add: Parameters whose stored gradient is added first.

        Raises:
            RuntimeError: A gradient is stored already, and `add` does not have its parameter.
        """
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
        """Returns the inverse scales [] of full gradients from this rank's shards.

        Empty if this rank has full gradients.
        """
        if self.largest is None or not params:
            return {}
        shards = [self._gradient(p) for p in params]
        found = torch.stack(
            [
                torch.linalg.vector_norm(g, math.inf) if g.numel() else g.new_zeros(())
                for g in shards
            ]
        )
        # The maximum of NaN and a number may be either, so NaN becomes infinity.
        known = self.largest(torch.where(found.isfinite(), found, math.inf))
        scales = torch.stack(
            [self.codecs[p].scale_inv(each) for p, each in zip(params, known.unbind(), strict=True)]
        )
        aligned = F.pad(scales[:, None], (0, 3))[:, 0]  # Inductor copies unaligned inputs
        return dict(zip(params, aligned.unbind(), strict=True))

    @staticmethod
    def _gradient(p: nn.Parameter) -> Tensor:
        """Returns this rank's tensor of `.grad`."""
        assert p.grad is not None, "asked by the caller"
        return local(p.grad)

    def _kind(self, p: nn.Parameter) -> Hashable:
        """Returns an equal key for gradients of the same launch.

        Without a per-tensor scale each gradient needs one launch anyway.
        """
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
        """Stores gradients of one kind."""
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
        """Context for backward passes: stores gradients soon after they are complete.

        Args:
            add: Whether to add each gradient to the stored one, in every backward pass.
        """
        # Parameters that were stored in this context. With reentrant checkpointing a shared layer
        # gets its gradient in several parts, which are added.
        here: set[nn.Parameter] = set()
        waiting: dict[nn.Parameter, None] = {}

        def arrived(p: Tensor) -> None:
            """Stores waiting gradients if there are enough of them, or if a group is complete."""
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
            """Copies a gradient out of a larger buffer."""
            if (
                p.grad is not None
                and local(p.grad).untyped_storage().nbytes() > local(p.grad).nbytes
            ):
                # FSDP2 reduces several gradients in one buffer. A view of a small gradient would
                # keep the memory of all of them.
                p.grad = p.grad.clone()

        # If no gradient is stored, the buffer is in use anyway.
        watched = self._names if self.codecs else ()
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
        """Drops all stored gradients."""
        self.spent = False
        self.stored.clear()


def _encoded(
    codec: Codec,
    values: Sequence[Tensor],
    keys: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
) -> list[EncodedTensor]:
    """Encodes tensors of one float dtype: on a GPU together in compiled code, otherwise in pieces.

    Args:
        codec: The codec.
        values: The tensors.
        keys: Random keys for stochastic rounding.
        scales: Per-tensor scales of shards. None computes the scale.
    """
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
    """Encodes tensors. Compiled."""
    return [
        codec.encode(x.float(), key, scale_inv)
        for x, key, scale_inv in zip(values, keys, scales, strict=True)
    ]


def _flat(data: Tensor, codec: Codec) -> Tensor:
    """Returns `data` in the shape for compiled code: [blocks, block] or flat.

    In a flat tensor the compiler cannot tell which elements share a scale.
    """
    return data.view(-1, codec.block) if codec.block else data.view(-1)


def norms(codecs: Sequence[Codec], stored: Sequence[EncodedTensor]) -> list[Tensor]:
    """Returns the 2-norms of stored tensors, float32 [] each.

    On a GPU a few launches compute all of them. Compiled code first computes norms of rows for
    tensors with scales.
    """
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
    # The norm of the norms of rows is the norm of the tensor.
    found = torch._foreach_norm([*rows.values()], 2, torch.float32) if rows else ()
    made = dict(zip(rows, found, strict=True))
    return [made[i] if i in made else norm(codec, t) for i, (codec, t) in enumerate(pairs)]


def _in_one(codec: Codec, stored: EncodedTensor) -> bool:
    """Whether compiled code computes the row norms of a stored tensor."""
    data = stored[0]
    return (
        codec.scaling != "none"
        and compiles(data.device)
        and in_one_piece(data.numel(), codec.block or 1)
    )


def row_norms(codec: Codec, stored: Sequence[EncodedTensor]) -> list[Tensor]:
    """Returns the 2-norms of rows of ROW elements of each stored tensor, float32 [rows].

    A tensor that ROW does not divide is a single row.
    """
    values = [codec.decode(each) for each in stored]
    return [
        torch.linalg.vector_norm(
            x.reshape(-1, ROW) if x.numel() % ROW == 0 else x.reshape(1, -1), dim=1
        )
        for x in values
    ]


def norm(codec: Codec, stored: EncodedTensor) -> Tensor:
    """Returns the 2-norm of a stored tensor, float32 []. Decodes a piece at a time."""
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
