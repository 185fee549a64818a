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
    scale_inv, whole, of_rows, amax = (
        fp8.get(f"{module}.{buffer}")
        for buffer in (SCALE_INV, GLOBAL_SCALE_INV, ROWS_SCALE_INV, ROWS_AMAX)
    )
    if of_rows is not None:
        return as_native(model[name], of_rows, amax, scaling)
    return () if scale_inv is None else (model[name], scale_inv, None, None, whole)


def saved_shape(name: str, model: Any, fp8: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Returns the shape of that weight in elements."""
    shape: tuple[int, ...] = model.shape(name)
    two_in_a_byte = f"{name.removesuffix('.weight')}.{ROWS_AMAX}" in fp8
    # NVFP4 packs two elements into a byte.
    return (*shape[:-1], 2 * shape[-1]) if two_in_a_byte else shape
