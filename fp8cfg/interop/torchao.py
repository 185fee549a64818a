"""Key table of torchao's Float8LinearConfig, and conversion of its objects.

The settings are the fields of the configuration. Fields of a CastConfig have its name as a prefix,
such as `cast_config_input.scaling_type`.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from fp8cfg.interop.key_table import (
    Entry,
    KeyTable,
    NotHere,
    Unsupported,
    Values,
    Written,
    parse_bool,
    parse_choice,
    read_only,
    renamed_choice,
    same_value,
    write_only,
)
from fp8cfg.schema.errors import refuse_if
from fp8cfg.schema.scalings import SCALINGS

# The operands of each GEMM. torchao casts each operand for each GEMM with its own CastConfig.
_OPERANDS_OF_GEMM = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight_for_grad_input"),
    "wgrad": ("input_for_grad_weight", "grad_output_for_grad_weight"),
}
_OPERANDS = tuple(operand for operands in _OPERANDS_OF_GEMM.values() for operand in operands)
_GRANULARITIES = {"tensorwise": "tensor", "axiswise": "row"}
_GRADIENT_FORMATS = {"none": "hybrid", "e5m2": "hybrid", "e4m3": "e4m3"}


def read_fp8_all_gather(value: Any) -> dict[str, Any]:
    """Reads enable_fsdp_float8_all_gather. It implies FSDP2."""
    if not parse_bool(value):
        return {}
    return {"storage.shard": "fsdp", "storage.gather": "fp8"}


def _write_fp8_all_gather(values: Values) -> bool:
    return bool(values["storage.shard"] == "fsdp" and values["storage.gather"] == "fp8")


def _read_granularity(name: Any) -> dict[str, Any]:
    return {
        "fp8.enabled": True,
        "fp8.scaling": "current",
        "backend": "torchao",
        "fp8.granularity": parse_choice(name, _GRANULARITIES),
    }


def _granularity_writer(gemm: str) -> Callable[[Values], str]:
    def write_granularity(values: Values) -> str:
        is_fp8 = not values[f"fp8.override_linear_precision.{gemm}"]
        # In torchao's own recipes, GEMMs in high precision stay tensorwise.
        if is_fp8 and values["fp8.granularity"] == "row":
            return "axiswise"
        return "tensorwise"

    return write_granularity


def _write_gradient_format(values: Values) -> str:
    return {"hybrid": "e5m2", "e4m3": "e4m3"}[values["fp8.format"]]


def _operand_entries() -> list[Entry]:
    granularities = []
    scaling_types = []
    for gemm, operands in _OPERANDS_OF_GEMM.items():
        override = f"fp8.override_linear_precision.{gemm}"
        for operand in operands:
            cast = f"cast_config_{operand}"
            granularities.append(
                write_only(f"{cast}.scaling_granularity", _granularity_writer(gemm))
            )
            scaling_types.append(
                renamed_choice(
                    f"{cast}.scaling_type", override, {"dynamic": False, "disabled": True}
                )
            )
    return granularities + scaling_types


def _prepare(settings: dict[str, Any]) -> list[str]:
    """Combines the granularities of all FP8 operands: a recipe has one for all of them."""
    granularities: dict[str, str] = {}
    for operand in _OPERANDS:
        if settings.get(f"cast_config_{operand}.scaling_type") != "disabled":
            key = f"cast_config_{operand}.scaling_granularity"
            granularities[key] = settings.get(key, "tensorwise")
    first = next(iter(granularities.values()), "tensorwise")
    # Also turns FP8 on: the configuration has no key for that.
    settings["GRANULARITY"] = first
    return [
        f"{key}={granularity}: all operands have the granularity {first} here"
        for key, granularity in granularities.items()
        if granularity != first
    ]


def _find_export_errors(values: Values) -> list[str]:
    if not values["fp8.enabled"]:
        return [
            "fp8.enabled=False: a Float8LinearConfig is for FP8; set precision=bf16_fp8_current"
        ]
    scaling = values["fp8.scaling"]
    if SCALINGS[scaling].torchao != "float8":
        return [
            f"fp8.scaling={scaling}: torchao's Float8Linear has only current scaling, and MXFP8 is"
            " another class"
        ]
    return []


TORCHAO = KeyTable(
    "torchao",
    (
        read_only("GRANULARITY", _read_granularity),
        *_operand_entries(),
        *(
            Entry(
                f"cast_config_{operand}.target_dtype",
                lambda setting: {"fp8.format": parse_choice(setting, _GRADIENT_FORMATS)},
                _write_gradient_format,
            )
            for operand in ("grad_output", "grad_output_for_grad_weight")
        ),
        Entry("enable_fsdp_float8_all_gather", read_fp8_all_gather, _write_fp8_all_gather),
        same_value("round_scales_to_power_of_2", "fp8.use_power_2_scales", parse_bool),
        same_value("emulate", "fp8.emulate", parse_bool),
    ),
    unsupported={
        **{
            f"cast_config_{operand}.": Unsupported(
                "inputs and weights are E4M3, and all gradients have one format",
                ("e4m3", "e5m2", None, "dynamic"),
            )
            for operand in _OPERANDS
        },
        # use_fast_accum. torchao's defaults are TE's: fast in fprop only.
        **{
            f"gemm_config_{gemm}.": Unsupported(
                "accumulation is fast in fprop and precise in the backward pass, as in TE",
                (gemm == "output",),
            )
            for gemm in ("output", "grad_input", "grad_weight")
        },
        "pad_inner_dim": Unsupported(
            "layers with sizes that are not multiples of 16 stay in high precision here", (False,)
        ),
        "force_recompute_fp8_weight_in_bwd": Unsupported(
            "model.recompute_granularity is only for activations", (False,)
        ),
    },
    prepare=_prepare,
    export_errors=_find_export_errors,
)


def read_config_fields(config: Any) -> dict[str, Any]:
    """Returns the fields of a Float8LinearConfig as text, numbers and booleans."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not dataclasses.is_dataclass(value):
            settings[field.name] = _to_plain(value)
            continue
        for inner in dataclasses.fields(value):
            settings[f"{field.name}.{inner.name}"] = _to_plain(getattr(value, inner.name))
    return settings


def _to_plain(value: Any) -> Any:
    """Returns the name of an enum's member or of an FP8 dtype. Other values stay."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    text = str(value)
    if text.startswith("torch."):
        return text.removeprefix("torch.float8_")[:4]  # e4m3 of torch.float8_e4m3fn
    return value


def make_config(settings: Mapping[str, Any]) -> Any:
    """Returns the Float8LinearConfig of settings. Raises NotHere without torchao."""
    try:
        import torch

        config_module = importlib.import_module("torchao.float8.config")
    except ImportError as error:
        raise NotHere(f"torchao: cannot be imported ({error})") from None
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    types = {
        "scaling_type": config_module.ScalingType,
        "scaling_granularity": config_module.ScalingGranularity,
        "target_dtype": dtypes.__getitem__,
    }
    arguments: dict[str, Any] = {}
    casts: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        cast, dot, field = key.partition(".")
        if dot:
            casts.setdefault(cast, {})[field] = types[field](value)
        else:
            arguments[key] = value
    for cast, fields in casts.items():
        arguments[cast] = config_module.CastConfig(**fields)
    return config_module.Float8LinearConfig(**arguments)


def make_verified_config(written: Written) -> Written:
    """Returns an export with the Float8LinearConfig of its settings.

    Raises:
        ConfigError: torchao changed a field.
        NotHere: torchao is not installed.
    """
    config = make_config(written.value)
    fields = read_config_fields(config)
    refuse_if(
        [
            f"{key}={value}: torchao changed it to {fields[key]}"
            for key, value in written.value.items()
            if fields[key] != value
        ]
    )
    return written._replace(value=config)
