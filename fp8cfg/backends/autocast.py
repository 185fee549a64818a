"""Autocast context: a reusable, re-entrant context manager, as torch.autocast is, around a backend's FP8 context and torch's own.

    context = fp8.autocast() if train else nullcontext()    # made once, before the loop
    for batch in batches:
        with context: ...

A backend's context is a generator, which Python lets be entered once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from fp8cfg.backends.protocol import Backend


class AutocastContext(ContextDecorator, AbstractContextManager[None]):
    """`make` gives a new context of the backend for each time that this one is entered, also inside of itself. As a decorator it is
    entered by each call."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)


@contextmanager
def autocast(
    backend: Backend, model: nn.Module, enabled: bool, torch_autocast: str
) -> Iterator[None]:
    """The context of `backend`, entered once, inside torch.autocast in the dtype `torch_autocast`, bf16 or fp16, where that is not
    empty: for a model whose code does not choose its dtypes. Losses, softmax and norms are then taken in float32, as torch says.
    """
    if not torch_autocast:
        with backend.autocast(model, enabled):
            yield
        return
    import torch

    from fp8cfg.backends.stored_weights import DTYPES

    device = next(model.parameters()).device.type
    with torch.autocast(device, DTYPES[torch_autocast]), backend.autocast(model, enabled):
        yield
