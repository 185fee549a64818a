"""FP8 backends of Accelerate: their fields, and how they differ from fp8cfg.

Accelerate's configuration file and its handlers have the same fields.
"""

from __future__ import annotations

from typing import Any

from fp8cfg.interop.key_table import (
    AMAX_COMPUTE_ALGOS,
    FORMATS,
    OMIT,
    Entry,
    Unsupported,
    Values,
    format_setting,
    parse_bool,
    parse_choice,
    parse_int,
    renamed_choice,
    runs_fp8,
    same_value,
    uses_delayed_scaling,
)
from fp8cfg.schema.scalings import SCALINGS

# Accelerate converts the output layer with TE and MS-AMP. With torchao it skips the first and the
# last linear layer.
_TE = {"backend": "te", "fp8.output_layer": True}
_TORCHAO = {"backend": "torchao", "fp8.scaling": "current"}
_MSAMP = {"backend": "msamp", "fp8.output_layer": True}
BACKENDS: dict[str, dict[str, Any]] = {
    "te": _TE,
    "ao": _TORCHAO,
    "msamp": _MSAMP,
    "transformer_engine": _TE,
    "torchao": _TORCHAO,
    "ms-amp": _MSAMP,
}
"""Recipe values of the names of FP8 backends, in lower case."""
LEVELS = {"o1": "O1", "o2": "O2"}
ZERO_STAGES = {"none": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""ZeRO stage by storage.shard. FSDP2 replaces stage 3."""
SHARDS = {str(stage): shard for shard, stage in ZERO_STAGES.items()}
_GEMMS = ("fprop", "dgrad", "wgrad")

_SKIPS_FIRST_LAYER = "Accelerate's torchao also keeps the model's first linear layer out of FP8"
# msamp.deepspeed: FP8Optimizer and FP8DeepSpeedZeroOptimizer. The level sets only the moments.
_DEEPSPEED_WEIGHTS = "under DeepSpeed MS-AMP stores E4M3 weights and FP16 masters at every level"


def find_backend(values: Values) -> str:
    """Returns Accelerate's name of the backend for a recipe, "" without FP8."""
    if not runs_fp8(values):
        return ""
    # In Accelerate only MS-AMP has levels.
    if values["backend"] == "msamp" or (values["backend"] == "auto" and values["opt_level"]):
        return "MSAMP"
    return SCALINGS[values["fp8.scaling"]].accelerate or "TE"


def _uses_te(values: Values) -> bool:
    return find_backend(values) == "TE"


def _uses_te_delayed(values: Values) -> bool:
    return _uses_te(values) and uses_delayed_scaling(values)


def uses_msamp(values: Values) -> bool:
    return find_backend(values) == "MSAMP"


def find_named_backend(settings: Values, key: str) -> str | None:
    """Returns the recipe's backend for the setting of a key, or None."""
    name = str(settings.get(key)).strip().lower()
    return BACKENDS.get(name, {}).get("backend")


# Fields of fp8_config and of the handlers.


def _read_fp8_format(value: Any) -> dict[str, Any]:
    # Accelerate accepts E5M2, and Transformer Engine rejects it later.
    if str(value).strip().lower() == "e5m2":
        raise ValueError("Transformer Engine trains with HYBRID or E4M3, never with E5M2 only")
    return {"fp8.format": parse_choice(value, FORMATS)}


def _read_level(value: Any) -> dict[str, Any]:
    if str(value).lower() == "o3":
        raise ValueError("Accelerate has only O1 and O2; remove it there, and set opt_level=O3")
    return {"opt_level": parse_choice(value, LEVELS)}


def _write_level(values: Values) -> Any:
    return values["opt_level"] if values["opt_level"] in LEVELS.values() else OMIT


def read_linear_override(value: Any) -> dict[str, Any]:
    """Reads override_linear_precision: three booleans for fprop, dgrad and wgrad.

    The questionnaire writes one for all three. YAML reads `(false, false, false)` as text.
    """
    flags = value
    if not isinstance(value, (list, tuple)):
        flags = str(value).strip("()[] ").split(",")
    if len(flags) == 1:
        flags = list(flags) * 3
    if len(flags) != 3:
        raise ValueError("expected three of true and false, for fprop, dgrad and wgrad")
    return {
        f"fp8.override_linear_precision.{gemm}": parse_bool(flag)
        for gemm, flag in zip(_GEMMS, flags, strict=True)
    }


def _write_linear_override(values: Values) -> list[bool]:
    return [values[f"fp8.override_linear_precision.{gemm}"] for gemm in _GEMMS]


HANDLER_ENTRIES = (
    Entry("fp8_format", _read_fp8_format, lambda values: values["fp8.format"].upper(), _uses_te),
    same_value("margin", "fp8.margin", parse_int, _uses_te_delayed),
    same_value("interval", "fp8.interval", parse_int, _uses_te_delayed),
    same_value("amax_history_len", "fp8.amax_history_len", parse_int, _uses_te_delayed),
    renamed_choice(
        "amax_compute_algo", "fp8.amax_compute_algo", AMAX_COMPUTE_ALGOS, _uses_te_delayed
    ),
    Entry("override_linear_precision", read_linear_override, _write_linear_override, _uses_te),
    same_value("use_autocast_during_eval", "fp8.use_autocast_during_eval", parse_bool, _uses_te),
    Entry(
        "use_mxfp8_block_scaling",
        lambda setting: {"fp8.scaling": "mxfp8"} if parse_bool(setting) else {},
        lambda values: values["fp8.scaling"] == "mxfp8" or OMIT,
        _uses_te,
    ),
    Entry("opt_level", _read_level, _write_level, uses_msamp),
)
"""Fields of the handlers except the backend."""


def drop_fields_of_other_backends(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """Removes the fields of other backends than the chosen one. Returns a remark on each.

    Args:
        settings: Settings of a file or a handler. Changed in place.
        prefix: Beginning of the fields' names.
    """
    backend = find_named_backend(settings, f"{prefix}backend")
    if backend is None:
        return []
    remarks = []
    for entry in HANDLER_ENTRIES:
        key = f"{prefix}{entry.key}"
        owner = "msamp" if entry.key == "opt_level" else "te"
        if key in settings and backend != owner:
            setting = format_setting(key, settings.pop(key))
            name = str(settings[f"{prefix}backend"]).strip().upper()
            remarks.append(f"{setting}: has no effect with backend={name}")
    return remarks


# Remarks on differences between the libraries and fp8cfg.


def other_weights_remark(setting: str) -> str:
    """Returns the remark on a source with a level of MS-AMP under DeepSpeed."""
    return f"{setting}: {_DEEPSPEED_WEIGHTS}; without DeepSpeed, as here, O1 and O2 use scaled FP16"


def list_level_remarks(values: Values) -> list[str]:
    """Returns a remark if a level of MS-AMP is exported for DeepSpeed."""
    level = values["opt_level"]
    if level not in LEVELS.values():
        return []
    remark = f"opt_level={level}: exported, but {_DEEPSPEED_WEIGHTS}, not in scaled FP16"
    if level == "O2":
        remark += "; opt_level=O3 is the same here"
    return [remark]


def first_layer_remark(setting: str) -> str:
    """Returns the remark on a source with torchao and Accelerate's default filter."""
    return (
        f"{setting}: {_SKIPS_FIRST_LAYER}; here it runs in FP8, see fp8cfg plan for the layers and"
        " set fp8.exclude"
    )


def list_torchao_remarks() -> list[str]:
    """Returns the remark on an export for torchao."""
    return [
        f"fp8.scaling=current: exported, but {_SKIPS_FIRST_LAYER}; pass your own filter to change it"
        " (AORecipeKwargs.module_filter_func)"
    ]


_REMOVED_IN_TE_2 = "Transformer Engine 2 ignores it without a message"
CAVEATS = {
    "fp8.amax_compute_algo": (
        "Accelerate does not pass most_recent on to Transformer Engine, so TE uses max"
    ),
    "fp8.interval": _REMOVED_IN_TE_2,
    **{f"fp8.override_linear_precision.{gemm}": _REMOVED_IN_TE_2 for gemm in _GEMMS},
}
_FILTER = "a filter is Python code in Accelerate (AORecipeKwargs.module_filter_func)"
REASONS = {
    "precision.compute": "under fp8 Accelerate computes other layers in bf16",
    "fp8.output_layer": (
        "Accelerate converts every linear layer with TE and MS-AMP, and all but the last with"
        " torchao"
    ),
    "fp8.include": _FILTER,
    "fp8.exclude": _FILTER,
    "fp8.granularity": "a file has only tensorwise; AORecipeKwargs(config=...) has rows too",
    "opt_level": "Accelerate has only MS-AMP's O1 and O2",
    "storage.": (
        "Accelerate has no key for it; weights, gradients and moments have the dtype of the"
        " script's model"
    ),
}
PAD_INNER_DIM = Unsupported(
    "layers with sizes that are not multiples of 16 stay in high precision here"
)


def find_export_errors(values: Values) -> list[str]:
    scaling = values["fp8.scaling"]
    if uses_msamp(values) and not uses_delayed_scaling(values):
        return [
            f"fp8.scaling={scaling}: MS-AMP has only delayed scaling; remove opt_level or set"
            " fp8.scaling=delayed"
        ]
    if runs_fp8(values) and not SCALINGS[scaling].accelerate:
        of_te = [name for name, row in SCALINGS.items() if row.accelerate == "TE"]
        of_torchao = [name for name, row in SCALINGS.items() if row.accelerate == "AO"]
        return [
            f"fp8.scaling={scaling}: Accelerate has no such scaling; set one of"
            f" {' and '.join(of_te)} (TE) or {' and '.join(of_torchao)} (torchao)"
        ]
    return []
