"""Autocast context: a reusable, re-entrant context manager, as torch.autocast is, around a backend's own.

    context = fp8.autocast() if train else nullcontext()    # made once, before the loop
    for batch in batches:
        with context: ...

A backend's context is a generator, which Python lets be entered once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)
