"""The steps of Adam in compiled code, and a short way to what has been compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8cfg.optim.low_bit.adam_step import Columns, Slot, step_at_once

EXACT: dict[str, Any] = {"emulate_precision_casts": True, "size_asserts": False}
"""Inductor's options: round where the code says so."""
FUSE = {**EXACT, **dict.fromkeys(("realize_reads_threshold", "realize_acc_reads_threshold", "realize_opcount_threshold"), 1 << 20)}
"""Compute again rather than keep a float32 copy of a tensor."""
GUARDS = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
"""Dynamo's option: every global that a step reads is a constant."""

_CONSTANTS: dict[str, tuple[Columns, bool]] = {}


@functools.cache
def kernel(function: Callable[..., Any], columns: Columns, decoupled: bool) -> Callable[..., Any]:
    """`function`, of adam_step.py, compiled for these columns; it takes the other arguments."""
    _keep_pages()
    name = f"{function.__name__}_{len(_CONSTANTS)}"
    _CONSTANTS[name] = (columns, decoupled)

    def run(*args: Any) -> Any:
        return function(*_CONSTANTS[name], *args)  # Dynamo takes the numbers in a global for constants, not those in a closure

    # Dynamo counts recompilations by code object and stops at eight; without this all kernels would share one.
    run.__code__ = run.__code__.replace(co_name=name)
    if function is step_at_once:
        return Kernel(run, EXACT if columns.per_tensor else FUSE)
    return torch.compile(run, fullgraph=True, dynamic=True, options={**FUSE, **GUARDS})


class Kernel:
    """A compiled `step_at_once`. Before each call Dynamo checks all that it has assumed; between two steps, which push Python out
    of the processor's cache, this takes 0.2 ms, as long as stepping 65536 elements. Once it has let inputs of a signature pass,
    others of that signature go straight to the code that they went to."""

    def __init__(self, run: Callable[..., Any], options: dict[str, Any]) -> None:
        self._options = options
        self._known: dict[tuple[Any, ...], tuple[Callable[..., Any], list[int]]] = {}
        self._asking: tuple[tuple[Any, ...], list[Any]] | None = None
        self._ask = torch.compile(run, fullgraph=True, dynamic=True, backend=self._compile, options={**GUARDS})

    def __call__(self, slot: Slot, hyper: Tensor, key: Tensor | None) -> None:
        """Step the tensors of `slot`, see `step_at_once`."""
        signature, inputs = _signature(slot, key), _inputs(slot, hyper, key)
        if (known := self._known.get(signature)) is not None:
            code, order = known
            code(*[inputs[i] for i in order])
            return
        self._asking = signature, inputs
        try:
            self._ask(slot, hyper, key)
        finally:
            self._asking = None

    def _compile(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        code = torch._inductor.compile(graph, examples, options=self._options)

        def remembered(*args: Any) -> Any:
            if self._asking is not None:
                signature, inputs = self._asking
                if order := _order(args, inputs):
                    self._known[signature] = code, order
            return code(*args)

        return remembered


def _signature(slot: Slot, key: Tensor | None) -> tuple[Any, ...]:
    """What may differ between two calls and matter to the code; columns fix the rest."""
    data, copy = slot.source[0], slot.copy
    absent = (slot.weight is None, key is None, copy is None or copy.dtype)
    return (data.shape, data.device, slot.grad[0].dtype, *absent, torch.get_num_threads())


def _inputs(slot: Slot, hyper: Tensor, key: Tensor | None) -> list[Any]:
    stored = (*slot.source, *(slot.weight or ()), *slot.exp_avg, *slot.exp_avg_sq, *slot.grad)
    return [hyper, key, slot.copy, *stored, *slot.source[0].shape]


def _order(args: Sequence[Any], inputs: Sequence[Any]) -> list[int] | None:
    """Where in `inputs` each of the `args` is; None where that does not show, for one of two equal sizes."""
    which = [("size", x) if isinstance(x, int) else ("tensor", id(x)) for x in inputs]
    wanted = [("size", x) if isinstance(x, int) else ("tensor", id(x)) for x in args]
    return [which.index(one) for one in wanted] if all(which.count(one) == 1 for one in wanted) else None


@functools.cache
def _keep_pages() -> None:
    """Let the allocator keep what a step works in. glibc returns free memory at the end of its heap once that is twice the
    largest block ever returned; a step frees three at a time, and faulting their pages in again took twice the step's time.
    This block is the largest that counts, and is never touched."""
    torch.empty((1 << 25) - (1 << 16), dtype=torch.uint8, device="cpu")
