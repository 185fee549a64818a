"""Builds Transformer Engine's recipe object from the `fp8` node and reads back every field."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

from fp8cfg.backends.protocol import same
from fp8cfg.backends.te.rules import high_precision_backward
from fp8cfg.schema.fp8 import FP8, power_2_scales, weights_2d
from fp8cfg.schema.scalings import SCALINGS

TENSORS = ("fwd_inp", "fwd_weight", "bwd_grad")
"""Transformer Engine's names of the three quantized tensors of a linear layer."""
Fields = dict[str, Any]


def recipe_of(fp8: FP8) -> Any:
    """Builds the Transformer Engine recipe for `fp8` and reads all its fields back.

    Raises:
        BackendError: A field of the built object differs from the recipe.
    """
    te = importlib.import_module("transformer_engine.common.recipe")
    cls = getattr(te, SCALINGS[fp8.scaling].te)
    expected = {}
    for name, value in fields(fp8).items():
        # Older versions lack some fields and act as if these had their default.
        if hasattr(cls, name) or LATER.get(name, ...) != value:
            expected[name] = value
    arguments = {}
    for name, value in expected.items():
        if not name.startswith(("fp8_quant", "fp4_quant")):
            arguments[name] = _te_value(te, name, value)
    built = cls(**arguments)
    # The constructors of current and block scaling drop these fields, but layers only read these.
    for tensor in TENSORS:
        name = f"fp8_quant_{tensor}"
        if name in expected:
            setattr(built, name, te.QParams(**expected[name]))
    check(built, expected)
    return built


def check(built: Any, expected: Mapping[str, Any]) -> None:
    """Compares the fields of a recipe object.

    Args:
        built: The recipe object of Transformer Engine.
        expected: Plain values of the fields.

    Raises:
        BackendError: With the name and both values of each field that differs.
    """
    values = {}
    for name in expected:
        if hasattr(built, name):
            values[name] = _plain_value(getattr(built, name))
    same(type(built).__name__, expected, values)


def fields(fp8: FP8) -> Fields:
    """Returns the expected plain value of every field of the recipe object.

    Includes fields without an fp8.* key. NVTE_* variables set some of them, and defaults change
    between versions.
    """
    override = "high_precision" if high_precision_backward(fp8) else None
    common = {
        "fp8_format": fp8.format.upper(),
        "fp8_dpa": fp8.dot_product_attention,
        "fp8_mha": fp8.multi_head_attention,
        "backward_override": override,
    }
    fields_of_scaling = {
        "delayed": _delayed,
        "current": _current,
        "block": _block,
        "mxfp8": _mxfp8,
        "nvfp4": _nvfp4,
    }
    return common | fields_of_scaling[fp8.scaling](fp8)


def _delayed(fp8: FP8) -> Fields:
    return {
        "margin": fp8.margin,
        "amax_history_len": fp8.amax_history_len,
        "amax_compute_algo": fp8.amax_compute_algo,
        "scaling_factor_compute_algo": None,
        "reduce_amax": fp8.reduce_amax,
    }


def _current(fp8: FP8) -> Fields:
    power_2 = power_2_scales(fp8)
    return {
        "use_power_2_scales": power_2,
        **_split_accumulators(fprop=False),
        **_quantized_tensors(power_2),
    }


def _block(fp8: FP8) -> Fields:
    power_2 = power_2_scales(fp8)
    return {
        "use_f32_scales": not power_2,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2 if weights_2d(fp8) else 1,
        "grad_block_scaling_dim": 1,
        **_split_accumulators(fprop=True),
        **_quantized_tensors(power_2),
    }


def _mxfp8(fp8: FP8) -> Fields:
    return {"margin": 0, "enable_2d_quantization": weights_2d(fp8)}


def _nvfp4(fp8: FP8) -> Fields:
    quantized: Fields = {
        "fp4_quant_fwd_inp": _qparams(random_hadamard_transform=fp8.random_hadamard_transform),
        "fp4_quant_fwd_weight": _qparams(fp4_2d_quantization=weights_2d(fp8)),
        "fp4_quant_bwd_grad": _qparams(
            random_hadamard_transform=fp8.random_hadamard_transform,
            stochastic_rounding=fp8.stochastic_rounding,
        ),
    }
    return {
        "disable_rht": not fp8.random_hadamard_transform,
        "disable_stochastic_rounding": not fp8.stochastic_rounding,
        "disable_2d_quantization": not weights_2d(fp8),
        "fp4_format": "E2M1",
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        **quantized,
    }


def _split_accumulators(fprop: bool) -> Fields:
    """Returns the fields of the GEMMs' accumulation.

    A split accumulator is exact. Without it fprop is faster and less exact on Hopper.
    """
    return {
        "fp8_gemm_fprop": {"use_split_accumulator": fprop},
        "fp8_gemm_dgrad": {"use_split_accumulator": True},
        "fp8_gemm_wgrad": {"use_split_accumulator": True},
    }


def _quantized_tensors(power_2: bool) -> Fields:
    """Returns the fields of the three quantized tensors, with or without power-of-two scales."""
    return {f"fp8_quant_{tensor}": _qparams(power_2_scale=power_2) for tensor in TENSORS}


def _qparams(**changed: bool) -> Fields:
    """Returns the fields of a QParams object, with changed defaults."""
    defaults = {
        "power_2_scale": False,
        "amax_epsilon": 0.0,
        "random_hadamard_transform": False,
        "stochastic_rounding": False,
        "fp4_2d_quantization": False,
    }
    return defaults | changed


def _te_value(te: Any, name: str, value: Any) -> Any:
    """Converts a plain value to the type that Transformer Engine's constructor takes."""
    if name in ("fp8_format", "fp4_format"):
        return te.Format[value]
    if name.startswith("fp8_gemm"):
        return te.MMParams(**value)
    return value


def _plain_value(value: Any) -> Any:
    """Converts a field of a recipe object to a plain value."""
    if isinstance(value, Enum):
        return value.name
    if type(value).__name__ in ("QParams", "MMParams"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return value


LATER: Fields = {
    "backward_override": None,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
    "nvfp4_4over6_e4m3_use_256": "all",
    "nvfp4_4over6_err_mode": "MAE",
    "enable_2d_quantization": False,
}
"""Fields added after version 2.8. A class without the field acts as if it had this value."""
