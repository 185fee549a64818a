"""Stored gradients: quantized in a codec, apart from `.grad`, from the backward pass until a step has read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp8cfg.numerics.codecs import Codec, Stored, spans
from fp8cfg.optim.low_bit.adam_step import ROW
from fp8cfg.optim.low_bit.compiled_code import REDUCED, compiled_code, compiles, in_one_piece, launch_groups, together
from fp8cfg.optim.low_bit.shards import local


class StoredGradients:
    """The gradients of the parameters in `codecs`, in `stored` by parameter. `key` gives the random numbers of a parameter's
    rounding, `names` what errors call it."""

    def __init__(self, names: Mapping[nn.Parameter, str], key: Callable[[nn.Parameter, str], Tensor]) -> None:
        self.codecs: dict[nn.Parameter, Codec] = {}
        self.stored: dict[nn.Parameter, Stored] = {}
        self.spent = False
        """Whether a step has read what is stored; the next one takes its place, for a Trainer calls the model's zero_grad, which
        does not know of them."""
        self._names, self._key = names, key

    def of(self, p: nn.Parameter) -> Stored | None:
        """The gradient for a step: `.grad`, or the stored one where that is None."""
        return self.stored.get(p) if p.grad is None else (local(p.grad),)

    def store_all(self) -> None:
        """Move each `.grad` that has a codec into `stored`. Raises RuntimeError where there already is one: gradients are summed
        first, and rounded once."""
        for p in self.codecs:
            if p.grad is not None:
                self.store(p)

    @torch.no_grad()
    def store(self, p: nn.Parameter, add: bool = False) -> None:
        """Move the `.grad` of `p` into `stored`; with `add`, add it to the gradient stored there."""
        assert p.grad is not None, "asked by the caller"
        codec = self.codecs[p]
        if self.spent:
            self.clear()
        if p in self.stored and not add:
            raise RuntimeError(f"the gradient of {self._names[p]} was stored before a backward pass; zero_grad comes first")
        if p in self.stored:
            p.grad += codec.decode(self.stored[p])
        key = self._key(p, "grad") if codec.rounding == "stochastic" else None
        self.stored[p], p.grad = _encoded(codec, p.grad, key), None

    @contextmanager
    def storing(self, add: bool) -> Iterator[None]:
        """Context manager for backward passes: gradients are stored as soon as they are complete; `add` as for `store`."""
        here: set[nn.Parameter] = set()  # reentrant checkpointing of a shared layer brings a gradient in parts

        def store(p: Tensor) -> None:
            assert isinstance(p, nn.Parameter), "hooks are those of parameters"
            self.store(p, add or p in here)
            here.add(p)

        handles = [p.register_post_accumulate_grad_hook(store) for p in self.codecs]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def clear(self) -> None:
        """Drop all stored gradients."""
        self.spent = False
        self.stored.clear()


def _encoded(codec: Codec, x: Tensor, key: Tensor | None) -> Stored:
    """`x`, of any float dtype, in `codec`: on a GPU by compiled code, else a piece at a time."""
    if compiles(x.device) and in_one_piece(x.numel(), codec.block or 1):
        data, *scale_inv = compiled_code(_encode, codec)(_flat(x.contiguous(), codec), key)
        return data.view(x.shape), *scale_inv
    stored = codec.zeros(x.shape, x.device)
    codec.store(x, stored, key)
    return stored


def _encode(codec: Codec, x: Tensor, key: Tensor | None) -> Stored:
    return codec.encode(x.float(), key)


def _flat(data: Tensor, codec: Codec) -> Tensor:
    """`data` as compiled code takes it: in a flat tensor a compiler cannot tell which elements share a scale."""
    return data.view(-1, codec.block) if codec.block else data.view(-1)


def norms(codecs: Sequence[Codec], stored: Sequence[Stored]) -> list[Tensor]:
    """The 2-norms of stored tensors, float32 []. On a GPU they are taken together, in few launches: of those with scales the norms
    of rows first, by compiled code."""
    pairs = list(zip(codecs, stored, strict=True))
    rows = {i: each[0] for i, (codec, each) in enumerate(pairs) if codec.scaling == "none" and each[0].is_cuda and each[0].numel()}
    scaled = [i for i, (codec, each) in enumerate(pairs) if _in_one(codec, each)]
    kinds = [(codecs[i], stored[i][0].dtype, stored[i][0].numel() % ROW == 0) for i in scaled]
    for group in launch_groups(kinds, together(stored[0][0].device) if stored else 1):
        codec, places = codecs[scaled[group[0]]], [scaled[i] for i in group]
        flat = [(_flat(stored[i][0], codec), *stored[i][1:]) for i in places]
        rows |= zip(places, compiled_code(row_norms, codec, more=REDUCED)(flat), strict=True)
    found = torch._foreach_norm([*rows.values()], 2, torch.float32) if rows else ()
    made = dict(zip(rows, found, strict=True))
    return [made[i] if i in made else norm(codec, t) for i, (codec, t) in enumerate(pairs)]


def _in_one(codec: Codec, stored: Stored) -> bool:
    """Whether compiled code takes the norms of rows of a stored tensor."""
    data = stored[0]
    return codec.scaling != "none" and compiles(data.device) and in_one_piece(data.numel(), codec.block or 1)


def row_norms(codec: Codec, stored: Sequence[Stored]) -> list[Tensor]:
    """The 2-norms, float32 [rows], of rows of ROW elements of each stored tensor, where these divide it, else of the whole."""
    values = [codec.decode(each) for each in stored]
    return [torch.linalg.vector_norm(x.reshape(-1, ROW) if x.numel() % ROW == 0 else x.reshape(1, -1), dim=1) for x in values]


def norm(codec: Codec, stored: Stored) -> Tensor:
    """The 2-norm of a stored tensor, float32 []; decoded a piece at a time."""
    data = stored[0]
    parts = [torch.linalg.vector_norm(codec.decode(codec.part(stored, a, b))) for a, b in spans(data.numel(), data.device)]
    return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros((), device=data.device)
