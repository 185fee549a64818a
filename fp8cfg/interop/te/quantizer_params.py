"""Transformer Engine quantizer parameters (QParams, MMParams), which its layers read instead of the recipe's fields; and the line
that a recipe prints of itself, which shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fp8cfg.config.errors import ConfigError

FP8 = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
FP4 = ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")
"""Attributes, no fields, of input, weight and gradient: under current and block scaling, and under NVFP4."""
SWITCHES = {
    "random_hadamard_transform": "disable_rht",
    "stochastic_rounding": "disable_stochastic_rounding",
    "fp4_2d_quantization": "disable_2d_quantization",
}
"""What NVFP4's parameters say, and the switches of its constructor, which are on where that is off."""
PRODUCTS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
_SPLIT = {"Float8CurrentScaling": (False, True, True), "Float8BlockScaling": (True, True, True)}
Params = Mapping[str, Mapping[str, Any]]


def said_by(recipe: str, params: Params) -> dict[str, Any]:
    """What `params`, fields by attribute, say of a recipe of that class; of products what is unusual. Raises ConfigError where they
    say what no constructor makes of them."""
    found = _fp8(params) | _fp4(params)
    epsilons = {
        str(params[name].get("amax_epsilon", 0.0)) for name in (*FP8, *FP4) if name in params
    } - {"0.0"}
    usual = dict(zip(PRODUCTS, _SPLIT.get(recipe, ()), strict=False))
    split = {
        name: params[name].get("use_split_accumulator", usual.get(name))
        for name in PRODUCTS
        if name in params
    }
    found |= {
        name: f"MMParams(use_split_accumulator={on})"
        for name, on in split.items()
        if on != usual.get(name, on)
    }
    return found | ({"amax_epsilon": ", ".join(sorted(epsilons))} if epsilons else {})


def _fp8(params: Params) -> dict[str, Any]:
    powers = {params[name].get("power_2_scale", False) for name in FP8 if name in params}
    if len(powers) > 1:
        raise ConfigError(
            "power_2_scale: differs between inputs, weights and gradients; here they are alike"
        )
    return {"power_2_scale": powers.pop()} if powers else {}


def _fp4(params: Params) -> dict[str, Any]:
    if not params.keys() >= set(FP4):
        return {}
    said = [[params[name].get(field, False) for field in SWITCHES] for name in FP4]
    (mixes, _, _), (_, _, squares), (_, rounds, _) = said
    usual = ((mixes, False, False), (False, False, squares), (mixes, rounds, False))
    for name, values, wanted in zip(FP4, said, usual, strict=True):
        for field, value, want in zip(SWITCHES, values, wanted, strict=True):
            if value != want:
                raise ConfigError(
                    f"{name}.{field}={value}: no recipe here says that, beside what the others say"
                )
    return dict(zip(SWITCHES, (mixes, rounds, squares), strict=True))


_NESTED = re.compile(r"(\w+)=(?:Q[Pp]arams|MMParams)\(([^)]*)\)")


def printed(text: str) -> dict[str, Any]:
    """The fields of a recipe in the line that it prints of itself. `printed` among them says where they come from."""
    params = {name: _fields(inside) for name, inside in _NESTED.findall(text)}
    found = _fields(_NESTED.sub("", text))
    return found | said_by(str(found.get("recipe_type")), params) | {"printed": True}


def _fields(text: str) -> dict[str, Any]:
    words = {"None": None, "True": True, "False": False}
    return {name: words.get(value, value) for name, value in re.findall(r"(\w+)=([\w.+-]+)", text)}
