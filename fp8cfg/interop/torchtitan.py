"""Key table of torchtitan: one converter and the training node of a configuration.

The settings are the fields of the converter by their names, `converter` for its class, and
`training.` with the fields of the training node. `torchtitan_python` reads them from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.interop.key_table import (
    Entry,
    KeyTable,
    Unsupported,
    format_setting,
    is_on,
    parse_bool,
    parse_choice,
    parse_float,
    parse_int,
    read_only,
)
from fp8cfg.interop.torchao import read_fp8_all_gather
from fp8cfg.schema.scalings import SCALINGS

# Class of a converter -> torchao's library, as in SCALINGS.
CONVERTERS = {
    "Float8LinearConverter": "float8",
    "MXLinearConverter": "mx",
    "MXFP8LinearConverter": "mx",
    "MXFP8Converter": "mx",
}
_SIZES = {
    "steps": "trainer.max_steps",
    "seq_len": "model.seq_length",
    "local_batch_size": "trainer.micro_batch_size",
    "global_batch_size": "trainer.global_batch_size",
}
TRAINING_FIELDS = (
    "dtype",
    "mixed_precision_param",
    "mixed_precision_reduce",
    "max_norm",
    *_SIZES,
)


_GATHER = "enable_fsdp_float8_all_gather"
_SCALINGS = {row.torchao: name for name, row in SCALINGS.items() if row.torchao}
_ROWWISE = {"fp8.granularity": "row", "fp8.format": "e4m3", "fp8.use_power_2_scales": True}
_RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "rowwise": _ROWWISE,
    "rowwise_with_gw_hp": {**_ROWWISE, "fp8.override_linear_precision.wgrad": True},
    "mxfp8_cublas": {},
    "mxfp8_cublas_rceil": {},
    "mxfp8_emulated": {"fp8.emulate": True},
}
# training.dtype is the dtype of parameters, gradients and optimizer state, without fp32 masters.
_STATE_DTYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {
        "storage.weight": "bf16",
        "storage.master_weight": "none",
        "storage.weight_grad": "bf16",
        "storage.exp_avg": "bf16",
        "storage.exp_avg_sq": "bf16",
    },
}
_COMPUTE_DTYPES = {
    "bfloat16": {"precision.compute": "bf16"},
    "float32": {"precision.compute": "fp32"},
    "float16": {"precision.compute": "fp16"},
}
_REDUCE_DTYPES = {
    "float32": {"storage.comm": "fp32"},
    "bfloat16": {"storage.comm": "bf16"},
}
# Pattern of a linear layer in fp8cfg -> torchtitan's layers that it consists of.
_LAYERS = {
    "*.linear_qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "*.linear_proj": ("attention.wo",),
    "*.linear_fc1": ("feed_forward.w1", "feed_forward.w3"),
    "*.linear_fc2": ("feed_forward.w2",),
}
_OUTPUT_LAYER = ("output", "lm_head")
# Full name of a torchtitan layer -> its name in _LAYERS.
_LAYER_NAMES = {
    **{f"layers.*.{name}": name for names in _LAYERS.values() for name in names},
    "lm_head": "lm_head",
}


def _read_converter(library: Any) -> dict[str, Any]:
    scalings = {str(name): scaling for name, scaling in _SCALINGS.items()}
    return {
        "fp8.enabled": True,
        "backend": "torchao",
        "fp8.scaling": parse_choice(library, scalings),
    }


def _read_filter(names: list[str]) -> dict[str, Any]:
    """Returns fp8.exclude and fp8.output_layer for the names of layers outside of FP8."""
    excluded = [pattern for pattern, layers in _LAYERS.items() if set(layers) <= set(names)]
    excluded.sort(key=lambda pattern: names.index(_LAYERS[pattern][0]))  # the user's order
    return {
        "fp8.output_layer": not set(_OUTPUT_LAYER) & set(names),
        "fp8.exclude": tuple(excluded),
    }


def _parse_names(value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("fqns and filter_fqns are lists of names")
    return [str(name) for name in value]


def _prepare(settings: dict[str, Any]) -> list[str]:
    # Without a filter, MXLinearConverter skips the output layer.
    default_filter = ("output",) if settings.get("converter") == "mx" else ()
    filter_fqns = _parse_names(settings.pop("filter_fqns", default_filter))
    fqns = _parse_names(settings.pop("fqns", ()))
    if "converter" not in settings:
        return []
    excluded, unmatched = _combine_filters(filter_fqns, fqns)
    settings["FILTER"] = excluded
    remarks = [
        f"{name}: is not a separate layer here; see fp8cfg plan for the layers and set fp8.exclude"
        for name in unmatched
    ]
    recipe_name = settings.get("recipe_name", "tensorwise")
    if recipe_name != "tensorwise" and is_on(settings.get(_GATHER)):
        setting = format_setting(_GATHER, settings.pop(_GATHER))
        remarks.append(f"{setting}: has no effect under {recipe_name}, only under tensorwise")
    return remarks


def _combine_filters(filter_fqns: list[str], fqns: list[str]) -> tuple[list[str], list[str]]:
    """Combines the two filters of the converters.

    Args:
        filter_fqns: Names of layers outside of FP8.
        fqns: Parts of the names of layers in FP8. Empty for all layers.

    Returns:
        The names of layers outside of FP8, and `filter=name` for each name without an equivalent.
    """
    excluded = filter_fqns
    unmatched: list[str] = []
    if fqns:
        excluded = [
            layer for name, layer in _LAYER_NAMES.items() if not any(part in name for part in fqns)
        ]
        for part in fqns:
            if not any(part in name for name in _LAYER_NAMES):
                unmatched.append(f"fqns={part}")
    # fp8cfg fuses wq, wk and wv, so only all three of them can be excluded.
    matched = set(_OUTPUT_LAYER)
    for layers in _LAYERS.values():
        if set(layers) <= set(excluded):
            matched |= set(layers)
    unmatched += [f"filter_fqns={name}" for name in excluded if name not in matched]
    return excluded, unmatched


def _choice_entry(key: str, choices: Mapping[str, dict[str, Any]]) -> Entry:
    return read_only(key, lambda setting: parse_choice(setting, choices))


def _size_entry(name: str, recipe_key: str) -> Entry:
    def read_size(value: Any) -> dict[str, Any]:
        size = parse_int(value)
        return {} if size == -1 else {recipe_key: size}  # -1 is torchtitan's default

    return read_only(f"training.{name}", read_size)


TORCHTITAN = KeyTable(
    "torchtitan",
    (
        _choice_entry("training.mixed_precision_param", _COMPUTE_DTYPES),
        _choice_entry("training.dtype", _STATE_DTYPES),
        _choice_entry("training.mixed_precision_reduce", _REDUCE_DTYPES),
        *(_size_entry(name, recipe_key) for name, recipe_key in _SIZES.items()),
        read_only(
            "training.max_norm",
            lambda setting: {"trainer.gradient_clip_val": parse_float(setting)},
        ),
        read_only("converter", _read_converter),
        _choice_entry("recipe_name", _RECIPES),
        read_only("FILTER", _read_filter),
        read_only("filter_fqns", lambda setting: {}),
        read_only("fqns", lambda setting: {}),
        read_only("emulate", lambda setting: {"fp8.emulate": parse_bool(setting)}),
        read_only(_GATHER, read_fp8_all_gather),
        read_only("precompute_float8_dynamic_scale_for_fsdp", lambda setting: {}),
    ),
    unsupported=dict.fromkeys(
        (
            "force_recompute_fp8_weight_in_bwd",
            "moe_fqns_prototype",
            "mxfp8_dim1_cast_kernel_choice",
        ),
        Unsupported("kernels and experts of torchtitan have no key here", (False, None, "")),
    ),
    prepare=_prepare,
)
