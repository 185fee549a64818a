"""Autocast context: reusable and re-entrant like torch.autocast.

    context = fp8.autocast() if train else nullcontext()    # created once, before the loop
    for batch in batches:
        with context: ...

A backend's own context is a generator, which Python enters only once.
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
    """A context manager that creates a new context of the backend for each entry.

    It can be nested. As a decorator it is entered by each call.

    Args:
        create: Creates a context of the backend.
    """

    def __init__(self, create: Callable[[], AbstractContextManager[None]]) -> None:
        self._create = create
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._create()
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
    """Enters the context of a backend, and torch.autocast for a custom model.

    Args:
        backend: The backend.
        model: The converted model.
        enabled: Whether layers multiply in FP8.
        torch_autocast: "bf16" or "fp16" for a custom model without casts, otherwise "". Losses,
            softmax and norms then run in float32, by torch's rules.
    """
    if not torch_autocast:
        with backend.autocast(model, enabled):
            yield
        return
    import torch

    from fp8cfg.numerics.formats import DTYPES

    device = next(model.parameters()).device.type
    with torch.autocast(device, DTYPES[torch_autocast]), backend.autocast(model, enabled):
        yield
