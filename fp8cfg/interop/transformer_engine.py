"""Transformer Engine recipe classes, field by field."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import re
from collections.abc import Mapping
from typing import Any

from fp8cfg.interop.accelerate import override
from fp8cfg.interop.key_table import (
    SILENT,
    Dialect,
    Entry,
    NotHere,
    Read,
    Unsaid,
    Values,
    Written,
    boolean,
    delayed,
    integer,
    inverse,
    one_of,
    read_only,
    same,
)
from fp8cfg.interop.source_files import call_in
from fp8cfg.interop.translation import read, write
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS

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


CLASSES = {name: scaling.te for name, scaling in SCALINGS.items() if scaling.te}
_ATTENTION = tuple(name for name in CLASSES if "dot_product_attention" in SCALINGS[name].attention)
_OVERRIDES = tuple(name for name in CLASSES if not SCALINGS[name].history)
_BACK = {name.lower(): scaling for scaling, name in CLASSES.items()}
_KEPT = "fp8.override_linear_precision."
_BACKWARD = {"high_precision": {f"{_KEPT}dgrad": True, f"{_KEPT}wgrad": True}, "none": {}}


def _under(*scalings: str) -> Any:
    return lambda ours: ours["fp8.scaling"] in scalings


def _class(value: Any) -> dict[str, Any]:
    if str(value).lower() == "customrecipe":
        raise ValueError("its quantizers are Python code, which a recipe cannot name")
    return {"fp8.enabled": True, "backend": "te", "fp8.scaling": one_of(value, _BACK)}


def _algo(value: Any) -> dict[str, Any]:
    if callable(value):
        raise ValueError("a function, which a recipe cannot name; max or most_recent")
    return {"fp8.amax_compute_algo": one_of(value, {"max": "max", "most_recent": "most_recent"})}


def _backward(ours: Values) -> Any:
    """The one override that TE 2 has: both products of the backward pass."""
    kept = [ours[f"{_KEPT}{gemm}"] for gemm in ("fprop", "dgrad", "wgrad")]
    return "high_precision" if kept == [False, True, True] else SILENT


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """The parameters of quantizers are what holds, whatever the switches beside them say."""
    block = theirs.get("class") == CLASSES["block"]
    switches = {
        "power_2_scale": ("use_f32_scales", True) if block else ("use_power_2_scales", False)
    }
    silent = theirs.pop("printed", False) and theirs.get("class") == CLASSES["delayed"]
    notes = (
        ["amax_compute_algo: a DelayedScaling does not print it; taken to be max"] if silent else []
    )
    for name, (switch, off) in (
        switches | {name: (switch, True) for name, switch in SWITCHES.items()}
    ).items():
        is_so = theirs.pop(name, None)
        if is_so is None:
            continue
        if not isinstance(is_so, bool):
            raise ValueError(f"{name}={is_so}: expected True or False")
        said, theirs[switch] = theirs.get(switch), is_so is not off
        if said not in (None, theirs[switch]):
            notes.append(f"{name}={is_so} of its QParams: TE's layers read that, not the switch")
    return notes


def _refuse(ours: Values) -> list[str]:
    if ours["fp8.enabled"] and ours["fp8.scaling"] not in CLASSES:
        return [
            f"fp8.scaling={ours['fp8.scaling']}: Transformer Engine has no such scaling; it has"
            f" {', '.join(CLASSES)}"
        ]
    return (
        []
        if ours["fp8.enabled"]
        else [
            "fp8.enabled=False: a recipe of Transformer Engine is for FP8; write precision=bf16_fp8"
        ]
    )


_KERNELS: dict[str, tuple[Any, ...]] = {
    "fp8_gemm_fprop": (),
    "fp8_gemm_dgrad": (),
    "fp8_gemm_wgrad": (),
    "scaling_factor_compute_algo": (None,),
    "amax_epsilon": (0.0,),
    "fp4_format": ("E2M1",),
    "row_scaled_activation": (False,),
    "nvfp4_4over6": ("none",),
    "nvfp4_4over6_e4m3_use_256": ("all",),
    "nvfp4_4over6_err_mode": ("MAE",),
}
"""How its kernels accumulate and round, which no key here says, and the usual values."""
_TILES = Unsaid("inputs and gradients have tiles of 1x128", (1, "1"))
TE = Dialect(
    "Transformer Engine",
    (
        Entry("class", _class, lambda ours: CLASSES[ours["fp8.scaling"]]),
        Entry(
            "fp8_format",
            lambda value: {"fp8.format": one_of(value, {"hybrid": "hybrid", "e4m3": "e4m3"})},
            lambda ours: ours["fp8.format"].upper(),
        ),
        same("margin", "fp8.margin", integer, delayed),
        same("amax_history_len", "fp8.amax_history_len", integer, delayed),
        Entry("amax_compute_algo", _algo, lambda ours: ours["fp8.amax_compute_algo"], delayed),
        same("reduce_amax", "fp8.reduce_amax", boolean, delayed),
        same("fp8_dpa", "fp8.dot_product_attention", boolean, _under(*_ATTENTION)),
        same("fp8_mha", "fp8.multi_head_attention", boolean, _under(*_ATTENTION)),
        same("use_power_2_scales", "fp8.use_power_2_scales", boolean, _under("current")),
        inverse("use_f32_scales", "fp8.use_power_2_scales", _under("block")),
        same("enable_2d_quantization", "fp8.enable_2d_quantization", boolean, _under("mxfp8")),
        Entry(
            "w_block_scaling_dim",
            lambda value: {"fp8.enable_2d_quantization": one_of(value, {"2": True, "1": False})},
            lambda ours: 1 + ours["fp8.enable_2d_quantization"],
            _under("block"),
        ),
        inverse("disable_2d_quantization", "fp8.enable_2d_quantization", _under("nvfp4")),
        inverse("disable_rht", "fp8.random_hadamard_transform", _under("nvfp4")),
        inverse("disable_stochastic_rounding", "fp8.stochastic_rounding", _under("nvfp4")),
        Entry(
            "backward_override",
            lambda value: one_of(value, _BACKWARD),
            _backward,
            _under(*_OVERRIDES),
        ),
        read_only("interval", lambda value: {"fp8.interval": integer(value)}),
        read_only("override_linear_precision", override),
    ),
    {"recipe_type": "class", "format": "fp8_format"},
    unsaid={
        **dict.fromkeys(("x_block_scaling_dim", "grad_block_scaling_dim"), _TILES),
        **{
            k: Unsaid("how its kernels accumulate and round; not of a recipe here", usual)
            for k, usual in _KERNELS.items()
        },
    },
    prepare=_prepare,
    refuse=_refuse,
    why={
        "fp8.params": "te.quantized_model_init says it, not the recipe",
        "precision.compute": "the model's own dtype says it",
        "fp8.interval": "Transformer Engine moves scales at every step since 2.0",
        "storage.": "not of its recipe",
        **dict.fromkeys(
            (f"{_KEPT}fprop", f"{_KEPT}dgrad", f"{_KEPT}wgrad"),
            "it has backward_override alone, for dgrad and wgrad together, and not under delayed"
            " scaling",
        ),
    },
)

NAMES = (*CLASSES.values(), "CustomRecipe")


def values_of(recipe: Any) -> dict[str, Any]:
    """The fields of a recipe object by name, formats as words, and what the parameters of its quantizers and products say."""
    name, every = type(recipe).__name__, (*FP8, *FP4, *PRODUCTS)
    found = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    found = {
        k: v.name if isinstance(v, enum.Enum) else v for k, v in found.items() if k not in every
    }
    return {
        "class": name,
        **found,
        **said_by(name, {k: vars(getattr(recipe, k)) for k in every if hasattr(recipe, k)}),
    }


def from_te(recipe: Any, base: Recipe | None = None) -> Read:
    """The recipe that an object of Transformer Engine's means, as `fp8cfg.interop.from_object` says."""
    return read(TE, values_of(recipe), base)


def to_te(recipe: Recipe) -> Written:
    """The genuine object, with power-of-two scales set where TE's layers read them, and every field of it read back. Raises
    NotHere where Transformer Engine cannot be imported, and ConfigError for a field that it did not take.
    """
    try:
        module = importlib.import_module("transformer_engine.common.recipe")
    except (ImportError, RuntimeError, OSError) as e:
        raise NotHere(
            f"transformer_engine: cannot be imported here ({str(e).splitlines()[0][:80]})"
        ) from None
    written = write(TE, recipe)
    given = dict(written.value)
    made = _object_class(module, given.pop("class"))(
        **{**given, "fp8_format": module.Format[given["fp8_format"]]}
    )
    power = _powers(given)
    for name in FP8 if power is not None else ():
        setattr(made, name, module.QParams(power_2_scale=power))
    back = values_of(made)
    refuse_if(
        [
            f"{k}={v}: Transformer Engine made {back.get(k)} of it"
            for k, v in given.items()
            if back.get(k, False) != v
        ]
    )
    return Written(made, written.lost)


def _object_class(module: Any, name: str) -> Any:
    if not hasattr(module, name):
        raise NotHere(f"transformer_engine: this version has no {name}")
    return getattr(module, name)


def _powers(given: dict[str, Any]) -> bool | None:
    """Whether scales are powers of two, where that is a choice."""
    if "use_f32_scales" in given:
        return not given["use_f32_scales"]
    return given.get("use_power_2_scales")


def python_text(given: dict[str, Any]) -> str:
    """Python that makes the recipe of a written table, in TE's own terms."""
    fields = {
        k: f"Format.{v}" if k == "fp8_format" else repr(v) for k, v in given.items() if k != "class"
    }
    unusual = (
        _powers(given) is not (given["class"] == CLASSES["block"]) and _powers(given) is not None
    )
    names = [given["class"], "Format", *(["QParams"] if unusual else [])]
    lines = [
        f"from transformer_engine.common.recipe import {', '.join(names)}",
        "",
        f"recipe = {given['class']}(",
    ]
    lines += [*(f"    {k}={v}," for k, v in fields.items()), ")"]
    if unusual:
        lines.append("# TE's layers read these, not the switch above")
        lines += [f"recipe.{name} = QParams(power_2_scale={_powers(given)})" for name in FP8]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> dict[str, Any]:
    """The fields of the recipe in Python text, which is read and not run, or of the line that a recipe prints of itself. Raises
    ConfigError where there is none, or where a value is no literal."""
    if "recipe_type=" in text:
        return printed(text)
    return call_in(text, NAMES, "recipe of Transformer Engine")
