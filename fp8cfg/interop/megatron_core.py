"""Precision fields of Megatron Core, as Megatron-LM, NeMo and Megatron-Bridge have them.

The projects differ in the names of a few fields, and in the defaults.
"""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

from fp8cfg.interop.key_table import (
    AMAX_COMPUTE_ALGOS,
    FORMATS,
    OMIT,
    Entry,
    Unsupported,
    Values,
    format_setting,
    inverse_switch,
    is_on,
    parse_bool,
    parse_choice,
    parse_float,
    parse_int,
    renamed_choice,
    runs_fp8,
    same_value,
    uses_delayed_scaling,
    write_only,
)
from fp8cfg.schema.errors import refuse_if
from fp8cfg.schema.scalings import SCALINGS

# fp8_recipe -> fp8.scaling
_FP8_RECIPES = {
    scaling.megatron: name
    for name, scaling in SCALINGS.items()
    if scaling.megatron and scaling.bits == 8
}
OFF = (None, False, "", "none", "None", "null")
"""Values of a disabled field, in YAML, flags and Python."""


def computes_in_fp16(values: Values) -> bool:
    return bool(values["precision.compute"] == "fp16")


def _runs_fp4_in_megatron(values: Values) -> bool:
    # For Megatron NVFP4 is no FP8, and has its own fields.
    return runs_fp8(values) and SCALINGS[values["fp8.scaling"]].bits == 4


def _runs_fp8_in_megatron(values: Values) -> bool:
    return runs_fp8(values) and not _runs_fp4_in_megatron(values)


def _exports_bf16_layers(values: Values) -> bool:
    """Returns whether layers are in bf16. Megatron rejects this under delayed scaling."""
    has_layers = values["fp8.high_precision_at_start"] or values["fp8.high_precision_at_end"]
    return runs_fp8(values) and not uses_delayed_scaling(values) and bool(has_layers)


def find_export_errors(values: Values) -> list[str]:
    scaling = values["fp8.scaling"]
    if not runs_fp8(values) or SCALINGS[scaling].megatron:
        return []
    scalings = ", ".join(name for name, row in SCALINGS.items() if row.megatron)
    return [f"fp8.scaling={scaling}: Megatron has no such scaling; set one of {scalings}"]


# Precision.


def _read_fp8_format(value: Any) -> dict[str, Any]:
    if value in OFF:
        return {}
    return {"fp8.enabled": True, "fp8.format": parse_choice(value, FORMATS)}


def _read_fp4_format(value: Any) -> dict[str, Any]:
    if value in OFF:
        return {}
    return {"fp8.enabled": True, "fp8.scaling": parse_choice(value, {"e2m1": "nvfp4"})}


def precision_entries(fp8_field: str = "fp8", fp4_field: str = "fp4") -> tuple[Entry, ...]:
    """Returns the entries of FP8 and FP4. Megatron-LM has other names for the two formats."""
    fp8, fp4 = _runs_fp8_in_megatron, _runs_fp4_in_megatron
    delayed = uses_delayed_scaling
    return (
        Entry(fp8_field, _read_fp8_format, lambda values: values["fp8.format"], fp8),
        renamed_choice("fp8_recipe", "fp8.scaling", _FP8_RECIPES, fp8),
        Entry(fp4_field, _read_fp4_format, lambda values: "e2m1", fp4),
        Entry(
            "fp4_recipe",
            lambda setting: parse_choice(setting, {"nvfp4": {}}),
            lambda values: "nvfp4",
            fp4,
        ),
        same_value("fp8_margin", "fp8.margin", parse_int, delayed),
        same_value("fp8_amax_history_len", "fp8.amax_history_len", parse_int, delayed),
        renamed_choice(
            "fp8_amax_compute_algo", "fp8.amax_compute_algo", AMAX_COMPUTE_ALGOS, delayed
        ),
        same_value("tp_only_amax_red", "fp8.tp_only_amax_red", parse_bool, delayed),
        same_value("fp8_dot_product_attention", "fp8.dot_product_attention", parse_bool, fp8),
        same_value("fp8_multi_head_attention", "fp8.multi_head_attention", parse_bool, fp8),
        same_value("fp8_param_gather", "fp8.params", parse_bool, fp8),
        same_value("fp4_param_gather", "fp8.params", parse_bool, fp4),
        write_only("first_last_layers_bf16", lambda values: True, _exports_bf16_layers),
        same_value(
            "num_layers_at_start_in_bf16",
            "fp8.high_precision_at_start",
            parse_int,
            _exports_bf16_layers,
        ),
        same_value(
            "num_layers_at_end_in_bf16",
            "fp8.high_precision_at_end",
            parse_int,
            _exports_bf16_layers,
        ),
    )


FP8_WGRAD = inverse_switch("fp8_wgrad", "fp8.override_linear_precision.wgrad", uses_delayed_scaling)
# Megatron-Bridge requires this together with MXFP8 parameters.
REUSE_GRAD_BUFFER = write_only(
    "reuse_grad_buf_for_mxfp8_param_ag",
    lambda values: True,
    lambda values: runs_fp8(values) and values["fp8.scaling"] == "mxfp8" and values["fp8.params"],
)


# Loss scaling.

DYNAMIC_LOSS_SCALE = (
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
)


def loss_scale_entries(prefix: str = "") -> tuple[Entry, ...]:
    """Returns the entries of loss scaling. `prefix` is the beginning of their names."""
    fixed = Entry(
        f"{prefix}loss_scale",
        lambda setting: {"precision.loss_scale": _parse_optional(setting)},
        lambda values: values["precision.loss_scale"] or OMIT,
        computes_in_fp16,
    )
    dynamic = [
        Entry(
            f"{prefix}{name}",
            partial(_read_dynamic, name),
            itemgetter(f"precision.{name}"),
            computes_in_fp16,
        )
        for name in DYNAMIC_LOSS_SCALE
    ]
    return (fixed, *dynamic)


def _parse_optional(value: Any) -> float | None:
    # NeMo 1's YAML files have lists with a single null.
    if value in OFF or value in ((None,), [None]):
        return None
    return parse_float(value)


def _read_dynamic(name: str, value: Any) -> dict[str, Any]:
    if _parse_optional(value) is None:
        return {}
    return {f"precision.{name}": parse_float(value)}


# Gradient reduction of NeMo and Bridge.


def _read_reduce_dtype(value: Any) -> dict[str, Any]:
    if value not in ("fp32", "bf16", "fp16"):  # set by `resolve_grad_reduce_dtype`
        raise ValueError("expected true or false")
    return {"storage.comm": value, "storage.weight_grad": value}


def _write_reduce_in_fp32(values: Values) -> Any:
    # The switch can express these two dtypes only.
    if values["storage.comm"] == values["precision.compute"]:
        return False
    if values["storage.comm"] == "fp32":
        return True
    return OMIT


GRAD_REDUCE_IN_FP32 = Entry(
    "grad_reduce_in_fp32",
    _read_reduce_dtype,
    _write_reduce_in_fp32,
    lambda values: values["precision.compute"] != "fp32",
)


def resolve_grad_reduce_dtype(settings: dict[str, Any], compute: str) -> None:
    """Replaces grad_reduce_in_fp32 by its dtype, or removes it for the recipe's default."""
    text = str(settings.get("grad_reduce_in_fp32")).lower()
    if text not in ("true", "false"):
        return
    in_fp32 = text == "true"
    # The recipe reduces in fp32 under bf16, and in fp16 under fp16.
    is_default = in_fp32 == (compute == "bf16")
    if compute == "fp32" or is_default:
        del settings["grad_reduce_in_fp32"]
    else:
        settings["grad_reduce_in_fp32"] = "fp32" if in_fp32 else compute


# Settings that depend on each other.


def find_compute_dtype(settings: Values) -> str:
    """Returns the dtype of the switches, fp32 if both are off."""
    for dtype in ("bf16", "fp16"):
        if is_on(settings.get(dtype)):
            return dtype
    return "fp32"


def reject_conflicts(
    settings: Values,
    named_dtype: str | None = None,
    fp8_field: str = "fp8",
    fp4_field: str = "fp4",
) -> None:
    """Raises ConfigError if both bf16 and fp16 are on, or both FP8 and FP4.

    Args:
        settings: Settings of the project.
        named_dtype: A dtype that is set by name instead of a switch.
        fp8_field: Key of FP8's format.
        fp4_field: Key of FP4's format.
    """
    dtypes = [
        dtype for dtype in ("bf16", "fp16") if dtype == named_dtype or is_on(settings.get(dtype))
    ]
    formats = [field for field in (fp8_field, fp4_field) if settings.get(field) not in OFF]
    refuse_if(
        [
            f"{' and '.join(switches)} are both on; remove one"
            for switches in (dtypes, formats)
            if len(switches) == 2
        ]
    )


def drop_inactive_fields(
    settings: dict[str, Any], default_layers: tuple[int, int], fp4_field: str = "fp4"
) -> list[str]:
    """Removes fields that other fields switch off. Returns a remark on each field of the user.

    Args:
        settings: Settings of the project. Changed in place.
        default_layers: Defaults of num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16.
        fp4_field: Key of FP4's format.
    """
    remarks = []
    if not is_on(settings.get("first_last_layers_bf16")):
        keys = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        for key, default in zip(keys, default_layers, strict=True):
            if key in settings and settings.pop(key) != default:
                remarks.append(f"{key}: has no effect without first_last_layers_bf16")
    # Files have the fields of both formats, at their defaults.
    inactive = "fp4" if settings.get(fp4_field) in OFF else "fp8"
    inactive_keys = (f"{inactive}_recipe", f"{inactive}_param_gather", f"{inactive}_wgrad")
    for key in list(settings):
        if key not in inactive_keys:
            continue
        value = settings.pop(key)
        if inactive == "fp4" and value not in (*OFF, "nvfp4"):
            remarks.append(f"{format_setting(key, value)}: has no effect without {fp4_field}")
    return remarks


_DTYPE_NAMES = ("float32", "bfloat16", "float16", "half")
_DTYPE = Unsupported(
    "follows from precision.compute",
    (None, True, False, *_DTYPE_NAMES, *(f"torch.{name}" for name in _DTYPE_NAMES)),
)
UNSUPPORTED = {
    **dict.fromkeys(
        ("params_dtype", "pipeline_dtype", "autocast_dtype", "autocast_enabled"), _DTYPE
    ),
    "fp8_interval": Unsupported("Megatron ignores it", (1,)),
    "reuse_grad_buf_for_mxfp8_param_ag": Unsupported(
        "a buffer of Megatron's distributed optimizer", (True, False)
    ),
    "keep_fp8_transpose_cache": Unsupported(
        "only for Megatron-FSDP, which gathers weights in each pass; backend=native has"
        " fp8.keep_transpose_cache for weights that are not gathered",
        (False,),
    ),
    **dict.fromkeys(
        ("fp8_quantizer_factory", "fp4_quantizer_factory"),
        Unsupported("Python code, which a recipe cannot name", OFF),
    ),
}
_NO_BF16_LAYERS = "Megatron rejects first_last_layers_bf16 under delayed scaling"
REASONS = {
    "fp8.interval": "Megatron ignores fp8_interval",
    "fp8.amax_history_len": "Megatron uses it only under delayed scaling",
    "fp8.override_linear_precision.wgrad": "Megatron uses fp8_wgrad only under delayed scaling",
    "fp8.high_precision_at_start": _NO_BF16_LAYERS,
    "fp8.high_precision_at_end": _NO_BF16_LAYERS,
    "backend": "Megatron uses Transformer Engine",
    "fp8.keep_transpose_cache": (
        "Transformer Engine keeps transposes, except of weights that Megatron-FSDP gathers"
    ),
}
CAVEATS = {
    "fp8.override_linear_precision.wgrad": "Transformer Engine 2 ignores it without a message"
}
