"""Saved weights: those of a checkpoint as the native backend stores them, whichever backend wrote them. No library of a backend is
loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8cfg.backends.native.backend import scaling_of
from fp8cfg.backends.te.state import ROWS_AMAX, ROWS_SCALE_INV, as_native
from fp8cfg.numerics import Scaling
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import with_resolved_params

SCALE_INV, *_, GLOBAL_SCALE_INV = WEIGHT_BUFFERS
Weight = tuple[Tensor | None, ...]
"""A weight and what multiplies it, the fields of `fp8_weights.FP8Weight`; of a plain one itself alone."""


def saved_scaling(precision: Precision) -> Scaling:
    """That of the FP8 weights of a run with this `precision`."""
    return scaling_of(with_resolved_params(precision).fp8)


def saved_weight(
    name: str, model: Mapping[str, Tensor], fp8: Mapping[str, Tensor], scaling: Scaling
) -> Weight:
    """The weight `name` of a checkpoint's `model`, with its scales of `fp8`; empty for one without any."""
    module = name.removesuffix(".weight")
    scale_inv, whole, of_rows, amax = (
        fp8.get(f"{module}.{buffer}")
        for buffer in (SCALE_INV, GLOBAL_SCALE_INV, ROWS_SCALE_INV, ROWS_AMAX)
    )
    if of_rows is not None:
        return as_native(model[name], of_rows, amax, scaling)
    return () if scale_inv is None else (model[name], scale_inv, None, None, whole)


def saved_shape(name: str, model: Any, fp8: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The shape of that weight, in elements."""
    shape: tuple[int, ...] = model.shape(name)
    two_in_a_byte = f"{name.removesuffix('.weight')}.{ROWS_AMAX}" in fp8
    return (*shape[:-1], 2 * shape[-1]) if two_in_a_byte else shape
