"""Launches of fp8cfg's Triton kernels on the fake GPU that have values: each kernel is launched, compiled and all, and what it
writes is then written by triton_values.py, on CPU tensors in the memory of the CUDA ones.

A kernel that no launcher here has launched is refused: nobody would write its values.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from tools.fake_gpu import triton_values
from tools.fake_gpu.host_memory import on_host

_launching = threading.local()


@contextmanager
def computed() -> Iterator[None]:
    """Values of launches in this block."""
    from triton.runtime.jit import JITFunction

    from fp8cfg.numerics.kernels import blocks, rows, tensor

    stand_ins: list[tuple[Any, str, Callable[..., None]]] = [
        (tensor, "compute_part_amaxes", triton_values.compute_part_amaxes),
        (blocks, "compute_part_amaxes", triton_values.compute_part_amaxes),
        (tensor, "cast", triton_values.cast_tensor),
        (rows, "cast_rows", triton_values.cast_rows),
        (blocks, "cast_blocks", triton_values.cast_blocks),
        (blocks, "cast_nvfp4", triton_values.cast_nvfp4),
        (tensor, "count", triton_values.count),
    ]
    kept = [getattr(module, name) for module, name, _ in stand_ins]
    run = JITFunction.run

    def refuse(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_launching, "inside", 0):
            name = kernel.fn.__name__
            raise NotImplementedError(
                f"Triton kernel {name}: no values, write its launcher's (tools/fake_gpu/triton_values.py)"
            )
        return run(kernel, *args, **kwargs)

    def with_values(
        launch: Callable[..., Any], stand_in: Callable[..., None]
    ) -> Callable[..., Any]:
        @functools.wraps(launch)
        def launched(*args: Any, **kwargs: Any) -> Any:
            _launching.inside = getattr(_launching, "inside", 0) + 1
            try:
                kernel = launch(*args, **kwargs)
            finally:
                _launching.inside -= 1
            with _disable_current_modes(), torch.no_grad():
                stand_in(*tree_map(on_host, args), **tree_map(on_host, kwargs))
            return kernel

        return launched

    JITFunction.run = refuse
    for (module, name, stand_in), launch in zip(stand_ins, kept, strict=True):
        setattr(module, name, with_values(launch, stand_in))
    try:
        yield
    finally:
        JITFunction.run = run
        for (module, name, _), launch in zip(stand_ins, kept, strict=True):
            setattr(module, name, launch)
