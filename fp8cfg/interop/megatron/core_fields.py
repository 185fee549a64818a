"""Megatron Core precision fields, which NeMo and Megatron-Bridge share."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

from fp8cfg.config.errors import refuse_if
from fp8cfg.interop.key_table import SILENT, Entry, Unsaid, Values, delayed, runs_fp8
from fp8cfg.interop.value_spellings import (
    boolean,
    integer,
    inverse,
    is_on,
    number,
    one_of,
    option,
    same,
    shown,
    write_only,
)
from fp8cfg.scalings import SCALINGS

_FP8 = {
    scaling.megatron: name
    for name, scaling in SCALINGS.items()
    if scaling.megatron and scaling.bits == 8
}
"""Their fp8_recipe, and our scaling."""
OFF = (None, False, "", "none", "None", "null")


def fp8(ours: Values) -> bool:
    """Of recipes that Megatron calls FP8."""
    return runs_fp8(ours) and not fp4(ours)


def fp4(ours: Values) -> bool:
    """Of recipes that Megatron calls FP4."""
    return runs_fp8(ours) and SCALINGS[ours["fp8.scaling"]].bits == 4


def refuse(ours: Values) -> list[str]:
    """The line on a scaling that Megatron has not."""
    if not runs_fp8(ours) or SCALINGS[ours["fp8.scaling"]].megatron:
        return []
    those = ", ".join(name for name, scaling in SCALINGS.items() if scaling.megatron)
    return [f"fp8.scaling={ours['fp8.scaling']}: Megatron has no such scaling; it has {those}"]


def fp16(ours: Values) -> bool:
    """Of recipes that compute in fp16."""
    return bool(ours["precision.compute"] == "fp16")


def _ends(ours: Values) -> bool:
    """Of recipes with layers in high precision, as far as Megatron takes them: not under delayed scaling."""
    return (
        runs_fp8(ours)
        and not delayed(ours)
        and bool(ours["fp8.high_precision_at_start"] or ours["fp8.high_precision_at_end"])
    )


def _on(value: Any) -> dict[str, Any]:
    return (
        {}
        if value in OFF
        else {
            "fp8.enabled": True,
            "fp8.format": one_of(value, {"hybrid": "hybrid", "e4m3": "e4m3"}),
        }
    )


def _fp4_on(value: Any) -> dict[str, Any]:
    return (
        {}
        if value in OFF
        else {"fp8.enabled": True, "fp8.scaling": one_of(value, {"e2m1": "nvfp4"})}
    )


def _optional(value: Any) -> float | None:
    return None if value in OFF or value == (None,) or value == [None] else number(value)


def fields(fp8_field: str = "fp8", fp4_field: str = "fp4") -> tuple[Entry, ...]:
    """The fields that all of them share, where FP8's format and FP4's have these names."""
    return (
        Entry(fp8_field, _on, lambda ours: ours["fp8.format"], fp8),
        option("fp8_recipe", "fp8.scaling", _FP8, fp8),
        Entry(fp4_field, _fp4_on, lambda ours: "e2m1", fp4),
        Entry("fp4_recipe", lambda value: one_of(value, {"nvfp4": {}}), lambda ours: "nvfp4", fp4),
        same("fp8_margin", "fp8.margin", integer, delayed),
        same("fp8_amax_history_len", "fp8.amax_history_len", integer, delayed),
        option(
            "fp8_amax_compute_algo",
            "fp8.amax_compute_algo",
            {"max": "max", "most_recent": "most_recent"},
            delayed,
        ),
        same("tp_only_amax_red", "fp8.tp_only_amax_red", boolean, delayed),
        same("fp8_dot_product_attention", "fp8.dot_product_attention", boolean, fp8),
        same("fp8_multi_head_attention", "fp8.multi_head_attention", boolean, fp8),
        same("fp8_param_gather", "fp8.params", boolean, fp8),
        same("fp4_param_gather", "fp8.params", boolean, fp4),
        write_only("first_last_layers_bf16", lambda _: True, _ends),
        same("num_layers_at_start_in_bf16", "fp8.high_precision_at_start", integer, _ends),
        same("num_layers_at_end_in_bf16", "fp8.high_precision_at_end", integer, _ends),
    )


WGRAD = inverse("fp8_wgrad", "fp8.override_linear_precision.wgrad", delayed)
REUSE = write_only(
    "reuse_grad_buf_for_mxfp8_param_ag",
    lambda _: True,
    lambda ours: runs_fp8(ours) and ours["fp8.scaling"] == "mxfp8" and ours["fp8.params"],
)
DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def loss_scaling(prefix: str = "") -> tuple[Entry, ...]:
    """Loss scaling under fp16, where its fields begin with `prefix`."""
    return (
        Entry(
            f"{prefix}loss_scale",
            lambda value: {"precision.loss_scale": _optional(value)},
            lambda ours: ours["precision.loss_scale"] or SILENT,
            fp16,
        ),
        *(
            Entry(f"{prefix}{name}", partial(_dynamic, name), itemgetter(f"precision.{name}"), fp16)
            for name in DYNAMIC
        ),
    )


def _dynamic(name: str, value: Any) -> dict[str, Any]:
    return {} if _optional(value) is None else {f"precision.{name}": number(value)}


def _reduced(value: Any) -> dict[str, Any]:
    if value not in ("fp32", "bf16", "fp16"):  # what `reduction` makes of a truth value
        raise ValueError("expected true or false")
    return {"storage.comm": value, "storage.weight_grad": value}


def _in_fp32(ours: Values) -> Any:
    return {"fp32": True, ours["precision.compute"]: False}.get(ours["storage.comm"], SILENT)


REDUCED = Entry(
    "grad_reduce_in_fp32", _reduced, _in_fp32, lambda ours: ours["precision.compute"] != "fp32"
)


def reduction(theirs: dict[str, Any], compute: str) -> None:
    """Put into grad_reduce_in_fp32 the codec that it means under `compute`, or take it out where auto says the same."""
    in_fp32 = {"true": True, "false": False}.get(str(theirs.get("grad_reduce_in_fp32")).lower())
    if in_fp32 is None:
        return
    if compute == "fp32" or in_fp32 == (compute == "bf16"):
        del theirs["grad_reduce_in_fp32"]
    else:
        theirs["grad_reduce_in_fp32"] = "fp32" if in_fp32 else compute


def refuse_both(
    theirs: Values, named: str | None = None, fp8_field: str = "fp8", fp4_field: str = "fp4"
) -> None:
    """Raise ConfigError where bf16 and fp16 are both on, of which one may be `named` and no switch, or FP8 and FP4."""
    halves = [dtype for dtype in ("bf16", "fp16") if dtype == named or is_on(theirs.get(dtype))]
    narrow = [field for field in (fp8_field, fp4_field) if theirs.get(field) not in OFF]
    refuse_if(
        [f"{' and '.join(two)} are both on; drop one" for two in (halves, narrow) if len(two) == 2]
    )


def what_is_on(
    theirs: dict[str, Any], spared: tuple[int, int], fp4_field: str = "fp4"
) -> list[str]:
    """Take out the fields of layers at the ends, unless first_last_layers_bf16 is on, and of FP4 or FP8 where the other runs.
    A line for each that somebody set; `spared` is what the layers at the ends are where nobody did.
    """
    lines, ends = [], ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if not is_on(theirs.get("first_last_layers_bf16")):
        for key, unset in zip(ends, spared, strict=True):
            if key in theirs and theirs.pop(key) != unset:
                lines.append(f"{key}: has no effect without first_last_layers_bf16")
    idle = "fp4_" if theirs.get(fp4_field) in OFF else "fp8_"
    for key in [k for k in theirs if k in (f"{idle}recipe", f"{idle}param_gather", f"{idle}wgrad")]:
        value = theirs.pop(key)
        if idle == "fp4_" and value not in (*OFF, "nvfp4"):
            lines.append(f"{shown(key, value)}: has no effect without {fp4_field}")
    return lines


_DTYPE = Unsaid(
    "follows from precision.compute",
    (
        None,
        True,
        False,
        *(
            at + name
            for at in ("", "torch.")
            for name in ("float32", "bfloat16", "float16", "half")
        ),
    ),
)
UNSAID = {
    **dict.fromkeys(
        ("params_dtype", "pipeline_dtype", "autocast_dtype", "autocast_enabled"), _DTYPE
    ),
    "fp8_interval": Unsaid("Megatron ignores it", (1,)),
    "reuse_grad_buf_for_mxfp8_param_ag": Unsaid(
        "a buffer of Megatron's distributed optimizer", (True, False)
    ),
    "keep_fp8_transpose_cache": Unsaid(
        "of Megatron-FSDP, which gathers weights for each pass; backend=native has "
        "fp8.keep_transpose_cache where they stay",
        (False,),
    ),
    **dict.fromkeys(
        ("fp8_quantizer_factory", "fp4_quantizer_factory"),
        Unsaid("a recipe cannot name code to run", OFF),
    ),
}
WHY = {
    "fp8.interval": "Megatron ignores fp8_interval",
    "fp8.amax_history_len": "means something there under delayed scaling alone",
    "fp8.override_linear_precision.wgrad": "fp8_wgrad does nothing there but under delayed scaling",
    "fp8.high_precision_at_start": "Megatron refuses first_last_layers_bf16 under delayed scaling",
    "fp8.high_precision_at_end": "Megatron refuses first_last_layers_bf16 under delayed scaling",
    "backend": "Megatron multiplies with Transformer Engine",
    "fp8.keep_transpose_cache": (
        "Transformer Engine keeps them, but for those that Megatron-FSDP gathers"
    ),
}
DOUBTS = {
    "fp8.override_linear_precision.wgrad": (
        "Transformer Engine 2 knows it no more and drops it without a word"
    )
}
"""What they say and Transformer Engine does not carry out."""
