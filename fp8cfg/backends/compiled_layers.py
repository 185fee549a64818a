"""Compiled layers: the forward pass of a module that torch.compile has compiled, in training alone, and the options to compile it.

A Transformer is compiled a layer at a time, as torchtitan does: layers of one shape share one graph, so that compiling takes as
long for eighty of them as for one; FSDP2 gathers weights and sums gradients between them, and pipeline stages hand on what they
compute. An evaluation is eager: it has other modes and dtypes of gradients than Dynamo has seen, and would be compiled for itself.
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
    """Inductor's options on a `device` ("cpu", "cuda"), None where its own serve."""
    if device == "cuda":
        # Triton's own division is an approximation; a scale that is a bit too low would be another power of two.
        return {"eager_numerics.division_rounding": True}
    return None


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "Detected that context_fn is passed" not in record.getMessage()


class CompiledForward:
    """`module.forward`, compiled by `compile` while the module trains. A copy of the module, pickled ones too, has its own eager
    one. Weights that are quantized once a step are so before the compiled code runs, by what quantizes in eager code.
    """

    def __init__(self, module: nn.Module, compile: Callable[[Any], Any]) -> None:
        self.module, self.eager, self.compiled = module, module.forward, compile(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training:
            return self.eager(*args, **kwargs)
        return weights_ready(self.module, self.compiled)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(type(self.module).forward, memo[id(self.module)])


def weights_ready(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, code of `module`; before it runs weights that are quantized once a step are so, for products of inputs that have
    the dtype of its first tensor, or autocast's."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        dtype = next(
            (t.dtype for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), torch.float32
        )
        for linear in fp8_linears(module):
            linear.quantize_weight(dtype)
        return compiled(*args, **kwargs)

    return forward


def compile_layers(layers: Iterable[nn.Module], compile: Callable[[Any], Any]) -> None:
    """Compile the forward pass of each of `layers`, in place, once."""
    # Of selective recomputation, that it should hold no operation in place: those of FP8 layers are kept, or do the same twice.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_advice)
    for layer in layers:
        if not isinstance(layer.forward, CompiledForward):
            layer.forward = CompiledForward(layer, compile)
