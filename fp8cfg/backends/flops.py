"""Observed FLOPs: rows (tokens) that each linear layer of a user model has multiplied, the weight of its share of the total.

Counted in Python, from shapes alone, in eager training passes. Recomputation inside a backward pass (activation checkpointing) is
not counted again. A compiled pass is not counted: a counter that changes would recompile with each call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

_ROWS = "rows_multiplied"


def watch(model: nn.Module) -> None:
    """Count the rows that each linear layer of `model`, converted or not, multiplies, and the positions that each convolution
    computes.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and not hasattr(
            module, "kernel_size"
        ):  # as one that took the place of a convolution has
            module.register_forward_pre_hook(_count_input, with_kwargs=True)
        elif isinstance(module, (nn.Linear, _ConvNd)):
            module.register_forward_hook(_count_places)


def unwatch(model: nn.Module) -> None:
    """Remove the hooks of `watch` and the counts."""
    for module in model.modules():
        vars(module).pop(_ROWS, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [
                key for key, hook in hooks.items() if hook in (_count_input, _count_places)
            ]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def multiplied(module: nn.Module) -> int | None:
    """The number of rows that `module` has multiplied; None where none was counted."""
    return vars(module).get(_ROWS)


def count(module: nn.Module, x: Tensor) -> None:
    """Add the rows of `x` [..., in], which `module` is about to multiply, to its count."""
    add_rows(module, x.shape[:-1].numel())


def add_rows(module: nn.Module, rows: int) -> None:
    """Add `rows`, which `module` multiplies, to its count."""
    if torch.compiler.is_compiling() or not (module.training or torch.is_grad_enabled()):
        return
    if (
        torch._C._current_graph_task_id() == -1
    ):  # not in a backward pass: a recomputation there was counted before
        vars(module)[_ROWS] = vars(module).get(_ROWS, 0) + rows


def _count_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = next((given for given in (*args, *kwargs.values()) if isinstance(given, Tensor)), None)
    if x is not None:
        count(module, x)


def _count_places(module: Any, args: tuple[Any, ...], y: Tensor) -> None:
    """A kernel is multiplied once for each position of the output, a transposed one for each of the input."""
    at = args[0] if isinstance(module, _ConvTransposeNd) and args else y
    spatial = at.shape[-(len(module.kernel_size)) :]
    batch = at.shape[: -(len(module.kernel_size) + 1)]
    add_rows(module, math.prod((*batch, *spatial)))
