"""Key table of Transformer Engine's recipe classes, and conversion of their objects and text."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import re
from collections.abc import Callable
from typing import Any

from fp8cfg.interop.accelerate_backends import read_linear_override
from fp8cfg.interop.key_table import (
    AMAX_COMPUTE_ALGOS,
    FORMATS,
    OMIT,
    Entry,
    KeyTable,
    NotHere,
    Read,
    Unsupported,
    Values,
    Written,
    format_setting,
    inverse_switch,
    is_on,
    parse_bool,
    parse_choice,
    parse_int,
    read_only,
    same_value,
    uses_delayed_scaling,
)
from fp8cfg.interop.python_source import read_call
from fp8cfg.interop.translation import export_recipe, import_settings
from fp8cfg.schema.errors import refuse_if
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS

# Scaling -> class, and the other way around.
CLASSES = {name: scaling.te for name, scaling in SCALINGS.items() if scaling.te}
_SCALINGS = {class_name.lower(): scaling for scaling, class_name in CLASSES.items()}
CLASS_NAMES = (*CLASSES.values(), "CustomRecipe")

# Switches of power-of-two scales, by scaling.
_UNUSED_SWITCHES = {"current": "use_power_2_scales", "block": "use_f32_scales"}
UNUSED_SWITCH = "Transformer Engine's layers use the recipe's QParams instead"

# Objects in a printed recipe: how tensors are quantized, and how GEMMs accumulate.
_PRINTED_OBJECT = re.compile(r"(\w+)=(?:Q[Pp]arams|MMParams)\([^)]*\)")

_OVERRIDE = "fp8.override_linear_precision."
_BACKWARD_OVERRIDES = {
    "high_precision": {f"{_OVERRIDE}dgrad": True, f"{_OVERRIDE}wgrad": True},
    "none": {},
}


def _under(*scalings: str) -> Callable[[Values], bool]:
    """Returns a test of a recipe's scaling."""
    return lambda values: values["fp8.scaling"] in scalings


_HAS_ATTENTION = _under(
    *(name for name in CLASSES if "dot_product_attention" in SCALINGS[name].attention)
)
_HAS_BACKWARD_OVERRIDE = _under(*(name for name in CLASSES if not SCALINGS[name].history))


def _read_class(value: Any) -> dict[str, Any]:
    if str(value).lower() == "customrecipe":
        raise ValueError("its quantizers are Python code, which a recipe cannot name")
    return {"fp8.enabled": True, "backend": "te", "fp8.scaling": parse_choice(value, _SCALINGS)}


def _read_amax_compute_algo(value: Any) -> dict[str, Any]:
    if callable(value):
        raise ValueError("is a function, which a recipe cannot name; set max or most_recent")
    return {"fp8.amax_compute_algo": parse_choice(value, AMAX_COMPUTE_ALGOS)}


def _write_backward_override(values: Values) -> Any:
    gemms = [values[f"{_OVERRIDE}{gemm}"] for gemm in ("fprop", "dgrad", "wgrad")]
    # The other combinations do not exist in TE 2.
    return "high_precision" if gemms == [False, True, True] else OMIT


def _prepare(settings: dict[str, Any]) -> list[str]:
    remarks: list[str] = []
    is_printed = settings.pop("printed", False)
    if is_printed and settings.get("class") == CLASSES["delayed"]:
        remarks.append("amax_compute_algo: not in a printed DelayedScaling; imported as max")
    quantization = settings.pop("quantization", "")
    if quantization:
        remarks.append(f"{quantization}: not read; the defaults of the recipe apply")
    for switch in _UNUSED_SWITCHES.values():
        if is_on(settings.get(switch)):
            remarks.append(f"{switch}=True: imported, but {UNUSED_SWITCH}")
    return remarks


def _list_export_remarks(values: Values) -> list[str]:
    scaling, uses_power_2 = values["fp8.scaling"], values["fp8.use_power_2_scales"]
    is_default = uses_power_2 == SCALINGS[scaling].power_2_scales
    if scaling not in _UNUSED_SWITCHES or is_default:
        return []
    return [
        f"{format_setting('fp8.use_power_2_scales', uses_power_2)}: exported, but {UNUSED_SWITCH}"
    ]


def _find_export_errors(values: Values) -> list[str]:
    if not values["fp8.enabled"]:
        return [
            "fp8.enabled=False: Transformer Engine's recipes are for FP8; set precision=bf16_fp8"
        ]
    if values["fp8.scaling"] not in CLASSES:
        return [
            f"fp8.scaling={values['fp8.scaling']}: Transformer Engine has no such scaling; set one"
            f" of {', '.join(CLASSES)}"
        ]
    return []


_GEMM_FIELDS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
_KERNEL_FIELDS: dict[str, tuple[Any, ...]] = {  # with their defaults
    **dict.fromkeys(_GEMM_FIELDS, ()),
    "scaling_factor_compute_algo": (None,),
    "fp4_format": ("E2M1",),
    "row_scaled_activation": (False,),
    "nvfp4_4over6": ("none",),
    "nvfp4_4over6_e4m3_use_256": ("all",),
    "nvfp4_4over6_err_mode": ("MAE",),
}
_TILES = Unsupported("inputs and gradients have tiles of 1x128", (1, "1"))
_BACKWARD_ONLY = (
    "it has only backward_override, for dgrad and wgrad together, and not under delayed scaling"
)
TE = KeyTable(
    "Transformer Engine",
    (
        Entry("class", _read_class, lambda values: CLASSES[values["fp8.scaling"]]),
        Entry(
            "fp8_format",
            lambda setting: {"fp8.format": parse_choice(setting, FORMATS)},
            lambda values: values["fp8.format"].upper(),
        ),
        same_value("margin", "fp8.margin", parse_int, uses_delayed_scaling),
        same_value("amax_history_len", "fp8.amax_history_len", parse_int, uses_delayed_scaling),
        Entry(
            "amax_compute_algo",
            _read_amax_compute_algo,
            lambda values: values["fp8.amax_compute_algo"],
            uses_delayed_scaling,
        ),
        same_value("reduce_amax", "fp8.reduce_amax", parse_bool, uses_delayed_scaling),
        same_value("fp8_dpa", "fp8.dot_product_attention", parse_bool, _HAS_ATTENTION),
        same_value("fp8_mha", "fp8.multi_head_attention", parse_bool, _HAS_ATTENTION),
        same_value("use_power_2_scales", "fp8.use_power_2_scales", parse_bool, _under("current")),
        inverse_switch("use_f32_scales", "fp8.use_power_2_scales", _under("block")),
        same_value(
            "enable_2d_quantization", "fp8.enable_2d_quantization", parse_bool, _under("mxfp8")
        ),
        Entry(
            "w_block_scaling_dim",
            lambda setting: {
                "fp8.enable_2d_quantization": parse_choice(setting, {"2": True, "1": False})
            },
            lambda values: 2 if values["fp8.enable_2d_quantization"] else 1,
            _under("block"),
        ),
        inverse_switch("disable_2d_quantization", "fp8.enable_2d_quantization", _under("nvfp4")),
        inverse_switch("disable_rht", "fp8.random_hadamard_transform", _under("nvfp4")),
        inverse_switch("disable_stochastic_rounding", "fp8.stochastic_rounding", _under("nvfp4")),
        Entry(
            "backward_override",
            lambda setting: parse_choice(setting, _BACKWARD_OVERRIDES),
            _write_backward_override,
            _HAS_BACKWARD_OVERRIDE,
        ),
        # Fields of TE 1.
        read_only("interval", lambda setting: {"fp8.interval": parse_int(setting)}),
        read_only("override_linear_precision", read_linear_override),
    ),
    aliases={"recipe_type": "class", "format": "fp8_format"},
    unsupported={
        **dict.fromkeys(("x_block_scaling_dim", "grad_block_scaling_dim"), _TILES),
        **{
            key: Unsupported("how kernels accumulate and round is not part of a recipe", usual)
            for key, usual in _KERNEL_FIELDS.items()
        },
    },
    prepare=_prepare,
    export_errors=_find_export_errors,
    export_remarks=_list_export_remarks,
    reasons={
        "fp8.params": "an argument of te.quantized_model_init, not of the recipe",
        "precision.compute": "follows from the dtype of the model",
        "fp8.interval": "Transformer Engine updates scales in each step since 2.0",
        "storage.": "not part of its recipe",
        **dict.fromkeys(
            (f"{_OVERRIDE}fprop", f"{_OVERRIDE}dgrad", f"{_OVERRIDE}wgrad"), _BACKWARD_ONLY
        ),
    },
)


# Objects.


def from_te(recipe: Any, base: Recipe | None = None) -> Read:
    """Imports a recipe object of Transformer Engine. See `fp8cfg.interop.from_object`."""
    return import_settings(TE, read_recipe_fields(recipe), base)


def to_te(recipe: Recipe) -> Written:
    """Exports a recipe as an object of Transformer Engine.

    Raises:
        ConfigError: Transformer Engine changed a field, or the recipe cannot be exported.
        NotHere: Transformer Engine is not installed, or its version lacks the class.
    """
    try:
        module = importlib.import_module("transformer_engine.common.recipe")
    # TE loads shared libraries on import, with errors of all these types.
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0][:80]
        raise NotHere(f"transformer_engine: cannot be imported ({reason})") from None
    written = export_recipe(TE, recipe)
    settings = dict(written.value)
    class_name = settings.pop("class")
    if not hasattr(module, class_name):
        raise NotHere(f"transformer_engine: this version has no {class_name}")
    arguments = {**settings, "fp8_format": module.Format[settings["fp8_format"]]}
    te_recipe = getattr(module, class_name)(**arguments)
    fields = read_recipe_fields(te_recipe)
    refuse_if(
        [
            f"{key}={value}: Transformer Engine changed it to {fields.get(key)}"
            for key, value in settings.items()
            if fields.get(key, False) != value
        ]
    )
    return written._replace(value=te_recipe)


def read_recipe_fields(recipe: Any) -> dict[str, Any]:
    """Returns the fields of a recipe object by name. Formats become text."""
    settings: dict[str, Any] = {"class": type(recipe).__name__}
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        # Only TE can construct its MMParams, so a default has no plain form to compare with.
        if field.name in _GEMM_FIELDS and value == field.default:
            continue
        settings[field.name] = value.name if isinstance(value, enum.Enum) else value
    return settings


# Text.


def to_python(settings: dict[str, Any]) -> str:
    """Returns Python source for the recipe of the settings."""
    class_name = settings["class"]
    lines = [
        f"from transformer_engine.common.recipe import {class_name}, Format",
        "",
        f"recipe = {class_name}(",
    ]
    for key, value in settings.items():
        if key == "fp8_format":
            lines.append(f"    {key}=Format.{value},")
        elif key != "class":
            lines.append(f"    {key}={value!r},")
    lines.append(")")
    return "\n".join(lines) + "\n"


def read_recipe_text(text: str) -> dict[str, Any]:
    """Returns the settings of a recipe in Python text, or of a printed recipe.

    A printed recipe has `printed` and `quantization` as further settings, for the remarks.

    Raises:
        ConfigError: There is no recipe, or a value is not a literal.
    """
    if "recipe_type=" in text:
        return _read_printed_recipe(text)
    return read_call(text, CLASS_NAMES, "recipe of Transformer Engine")


def _read_printed_recipe(text: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"printed": True}
    objects = [match[1] for match in _PRINTED_OBJECT.finditer(text)]
    if objects:
        settings["quantization"] = ", ".join(objects)
    constants = {"None": None, "True": True, "False": False}
    for name, value in re.findall(r"(\w+)=([\w.+-]+)", _PRINTED_OBJECT.sub("", text)):
        settings[name] = constants.get(value, value)
    return settings
