"""Transformer Engine recipe classes, field by field."""

from __future__ import annotations

from typing import Any

from fp8cfg.interop.accelerate.fp8_keys import override
from fp8cfg.interop.key_table import SILENT, Dialect, Entry, Unsaid, Values, delayed
from fp8cfg.interop.te.quantizer_params import SWITCHES
from fp8cfg.interop.value_spellings import boolean, integer, inverse, one_of, read_only, same
from fp8cfg.scalings import SCALINGS

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
    return {"fp8.amax_compute_algo": one_of(value, {"max": "max", "most_recent": "most_recent"})}


def _backward(ours: Values) -> Any:
    """The one override that TE 2 has: both products of the backward pass."""
    kept = [ours[f"{_KEPT}{gemm}"] for gemm in ("fprop", "dgrad", "wgrad")]
    return "high_precision" if kept == [False, True, True] else SILENT


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """The parameters of quantizers are what holds, whatever the switches beside them say."""
    block = theirs.get("class") == CLASSES["block"]
    switches = {
        "power_2_scale": ("use_f32_scales", True) if block else ("use_power_2_scales", False)
    }
    silent = theirs.pop("printed", False) and theirs.get("class") == CLASSES["delayed"]
    notes = (
        ["amax_compute_algo: a DelayedScaling does not print it; taken to be max"] if silent else []
    )
    for name, (switch, off) in (
        switches | {name: (switch, True) for name, switch in SWITCHES.items()}
    ).items():
        is_so = theirs.pop(name, None)
        if is_so is None:
            continue
        if not isinstance(is_so, bool):
            raise ValueError(f"{name}={is_so}: expected True or False")
        said, theirs[switch] = theirs.get(switch), is_so is not off
        if said not in (None, theirs[switch]):
            notes.append(f"{name}={is_so} of its QParams: TE's layers read that, not the switch")
    return notes


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


_KERNELS: dict[str, tuple[Any, ...]] = {
    "fp8_gemm_fprop": (),
    "fp8_gemm_dgrad": (),
    "fp8_gemm_wgrad": (),
    "scaling_factor_compute_algo": (None,),
    "amax_epsilon": (0.0,),
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
            lambda value: {"fp8.format": one_of(value, {"hybrid": "hybrid", "e4m3": "e4m3"})},
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
    why={
        "fp8.params": "te.quantized_model_init says it, not the recipe",
        "precision.compute": "the model's own dtype says it",
        "fp8.interval": "Transformer Engine moves scales at every step since 2.0",
        "storage.": "not of its recipe",
        **dict.fromkeys(
            (f"{_KEPT}fprop", f"{_KEPT}dgrad", f"{_KEPT}wgrad"),
            "it has backward_override alone, for dgrad and wgrad together, and not under delayed"
            " scaling",
        ),
    },
)
