"""Stored gradients: quantized in a codec, apart from `.grad`, from the backward pass until a step has read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp8cfg.numerics.codecs import Codec, Stored, spans
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
        stored = codec.zeros(p.shape, p.device)
        codec.store(p.grad, stored, self._key(p, "grad") if codec.rounding == "stochastic" else None)
        self.stored[p], p.grad = stored, None

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


def norms(codecs: Sequence[Codec], stored: Sequence[Stored]) -> list[Tensor]:
    """The 2-norms of stored tensors, float32 []. Those that are plain on a GPU are taken together, in few launches."""
    pairs = list(zip(codecs, stored, strict=True))
    plain = [i for i, (codec, (data, *_)) in enumerate(pairs) if codec.scaling == "none" and data.is_cuda and data.numel()]
    found = torch._foreach_norm([stored[i][0] for i in plain], 2, torch.float32) if plain else ()
    made = dict(zip(plain, found, strict=True))
    return [made[i] if i in made else norm(codec, t) for i, (codec, t) in enumerate(pairs)]


def norm(codec: Codec, stored: Stored) -> Tensor:
    """The 2-norm of a stored tensor, float32 []; decoded a piece at a time."""
    data = stored[0]
    parts = [torch.linalg.vector_norm(codec.decode(codec.part(stored, a, b))) for a, b in spans(data.numel(), data.device)]
    return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros((), device=data.device)
