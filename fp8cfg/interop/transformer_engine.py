"""Transformer Engine recipe classes, field by field."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import re
from typing import Any

from fp8cfg.interop.accelerate import override
from fp8cfg.interop.key_table import (
    AMAX_COMPUTE_ALGOS,
    FORMATS,
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
    is_on,
    one_of,
    read_only,
    same,
    shown,
)
from fp8cfg.interop.source_files import call_in
from fp8cfg.interop.translation import read, write
from fp8cfg.schema.errors import refuse_if
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS

QUANTIZATION = re.compile(r"(\w+)=(?:Q[Pp]arams|MMParams)\([^)]*\)")
"""Objects in the line that a recipe prints: how tensors are quantized and products accumulated."""
IGNORED_SWITCHES = {"current": "use_power_2_scales", "block": "use_f32_scales"}
IGNORED = "Transformer Engine's layers read the QParams of a recipe, not this switch"


def printed(text: str) -> dict[str, Any]:
    """Returns the fields in the line that a recipe prints, with `printed` and `quantization`."""
    fields: dict[str, Any] = {"printed": True}
    names = [match[1] for match in QUANTIZATION.finditer(text)]
    if names:
        fields["quantization"] = ", ".join(names)
    words = {"None": None, "True": True, "False": False}
    for name, value in re.findall(r"(\w+)=([\w.+-]+)", QUANTIZATION.sub("", text)):
        fields[name] = words.get(value, value)
    return fields


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
    return {"fp8.amax_compute_algo": one_of(value, AMAX_COMPUTE_ALGOS)}


def _backward(ours: Values) -> Any:
    """The one override that TE 2 has: both products of the backward pass."""
    kept = [ours[f"{_KEPT}{gemm}"] for gemm in ("fprop", "dgrad", "wgrad")]
    return "high_precision" if kept == [False, True, True] else SILENT


def _prepare(theirs: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if theirs.pop("printed", False) and theirs.get("class") == CLASSES["delayed"]:
        lines.append("amax_compute_algo: a DelayedScaling does not print it; taken to be max")
    quantization = theirs.pop("quantization", "")
    if quantization:
        lines.append(f"{quantization}: not read; the defaults of a recipe hold")
    for switch in IGNORED_SWITCHES.values():
        if is_on(theirs.get(switch)):
            lines.append(f"{switch}=True: is so here; {IGNORED}")
    return lines


def _differs(ours: Values) -> list[str]:
    scaling = ours["fp8.scaling"]
    unusual = ours["fp8.use_power_2_scales"] != SCALINGS[scaling].power_2_scales
    if scaling not in IGNORED_SWITCHES or not unusual:
        return []
    key = shown("fp8.use_power_2_scales", ours["fp8.use_power_2_scales"])
    return [f"{key}: is written, but {IGNORED}"]


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


PRODUCTS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
_KERNELS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(PRODUCTS, ()),
    "scaling_factor_compute_algo": (None,),
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
            lambda value: {"fp8.format": one_of(value, FORMATS)},
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
    differs=_differs,
    why={
        "fp8.params": "te.quantized_model_init says it, not the recipe",
        "precision.compute": "the model's own dtype says it",
        "fp8.interval": "Transformer Engine moves scales at every step since 2.0",
        "storage.": "not of its recipe",
        **dict.fromkeys(
            (f"{_KEPT}fprop", f"{_KEPT}dgrad", f"{_KEPT}wgrad"),
            "it has only backward_override, for dgrad and wgrad together, and not under delayed"
            " scaling",
        ),
    },
)

NAMES = (*CLASSES.values(), "CustomRecipe")


def values_of(recipe: Any) -> dict[str, Any]:
    """Returns the fields of a recipe object by name, formats as words."""
    values: dict[str, Any] = {"class": type(recipe).__name__}
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        # TE's own MMParams, which only TE can construct.
        if field.name in PRODUCTS and value == field.default:
            continue
        values[field.name] = value.name if isinstance(value, enum.Enum) else value
    return values


def from_te(recipe: Any, base: Recipe | None = None) -> Read:
    """The recipe that an object of Transformer Engine's means, as `fp8cfg.interop.from_object` says."""
    return read(TE, values_of(recipe), base)


def to_te(recipe: Recipe) -> Written:
    """The genuine object, every field of it read back. Raises NotHere where Transformer Engine cannot be imported, and ConfigError
    for a field that it did not take.
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


def python_text(given: dict[str, Any]) -> str:
    """Python that makes the recipe of a written table, in TE's own terms."""
    fields = {
        k: f"Format.{v}" if k == "fp8_format" else repr(v) for k, v in given.items() if k != "class"
    }
    lines = [
        f"from transformer_engine.common.recipe import {given['class']}, Format",
        "",
        f"recipe = {given['class']}(",
    ]
    lines += [*(f"    {k}={v}," for k, v in fields.items()), ")"]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> dict[str, Any]:
    """The fields of the recipe in Python text, which is read and not run, or of the line that a recipe prints of itself. Raises
    ConfigError where there is none, or where a value is no literal."""
    if "recipe_type=" in text:
        return printed(text)
    return call_in(text, NAMES, "recipe of Transformer Engine")
