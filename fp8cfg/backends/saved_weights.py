"""Saved weights: converts checkpoint weights of any backend to the native storage.

Does not import the library of a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8cfg.backends.te.state import ROWS_AMAX, ROWS_SCALE_INV, as_native
from fp8cfg.numerics import Scaling
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS
from fp8cfg.numerics.scaling_settings import scaling_of
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import with_resolved_params

SCALE_INV, *_, GLOBAL_SCALE_INV = WEIGHT_BUFFERS
Weight = tuple[Tensor | None, ...]
"""A weight and its scales, the fields of `fp8_weights.FP8Weight`. A plain weight has no scales."""


def saved_scaling(precision: Precision) -> Scaling:
    """Returns the scaling of the FP8 weights of a run with this precision."""
    return scaling_of(with_resolved_params(precision).fp8)


def saved_weight(
    name: str, model: Mapping[str, Tensor], fp8: Mapping[str, Tensor], scaling: Scaling
) -> Weight:
    """Returns a weight of a checkpoint with its scales, or () if it is not quantized.

    Args:
        name: Name of the weight.
        model: Tensors of the model, by name.
        fp8: FP8 state, by name.
        scaling: Scaling of the FP8 weights.
    """
    module = name.removesuffix(".weight")
    # Only Transformer Engine's weights with scales per block have rowwise scales.
    rowwise_scale_inv = fp8.get(f"{module}.{ROWS_SCALE_INV}")
    if rowwise_scale_inv is not None:
        amax = fp8.get(f"{module}.{ROWS_AMAX}")
        return as_native(model[name], rowwise_scale_inv, amax, scaling)
    scale_inv = fp8.get(f"{module}.{SCALE_INV}")
    if scale_inv is None:
        return ()
    return model[name], scale_inv, None, None, fp8.get(f"{module}.{GLOBAL_SCALE_INV}")


def saved_shape(name: str, model: Any, fp8: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Returns the shape of that weight in elements."""
    shape: tuple[int, ...] = model.shape(name)
    module = name.removesuffix(".weight")
    # NVFP4 of Transformer Engine packs two elements into a byte.
    if f"{module}.{ROWS_AMAX}" in fp8:
        return (*shape[:-1], 2 * shape[-1])
    return shape
