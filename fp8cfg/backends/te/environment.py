"""NVTE_* environment variables that contradict the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fp8cfg.config.fp8 import FP8, power_2_scales, weights_2d
from fp8cfg.config.value_text import spelled


class _Wanted(NamedTuple):
    """The value that a variable must have where it is set, and the key that decides it."""

    values: tuple[str, ...]
    key: str


def contradictions(fp8: FP8, environ: Mapping[str, str]) -> list[str]:
    """A line for each variable of `environ` that contradicts `fp8`: its name, its value, the key, what to write instead.

    Transformer Engine reads most of them when it is imported, some at each step; its attention reads others than its linear
    layers. Variables that choose among equal ways (layouts, margins of SMs, logging) are left alone: the manifest of a run
    records all NVTE_* variables.
    """
    return [
        f"{name}={environ[name]}: contradicts {wanted.key}; unset it" + _or_write(wanted.values)
        for name, wanted in _wanted(fp8).items()
        if name in environ and environ[name] not in wanted.values
    ]


def _or_write(values: tuple[str, ...]) -> str:
    shown = [value for value in values if value]
    return f" or set it to {shown[0]}" if shown else ""


def _wanted(fp8: FP8) -> dict[str, _Wanted]:
    override = fp8.override_linear_precision
    backward = ("high_precision",) if override.dgrad and override.wgrad else ()
    on, mixes, rounds = (
        fp8.dot_product_attention,
        fp8.random_hadamard_transform,
        fp8.stochastic_rounding,
    )
    attention = {
        # Not read by the recipe but by attention: they replace its S and dP, or one of its passes.
        "NVTE_FP8_DPA_BWD": _Wanted(
            ("1",), "fp8.dot_product_attention=true, whose backward products are FP8 too"
        ),
        "NVTE_UnfusedDPA_Emulate_FP8": _Wanted(("0",), "fp8.emulate=false"),
        "NVTE_FUSED_ATTN": _Wanted(
            ("1",), "fp8.dot_product_attention=true, which cuDNN's fused attention alone has"
        ),
    }
    every = {
        # Read by te.TransformerLayer too, whose attention is in high precision: they put FP8 around it.
        "NVTE_DPA_FP8_RECIPE": _Wanted(
            ("",) if on else ("", "F16"), f"fp8.dot_product_attention={spelled(on)}"
        ),
        "NVTE_DPA_FP8_RECIPE_DPA": _Wanted(("0",), f"fp8.dot_product_attention={spelled(on)}"),
        "NVTE_DPA_FP8_RECIPE_MHA": _Wanted(("0",), "fp8.multi_head_attention=false"),
        "NVTE_BACKWARD_OVERRIDE": _Wanted(
            backward, f"fp8.override_linear_precision.dgrad={spelled(override.dgrad)}"
        ),
        "NVTE_UNFUSED_FP8_UPDATE": _Wanted(
            ("0",), "fp8.scaling=delayed, whose scales TE's fused kernel moves"
        ),
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": _Wanted(
            (_flag(power_2_scales(fp8)),), _resolved(fp8, "use_power_2_scales")
        ),
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": _Wanted(
            (_flag(not power_2_scales(fp8)),), _resolved(fp8, "use_power_2_scales")
        ),
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": _Wanted(
            (_flag(not weights_2d(fp8)),), _resolved(fp8, "enable_2d_quantization")
        ),
        "NVTE_NVFP4_DISABLE_RHT": _Wanted(
            (_flag(not mixes),), f"fp8.random_hadamard_transform={spelled(mixes)}"
        ),
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": _Wanted(
            (_flag(not rounds),), f"fp8.stochastic_rounding={spelled(rounds)}"
        ),
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION": _Wanted(
            ("0",), "fp8.scaling=nvfp4, which has one second-level scale for a tensor"
        ),
        "NVTE_NVFP4_4OVER6": _Wanted(("none",), "fp8.scaling=nvfp4, whose blocks all map to 6"),
    }
    only = {
        "NVTE_UNFUSED_FP8_UPDATE": "delayed",
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "current",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "block",
    }
    mine = {
        name: wanted
        for name, wanted in every.items()
        if fp8.scaling == only.get(name, "nvfp4" if name.startswith("NVTE_NVFP4") else fp8.scaling)
    }
    return mine | (attention if on else {})


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _resolved(fp8: FP8, key: str) -> str:
    value = power_2_scales(fp8) if key == "use_power_2_scales" else weights_2d(fp8)
    return f"fp8.{key}={spelled(value)}"
