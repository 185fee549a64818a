"""Transformer Engine's recipe object from the `fp8` node, read back field by field."""

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
"""Transformer Engine's names of the three tensors that a linear layer quantizes."""
Fields = dict[str, Any]


def recipe_of(fp8: FP8) -> Any:
    """The Transformer Engine recipe for `fp8`. Raises BackendError where the constructed object differs in any field."""
    te = importlib.import_module("transformer_engine.common.recipe")
    cls = getattr(te, SCALINGS[fp8.scaling].te)
    wanted = {
        name: value
        for name, value in fields(fp8).items()
        if hasattr(cls, name) or LATER.get(name, ...) != value
    }
    given = {
        name: value
        for name, value in wanted.items()
        if not name.startswith(("fp8_quant", "fp4_quant"))
    }
    built = cls(**{name: _made(te, name, value) for name, value in given.items()})
    for tensor in (
        TENSORS
    ):  # current and block scaling: the constructor drops these, and layers read these alone
        name = f"fp8_quant_{tensor}"
        if name in wanted:
            setattr(built, name, te.QParams(**wanted[name]))
    check(built, wanted)
    return built


def check(built: Any, wanted: Mapping[str, Any]) -> None:
    """Raise BackendError with the field, what was wanted and what `built` has, for each that differs."""
    same(
        type(built).__name__,
        wanted,
        {name: _read(getattr(built, name)) for name in wanted if hasattr(built, name)},
    )


def fields(fp8: FP8) -> Fields:
    """The expected value of every field of the recipe, in plain values: also those that no key decides, since NVTE_* variables set
    some of them and defaults change between versions.
    """
    override = "high_precision" if high_precision_backward(fp8) else None
    attention = {"fp8_dpa": fp8.dot_product_attention, "fp8_mha": fp8.multi_head_attention}
    common = {"fp8_format": fp8.format.upper(), **attention, "backward_override": override}
    return common | {
        "delayed": _delayed,
        "current": _current,
        "block": _block,
        "mxfp8": _mxfp8,
        "nvfp4": _nvfp4,
    }[fp8.scaling](fp8)


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
    return {"use_power_2_scales": power_2, **_products(fprop=False), **_tensors(power_2)}


def _block(fp8: FP8) -> Fields:
    power_2 = power_2_scales(fp8)
    return {
        "use_f32_scales": not power_2,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2 if weights_2d(fp8) else 1,
        "grad_block_scaling_dim": 1,
        **_products(fprop=True),
        **_tensors(power_2),
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


def _products(fprop: bool) -> Fields:
    """Accumulation of each GEMM, split accumulator or not: without it fprop is faster and less exact."""
    return {
        f"fp8_gemm_{gemm}": {"use_split_accumulator": split}
        for gemm, split in (("fprop", fprop), ("dgrad", True), ("wgrad", True))
    }


def _tensors(power_2: bool) -> Fields:
    return {f"fp8_quant_{tensor}": _qparams(power_2_scale=power_2) for tensor in TENSORS}


def _qparams(**changed: bool) -> Fields:
    return {
        "power_2_scale": False,
        "amax_epsilon": 0.0,
        "random_hadamard_transform": False,
        "stochastic_rounding": False,
        "fp4_2d_quantization": False,
    } | changed


def _made(te: Any, name: str, value: Any) -> Any:
    """The plain `value` as Transformer Engine's constructor takes it."""
    if name in ("fp8_format", "fp4_format"):
        return te.Format[value]
    return te.MMParams(**value) if name.startswith("fp8_gemm") else value


def _read(value: Any) -> Any:
    """A field of a recipe as a plain value."""
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
"""Fields that came after 2.8; a class that lacks one does what is said here."""
