"""torchao Float8LinearConfig: how its fields give the scaling and the format of each of the three GEMMs."""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Mapping
from typing import Any

from fp8cfg.interop.key_table import (
    Dialect,
    Entry,
    NotHere,
    Unsaid,
    Values,
    Written,
    boolean,
    one_of,
    option,
    same,
    write_only,
)
from fp8cfg.schema.errors import refuse_if
from fp8cfg.schema.scalings import SCALINGS

_GEMMS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight_for_grad_input"),
    "wgrad": ("input_for_grad_weight", "grad_output_for_grad_weight"),
}
"""The two operands of each product; the second mention of an operand has a cast of its own."""
_OPERANDS = tuple(operand for operands in _GEMMS.values() for operand in operands)
_WIDTHS = {"tensorwise": "tensor", "axiswise": "row"}


def _disabled(gemm: str) -> tuple[Entry, ...]:
    """The scaling types of the operands of one product."""
    key = f"fp8.override_linear_precision.{gemm}"
    return tuple(
        option(f"cast_config_{operand}.scaling_type", key, {"dynamic": False, "disabled": True})
        for operand in _GEMMS[gemm]
    )


def _granularity(gemm: str, operand: str) -> Entry:
    """Rows under torchao are of products in FP8 alone."""

    def width(ours: Values) -> str:
        rows = (
            ours["fp8.granularity"] == "row" and not ours[f"fp8.override_linear_precision.{gemm}"]
        )
        return "axiswise" if rows else "tensorwise"

    return write_only(f"cast_config_{operand}.scaling_granularity", width)


def gather(value: Any) -> dict[str, Any]:
    """What an FP8 all-gather says: there is none but of weights that FSDP2 splits."""
    return {"storage.shard": "fsdp", "storage.gather": "fp8"} if boolean(value) else {}


def gathers(ours: Values) -> bool:
    """Whether weights are gathered in FP8."""
    return bool(ours["storage.shard"] == "fsdp" and ours["storage.gather"] == "fp8")


def _gradients(value: Any) -> dict[str, Any]:
    return {"fp8.format": one_of(value, {"none": "hybrid", "e5m2": "hybrid", "e4m3": "e4m3"})}


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """One granularity for all operands in FP8, that of the first: a line for each other."""
    widths = {
        key: theirs.get(key, "tensorwise")
        for operand in _OPERANDS
        if theirs.get(f"cast_config_{operand}.scaling_type") != "disabled"
        and (key := f"cast_config_{operand}.scaling_granularity")
    }
    theirs["ON"] = first = next(iter(widths.values()), "tensorwise")
    return [
        f"{key}={width}: here all operands have one granularity, {first}"
        for key, width in widths.items()
        if width != first
    ]


def _refuse(ours: Values) -> list[str]:
    if ours["fp8.enabled"] and SCALINGS[ours["fp8.scaling"]].torchao != "float8":
        return [
            f"fp8.scaling={ours['fp8.scaling']}: torchao's Float8Linear has only current scaling;"
            " MXFP8 is another class"
        ]
    return (
        []
        if ours["fp8.enabled"]
        else [
            "fp8.enabled=False: a Float8LinearConfig is for FP8; write precision=bf16_fp8_current"
        ]
    )


TORCHAO = Dialect(
    "torchao",
    (
        Entry(
            "ON",
            lambda width: {
                "fp8.enabled": True,
                "fp8.scaling": "current",
                "backend": "torchao",
                "fp8.granularity": one_of(width, _WIDTHS),
            },
            lambda _: "",
            lambda _: False,
        ),
        *(_granularity(gemm, operand) for gemm, operands in _GEMMS.items() for operand in operands),
        *(entry for gemm in _GEMMS for entry in _disabled(gemm)),
        *(
            Entry(
                f"cast_config_{grad}.target_dtype",
                _gradients,
                lambda ours: {"hybrid": "e5m2", "e4m3": "e4m3"}[ours["fp8.format"]],
            )
            for grad in ("grad_output", "grad_output_for_grad_weight")
        ),
        Entry("enable_fsdp_float8_all_gather", gather, gathers),
        same("round_scales_to_power_of_2", "fp8.use_power_2_scales", boolean),
        same("emulate", "fp8.emulate", boolean),
    ),
    unsaid={
        **{
            f"cast_config_{operand}.": Unsaid(
                "E4M3 forward, one format of gradients", ("e4m3", "e5m2", None, "dynamic")
            )
            for operand in _OPERANDS
        },
        **{
            f"gemm_config_{gemm}.": Unsaid(
                "accumulation is TE's: fast forward, exact backward", (gemm == "output",)
            )
            for gemm in ("output", "grad_input", "grad_weight")
        },
        "pad_inner_dim": Unsaid(
            "layers whose sizes are not multiples of 16 stay in high precision here", (False,)
        ),
        "force_recompute_fp8_weight_in_bwd": Unsaid(
            "model.recompute_granularity is of activations", (False,)
        ),
    },
    prepare=_prepare,
    refuse=_refuse,
)


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a Float8LinearConfig as a table of words, numbers and truth values."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        inner = (
            {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            if dataclasses.is_dataclass(value)
            else None
        )
        out |= (
            {f"{field.name}.{k}": _word(v) for k, v in inner.items()}
            if inner
            else {field.name: _word(value)}
        )
    return out


def _word(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return str(value.value)
    return (
        str(value).removeprefix("torch.float8_")[:4] if str(value).startswith("torch.") else value
    )


def made(data: Mapping[str, Any]) -> Any:
    """The genuine Float8LinearConfig of a table as `fields_of` gives it. Raises NotHere where torchao cannot be imported."""
    try:
        import torch

        ao = importlib.import_module("torchao.float8.config")
    except ImportError as e:
        raise NotHere(f"torchao: cannot be imported here ({e})") from None
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    kinds = {
        "scaling_type": ao.ScalingType,
        "scaling_granularity": ao.ScalingGranularity,
        "target_dtype": dtypes.__getitem__,
    }
    casts: dict[str, dict[str, Any]] = {}
    for key, value in data.items():
        cast, dot, field = key.partition(".")
        if dot:
            casts.setdefault(cast, {})[field] = kinds[field](value)
    plain = {k: v for k, v in data.items() if "." not in k}
    return ao.Float8LinearConfig(**{k: ao.CastConfig(**v) for k, v in casts.items()}, **plain)


def confirmed(written: Written) -> Written:
    """The object of a written table, every field of it read back. Raises ConfigError with a line for each that differs."""
    config = made(written.value)
    back = fields_of(config)
    refuse_if(
        [f"{k}={v}: torchao made {back[k]} of it" for k, v in written.value.items() if back[k] != v]
    )
    return Written(config, written.lost)
