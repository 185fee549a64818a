"""Megatron-LM flags of precision, including the dtypes of its precision-aware optimizer."""

from __future__ import annotations

from typing import Any

from fp8cfg.interop.key_table import SILENT, Dialect, Entry, Values, delayed
from fp8cfg.interop.megatron.core_fields import (
    DOUBTS,
    UNSAID,
    WHY,
    fields,
    fp16,
    loss_scaling,
    refuse,
    refuse_both,
    what_is_on,
)
from fp8cfg.interop.megatron.model_flags import (
    BEYOND,
    MODEL,
    MODEL_UNSAID,
    MODEL_WHY,
    differs,
    shape,
)
from fp8cfg.interop.value_spellings import boolean, is_on, option, read_only, switch, write_only

_DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16_scaled", "fp8": "fp8"}
"""Their dtypes of optimizer state as our codecs: TE's FusedAdam scales fp16 and FP8 by the amax of each tensor."""
_STATE = {
    "exp_avg_dtype": "storage.exp_avg",
    "exp_avg_sq_dtype": "storage.exp_avg_sq",
    "main_params_dtype": "storage.master_weight",
}


def _precise(ours: Values) -> bool:
    """Of recipes whose optimizer state is not Megatron's float32, or whose gradients are not those that are reduced."""
    masters = "none" if ours["precision.compute"] == "fp32" else "fp32"
    usual = {
        "storage.exp_avg": "fp32",
        "storage.exp_avg_sq": "fp32",
        "storage.master_weight": masters,
    }
    return _main_grads(ours) or any(ours[k] != v for k, v in usual.items())


def _main_grads(ours: Values) -> bool:
    return bool(ours["storage.weight_grad"] == "bf16" and ours["storage.comm"] != "bf16")


def _half_wire(ours: Values) -> Any:
    return (ours["precision.compute"] == ours["storage.comm"] == "bf16") or SILENT


def _full_wire(ours: Values) -> Any:
    return ours["storage.comm"] == "fp32" or SILENT


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """What the flags come to: dtypes of state only with the precision-aware optimizer, gradients' from those about the wire."""
    lines = what_is_on(theirs, (1, 1), "fp4_format") + shape(theirs)
    if not is_on(theirs.get("use_precision_aware_optimizer")):
        for key in [k for k in (*_STATE, "main_grads_dtype") if k in theirs]:
            if theirs.pop(key) != "fp32":
                lines.append(f"{key}: has no effect without use_precision_aware_optimizer")
    compute = next((dtype for dtype in ("bf16", "fp16") if is_on(theirs.get(dtype))), "fp32")
    if theirs.get("main_params_dtype") == "fp32":
        del theirs["main_params_dtype"]  # what masters are anyway
    if theirs.get("main_grads_dtype") == "fp32" and not is_on(theirs.get("grad_reduce_in_bf16")):
        del theirs["main_grads_dtype"]
    if compute == "fp32":
        theirs["FP32"] = True
        if (masters := theirs.pop("main_params_dtype", None)) is not None:
            lines.append(f"main_params_dtype={masters}: has no effect without --bf16 or --fp16")
    if compute == "bf16" and is_on(theirs.get("grad_reduce_in_bf16")):
        theirs["GRADS"] = "bf16"
    if compute == "fp16" and is_on(theirs.get("accumulate_allreduce_grads_in_fp32")):
        theirs["GRADS"] = "fp32"
    refuse_both(theirs, None, "fp8_format", "fp4_format")
    return lines


_PRECISION = (
    read_only("FP32", lambda _: {"precision.compute": "fp32"}),
    switch("fp16", "precision.compute", "fp16"),
    switch("bf16", "precision.compute", "bf16"),
    *fields("fp8_format", "fp4_format"),
    Entry(
        "no_fp8_wgrad",
        lambda on: {"fp8.override_linear_precision.wgrad": boolean(on)},
        lambda ours: ours["fp8.override_linear_precision.wgrad"] or SILENT,
        delayed,
    ),
    read_only("GRADS", lambda codec: {"storage.comm": codec, "storage.weight_grad": codec}),
    write_only("grad_reduce_in_bf16", _half_wire),
    write_only("accumulate_allreduce_grads_in_fp32", _full_wire, fp16),
    write_only("use_precision_aware_optimizer", lambda _: True, _precise),
    option(
        "main_grads_dtype",
        "storage.weight_grad",
        {"bf16": "bf16", "fp32": "fp32"},
        lambda ours: _precise(ours) and ours["storage.weight_grad"] == "bf16",
    ),
    *(option(theirs, ours, _DTYPES, _precise) for theirs, ours in _STATE.items()),
    switch("use_distributed_optimizer", "storage.shard", "zero1"),
    *loss_scaling(),
)
MEGATRON = Dialect(
    "Megatron-LM",
    (*_PRECISION, *MODEL),
    {"fp8": "fp8_format", "fp4": "fp4_format", "fp8_param": "fp8_param_gather"},
    {
        "fp8_amax_history_len": 1,
        "fp8_amax_compute_algo": "most_recent",
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    },
    {**UNSAID, **MODEL_UNSAID},
    _prepare,
    refuse,
    why={**WHY, **MODEL_WHY},
    doubts=DOUBTS,
    beyond=BEYOND,
    differs=differs,
)
