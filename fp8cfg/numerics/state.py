"""State dicts between high precision and FP8, in every direction.

An FP8 layer adds to a linear layer's state, all float32 and none under current scaling with high-precision weights:
`fp8_scale` [3] and `fp8_amax_history` [length, 3] (columns: input, weight, grad_output), and where the weight itself is float8
`fp8_weight_scale` [], with which it was multiplied before rounding. A load that lacks them is a load of new weights: what
the layer remembered of the old ones is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8cfg.numerics.formats import BY_DTYPE, widen

if TYPE_CHECKING:
    from fp8cfg.numerics.linear import FP8Linear

BUFFERS = ("fp8_scale", "fp8_amax_history", "fp8_weight_scale")


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """float8 `weight` [out, in] quantized with the float32 scalar `scale` -> its values in `dtype`, rounded once."""
    return (widen(weight, torch.float32) * scale.reciprocal()).to(dtype)


def high_precision_state_dict(state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """`state` of an FP8 model as the same model without FP8 loads it: without scales and histories, float8 weights
    dequantized to `dtype`; every other tensor is passed on as it is."""
    plain = {}
    for name, tensor in state.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf in BUFFERS:
            continue
        scale = state.get(f"{prefix}.fp8_weight_scale" if prefix else "fp8_weight_scale")
        plain[name] = dequantize(tensor, scale, dtype) if tensor.dtype in BY_DTYPE and scale is not None else tensor
    return plain


def prepare_load(layer: FP8Linear, state: dict[str, Tensor], prefix: str) -> Tensor | None:
    """Completes `state`, in place, to what `layer` holds. Returns a high-precision weight that the layer must still quantize
    once the rest is loaded."""
    weight = state.get(prefix + "weight")
    if weight is None or weight.shape != layer.weight.shape:  # nn.Module says what is wrong with it
        return None
    if layer.fp8_scale is not None and prefix + "fp8_scale" not in state:
        for name, fresh in layer.fresh_state().items():
            state[prefix + name] = fresh
    if layer.fp8_weight_scale is None:
        if weight.dtype in BY_DTYPE and prefix + "fp8_weight_scale" in state:
            state[prefix + "weight"] = dequantize(weight, state.pop(prefix + "fp8_weight_scale"), layer.weight.dtype)
        return None
    if weight.dtype in BY_DTYPE:
        return None
    state[prefix + "weight"], state[prefix + "fp8_weight_scale"] = layer.weight.detach(), layer.fp8_weight_scale
    return weight
