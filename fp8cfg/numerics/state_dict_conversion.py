"""State dict conversion between high precision and FP8, in both directions, and between FP8 scalings.

In the stored form (stored_state.py) an FP8 layer adds to a linear layer's state, under delayed scaling, `fp8_scale` [3] and
`fp8_amax_history` [length, 3], float32 (columns: input, weight, grad_output); and where the weight itself is float8, or in a codec
with a scale, what it is multiplied by to be read (`fp8_weight_scale_inv` and the others, see fp8_weights.py). A load that lacks
them is a load of new weights: what the layer remembered of the old ones is forgotten. float8 weights stored under another scaling
are read and quantized anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8cfg.numerics.formats import FORMAT_BY_DTYPE
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, FP8Weight, dequantize, plain
from fp8cfg.numerics.stored_state import ANEW

if TYPE_CHECKING:
    from fp8cfg.numerics.fp8_attention import FP8Attention
    from fp8cfg.numerics.fp8_linear import FP8Linear

ROUNDING_COUNT = "fp8_rounding_count"
"""How many backward passes have drawn numbers to round a gradient by."""
BUFFERS = ("fp8_scale", "fp8_amax_history", *WEIGHT_BUFFERS)


def high_precision_state_dict(
    state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """`state`, the stored form of an FP8 model's, as the same model without FP8 loads it: without scales and histories, float8
    weights dequantized to `dtype`; every other tensor is passed on as it is."""
    plain = {}
    for name, tensor in state.items():
        prefix, dot, leaf = name.rpartition(".")
        if leaf in (*BUFFERS, ROUNDING_COUNT):
            continue
        stored = _stored(state, prefix + dot) if leaf == "weight" else None
        plain[name] = dequantize(stored, dtype) if stored else tensor
    return plain


def _stored(state: Mapping[str, Tensor], prefix: str) -> FP8Weight | None:
    """The quantized weight of a layer in `state` (float8, or with a scale), if there is one and it can be read."""
    weight, scale_inv, *others = (state.get(prefix + name) for name in ("weight", *WEIGHT_BUFFERS))
    if weight is None or (scale_inv is None and weight.dtype not in FORMAT_BY_DTYPE):
        return None
    if scale_inv is None:
        raise RuntimeError(
            f"{prefix}weight is {weight.dtype} and means nothing without"
            f" {prefix}{WEIGHT_BUFFERS[0]}"
        )
    return FP8Weight(weight, scale_inv, *others)


def prepare_load(layer: FP8Linear, state: dict[str, Tensor], prefix: str) -> Tensor | None:
    """Completes `state`, in place, with the entries that `layer` expects. Returns a high-precision weight that the layer has to
    quantize once everything else is loaded.
    """
    weight = state.get(prefix + "weight")
    if weight is None and not any(prefix + name in state for name in (*BUFFERS, ROUNDING_COUNT)):
        return None  # nn.Module says what is missing
    complete_delayed(layer, state, prefix)
    count = getattr(layer, ROUNDING_COUNT)
    if count is None:
        state.pop(prefix + ROUNDING_COUNT, None)
    elif prefix + ROUNDING_COUNT not in state:
        state[prefix + ROUNDING_COUNT] = torch.zeros_like(count)
        vars(layer)[ANEW] = True
    if weight is None or weight.shape != layer.parameter.shape:
        return None
    own = {
        name: getattr(layer, name) for name in WEIGHT_BUFFERS if getattr(layer, name) is not None
    }
    if weight.dtype == layer.parameter.dtype and _forms(state, prefix) == {
        k: (t.shape, t.dtype) for k, t in own.items()
    }:
        return None
    stored = _stored(state, prefix)
    for name in WEIGHT_BUFFERS:  # of another scaling
        state.pop(prefix + name, None)
    if not own:
        if stored:
            state[prefix + "weight"] = dequantize(stored, layer.parameter.dtype)
        return None
    state[prefix + "weight"] = plain(layer.parameter)
    state.update({prefix + name: tensor for name, tensor in own.items()})
    return dequantize(stored, torch.float32) if stored else weight


def complete_delayed(
    layer: FP8Linear | FP8Attention, state: dict[str, Tensor], prefix: str
) -> None:
    """Scales and amax history in the shapes that `layer` has: fresh where `state` has none, removed where the layer has no use for
    them, and a history of another length truncated or padded.
    """
    scale, history = prefix + "fp8_scale", prefix + "fp8_amax_history"
    vars(layer).pop(ANEW, None)
    if layer.fp8_scale is None or layer.fp8_amax_history is None:
        state.pop(scale, None)
        state.pop(history, None)
    elif scale not in state:
        state.update({prefix + name: fresh for name, fresh in layer.fresh_state().items()})
        vars(layer)[ANEW] = True
    elif history in state and state[history].shape[1:] == layer.fp8_amax_history.shape[1:]:
        state[history] = fit_history(state[history], layer.fp8_amax_history)


def fit_history(saved: Tensor, like: Tensor) -> Tensor:
    """An amax history [L, columns] truncated or padded to the length of `like`: row 0 is the running maximum, the newest rows stay
    last.
    """
    if len(saved) == len(like):
        return saved
    keep = min(len(saved), len(like)) - 1
    out = torch.zeros_like(like)
    out[0] = saved[0]
    if keep:
        out[-keep:] = saved[-keep:]
    return out


def _forms(state: Mapping[str, Tensor], prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        name: (t.shape, t.dtype)
        for name in WEIGHT_BUFFERS
        if (t := state.get(prefix + name)) is not None
    }
