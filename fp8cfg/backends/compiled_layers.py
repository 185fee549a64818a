"""Compiled layers: torch.compile for training passes, layer by layer as in torchtitan.

Layers of one shape share a graph, so compile time does not grow with depth. Between layers FSDP2
gathers weights and reduces gradients, and pipeline stages send activations. Evaluation is eager,
because its modes and gradient dtypes would need more graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.numerics import fp8_linears


def compile_options(device: str) -> dict[str, Any] | None:
    """Returns Inductor's options for a device type ("cpu" or "cuda"), or None for its defaults."""
    if device == "cuda":
        # Triton's default division is approximate. A scale slightly too low would round to another
        # power of two.
        return {"eager_numerics.division_rounding": True}
    return None


def _drop_context_fn_advice(record: logging.LogRecord) -> bool:
    """Log filter: drops torch's advice about context_fn."""
    return "Detected that context_fn is passed" not in record.getMessage()


class CompiledForward:
    """The compiled forward of a module, used in training only.

    Copies and pickles of the module get its eager forward. Weights that are quantized once per step
    are quantized eagerly before the compiled code runs.

    Args:
        module: The module.
        compile: Compiles a function.
    """

    def __init__(self, module: nn.Module, compile: Callable[[Any], Any]) -> None:
        self.module = module
        self.eager = module.forward
        self.compiled = compile(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled forward in training, otherwise the eager one."""
        if not self.module.training:
            return self.eager(*args, **kwargs)
        return weights_ready(self.module, self.compiled)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as the eager forward of the module."""
        return getattr, (self.module, "forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies as the eager forward of the copied module."""
        return MethodType(type(self.module).forward, memo[id(self.module)])


def weights_ready(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps compiled code of `module`: quantizes weights before each call.

    This only concerns weights that are quantized once per step. The products have the dtype of the
    first tensor argument, or autocast's dtype.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Tensor):
                dtype = argument.dtype
                break
        for linear in fp8_linears(module):
            linear.quantize_weight(dtype)
        return compiled(*args, **kwargs)

    return forward


def compile_layers(layers: Iterable[nn.Module], compile: Callable[[Any], Any]) -> None:
    """Compiles the forward of each layer in place, unless it is compiled already."""
    # torch warns that selective recomputation must not repeat in-place operations. FP8 layers
    # save them, or repeating them has no effect.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_drop_context_fn_advice)
    for layer in layers:
        if not isinstance(layer.forward, CompiledForward):
            layer.forward = CompiledForward(layer, compile)
