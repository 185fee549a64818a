"""Key tables of NeMo's MegatronMixedPrecision plugin and Megatron-Bridge's MixedPrecisionConfig."""

from __future__ import annotations

from typing import Any

from fp8cfg.interop.job_keys import RUN_ENTRIES, combine_model_settings, find_section_key
from fp8cfg.interop.key_table import (
    Entry,
    KeyTable,
    Unsupported,
    Values,
    parse_choice,
    read_only,
    switch_for,
)
from fp8cfg.interop.megatron import JOB_UNSUPPORTED
from fp8cfg.interop.megatron_core import (
    CAVEATS,
    DYNAMIC_LOSS_SCALE,
    FP8_WGRAD,
    GRAD_REDUCE_IN_FP32,
    OFF,
    REASONS,
    REUSE_GRAD_BUFFER,
    UNSUPPORTED,
    drop_inactive_fields,
    find_compute_dtype,
    find_export_errors,
    loss_scale_entries,
    precision_entries,
    reject_conflicts,
    resolve_grad_reduce_dtype,
)

# Lightning's names in all versions -> precision.compute
_PRECISIONS = {
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "fp16-mixed": "fp16",
    "fp16": "fp16",
    "16-mixed": "fp16",
    "16": "fp16",
    "fp32": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "bf16-true": "bf16",
    "16-true": "fp16",
}
_LIGHTNING_NAMES = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32"}


def _named_dtype(settings: Values) -> str | None:
    """Returns the compute dtype of `precision`, or None."""
    return _PRECISIONS.get(str(settings.get("precision")).lower())


def _read_precision(value: Any) -> dict[str, Any]:
    if value in OFF:
        return {}
    return {"precision.compute": parse_choice(value, _PRECISIONS)}


def _prepare(settings: dict[str, Any]) -> list[str]:
    remarks = drop_inactive_fields(settings, default_layers=(0, 0))
    named_dtype = _named_dtype(settings)
    compute = named_dtype or find_compute_dtype(settings)
    # Without any precision the plugin computes in float32.
    if settings.get("precision") in OFF and compute == "fp32":
        settings["fp32"] = True
    resolve_grad_reduce_dtype(settings, compute)
    reject_conflicts(settings, named_dtype)
    return remarks + combine_model_settings(settings)


_ALIASES = {
    "fp8_param": "fp8_param_gather",
    "fp8_params": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
}
_SHARED_ENTRIES = (*precision_entries(), FP8_WGRAD, GRAD_REDUCE_IN_FP32, REUSE_GRAD_BUFFER)
_DEFAULTS = {
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "grad_reduce_in_fp32": True,
}
_SWITCHES = tuple(
    switch_for(dtype, "precision.compute", dtype) for dtype in ("fp32", "fp16", "bf16")
)
NEMO = KeyTable(
    "NeMo",
    (
        *(read_only(switch.key, switch.read) for switch in _SWITCHES),
        Entry(
            "precision",
            _read_precision,
            lambda values: _LIGHTNING_NAMES[values["precision.compute"]],
        ),
        *_SHARED_ENTRIES,
        *loss_scale_entries("fp16_"),
        *RUN_ENTRIES,
    ),
    aliases={
        **_ALIASES,
        **{name: f"fp16_{name}" for name in ("loss_scale", *DYNAMIC_LOSS_SCALE)},
    },
    defaults=_DEFAULTS,
    unsupported={
        **UNSUPPORTED,
        **JOB_UNSUPPORTED,
        "device": Unsupported("follows from trainer.accelerator", ("cuda",)),
    },
    prepare=_prepare,
    export_errors=find_export_errors,
    reasons=REASONS,
    caveats=CAVEATS,
    find_section_key=find_section_key,
)
BRIDGE = KeyTable(
    "Megatron-Bridge",
    (*_SWITCHES, *_SHARED_ENTRIES, *loss_scale_entries(), *RUN_ENTRIES),
    aliases=_ALIASES,
    defaults={**_DEFAULTS, "fp8_recipe": "tensorwise"},
    unsupported={**UNSUPPORTED, **JOB_UNSUPPORTED},
    prepare=_prepare,
    export_errors=find_export_errors,
    reasons=REASONS,
    caveats=CAVEATS,
    find_section_key=find_section_key,
)
