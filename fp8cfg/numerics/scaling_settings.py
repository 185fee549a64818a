"""Scaling of a recipe: from the FP8 settings of the schema to the Scaling of the layers."""

from __future__ import annotations

from fp8cfg.numerics.formats import E2M1, E4M3, E5M2
from fp8cfg.numerics.scaling import Scaling
from fp8cfg.schema.fp8 import FP8, power_2_scales, weights_2d
from fp8cfg.schema.scalings import SCALINGS

_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1)}


def scaling_of(fp8: FP8) -> Scaling:
    """Converts FP8 settings to a Scaling."""
    forward, backward = (_FORMATS[name] for name in SCALINGS[fp8.scaling].operands(fp8.format))
    return Scaling(
        kind=fp8.scaling,
        forward=forward,
        backward=backward,
        margin=fp8.margin,
        interval=fp8.interval,
        amax_history_len=fp8.amax_history_len,
        amax_compute_algo=fp8.amax_compute_algo,
        first_step="te" if fp8.first_step == "te" else "in_time",
        granularity=fp8.granularity,
        power_2_scales=power_2_scales(fp8),
        weights_2d=weights_2d(fp8),
        hadamard=fp8.random_hadamard_transform,
        stochastic=fp8.stochastic_rounding,
    )
