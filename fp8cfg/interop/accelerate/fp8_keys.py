"""Accelerate FP8 keys: fp8_config in its configuration file, and the fields of its handler objects."""

from __future__ import annotations

from typing import Any

from fp8cfg.interop.key_table import SILENT, Entry, Values, delayed, runs_fp8
from fp8cfg.interop.value_spellings import boolean, integer, one_of, option, same, shown
from fp8cfg.scalings import SCALINGS

_OUTPUT = {"fp8.output_layer": True}
BACKENDS: dict[str, dict[str, Any]] = {
    "te": {"backend": "te", **_OUTPUT},
    "ao": {"backend": "torchao", "fp8.scaling": "current"},
    "msamp": {"backend": "msamp", **_OUTPUT},
    "transformer_engine": {"backend": "te", **_OUTPUT},
    "torchao": {"backend": "torchao", "fp8.scaling": "current"},
    "ms-amp": {"backend": "msamp", **_OUTPUT},
}
"""Accelerate's TE and MS-AMP convert every linear layer, the output layer too; its torchao leaves the first and the last one."""
LEVELS = {"o1": "O1", "o2": "O2"}


def _level(value: Any) -> dict[str, Any]:
    """Raises ValueError for another one; of O3, which Accelerate does not have, with what to write."""
    if str(value).lower() == "o3":
        raise ValueError(
            "Accelerate has O1 and O2 alone; O3 is here: leave it out there, and add opt_level=O3"
        )
    return {"opt_level": one_of(value, LEVELS)}


FIRST_LAYER = "Accelerate's torchao leaves the model's first linear layer in high precision too"
HELD = "under DeepSpeed MS-AMP holds weights in E4M3 with FP16 masters at every level"
"""msamp.deepspeed: FP8Optimizer and FP8DeepSpeedZeroOptimizer have them whatever the level, which says the moments alone."""


def engine(ours: Values) -> str:
    """The backend of Accelerate that multiplies as this recipe says; empty where it runs no FP8."""
    if not runs_fp8(ours):
        return ""
    if ours["backend"] == "msamp" or (ours["backend"] == "auto" and ours["opt_level"]):
        return "MSAMP"
    return SCALINGS[ours["fp8.scaling"]].accelerate or "TE"


def te(ours: Values) -> bool:
    """Of recipes that Transformer Engine runs under Accelerate."""
    return engine(ours) == "TE"


def te_delayed(ours: Values) -> bool:
    """Of those, the ones with delayed scaling."""
    return te(ours) and delayed(ours)


def override(value: Any) -> dict[str, Any]:
    """override_linear_precision: three truth values, or the string that YAML makes of `(false, false, false)`."""
    parts = value if isinstance(value, (list, tuple)) else str(value).strip("()[] ").split(",")
    if len(parts) == 1:  # the wizard's first question
        parts = list(parts) * 3
    if len(parts) != 3:
        raise ValueError("expected three of true and false, for fprop, dgrad and wgrad")
    gemms = ("fprop", "dgrad", "wgrad")
    return {
        f"fp8.override_linear_precision.{gemm}": boolean(part)
        for gemm, part in zip(gemms, parts, strict=True)
    }


def overridden(ours: Values) -> list[bool]:
    """The three values of override_linear_precision."""
    return [ours[f"fp8.override_linear_precision.{gemm}"] for gemm in ("fprop", "dgrad", "wgrad")]


def fp8_format(value: Any) -> dict[str, Any]:
    """HYBRID or E4M3. E5M2 is a choice of Accelerate's that Transformer Engine refuses once the model is prepared."""
    if str(value).strip().lower() == "e5m2":
        raise ValueError("Transformer Engine trains in HYBRID or E4M3, never in E5M2 alone")
    return {"fp8.format": one_of(value, {"hybrid": "hybrid", "e4m3": "e4m3"})}


def held_otherwise(said: str) -> str:
    """The line on the weights of MS-AMP's levels, where `said` has one of them under DeepSpeed."""
    return f"{said}: {HELD}; here O1 and O2 have scaled FP16 without"


def differs_under_deepspeed(ours: Values) -> list[str]:
    """Lines for recipes of MS-AMP's levels."""
    if (level := ours["opt_level"]) not in LEVELS.values():
        return []
    cure = "; opt_level=O3 is that" if level == "O2" else ""
    return [f"opt_level={level}: is written, but {HELD}, not in scaled FP16{cure}"]


def first_layer_runs(said: str) -> str:
    """The line on what Accelerate's own filter leaves out, where `said` has torchao."""
    return (
        f"{said}: {FIRST_LAYER}; here it runs in FP8, and `fp8cfg plan` lists layers for"
        " fp8.exclude"
    )


def differs_under_torchao() -> list[str]:
    """Lines for recipes that torchao runs under Accelerate."""
    return [
        f"fp8.scaling=current: is written, but {FIRST_LAYER}; a filter of your own says otherwise "
        "(AORecipeKwargs.module_filter_func)"
    ]


HANDLER = (
    Entry("fp8_format", fp8_format, lambda ours: ours["fp8.format"].upper(), te),
    same("margin", "fp8.margin", integer, te_delayed),
    same("interval", "fp8.interval", integer, te_delayed),
    same("amax_history_len", "fp8.amax_history_len", integer, te_delayed),
    option(
        "amax_compute_algo",
        "fp8.amax_compute_algo",
        {"max": "max", "most_recent": "most_recent"},
        te_delayed,
    ),
    Entry("override_linear_precision", override, overridden, te),
    same("use_autocast_during_eval", "fp8.use_autocast_during_eval", boolean, te),
    Entry(
        "use_mxfp8_block_scaling",
        lambda value: {"fp8.scaling": "mxfp8"} if boolean(value) else {},
        lambda ours: ours["fp8.scaling"] == "mxfp8" or SILENT,
        te,
    ),
    Entry(
        "opt_level",
        _level,
        lambda ours: ours["opt_level"] if ours["opt_level"] in LEVELS.values() else SILENT,
        lambda ours: engine(ours) == "MSAMP",
    ),
)
"""What fp8_config, and the handler objects, say besides the backend."""


def without_effect(theirs: dict[str, Any], under: str = "") -> list[str]:
    """Take out of `theirs` what its backend does not read; a line for each. `under` stands before each key."""
    word = str(theirs.get(f"{under}backend", "")).strip().lower()
    ours = BACKENDS.get(word, {}).get("backend")
    levels = [f"{under}opt_level"]
    kept = {
        "te": [f"{under}{e.theirs}" for e in HANDLER if e.theirs != "opt_level"],
        "msamp": levels,
        "torchao": [],
    }
    if ours is None:
        return []
    idle = [
        key for e in HANDLER if (key := f"{under}{e.theirs}") in theirs and key not in kept[ours]
    ]
    return [
        f"{shown(key, theirs.pop(key))}: has no effect with backend={word.upper()}" for key in idle
    ]


_GONE = "Transformer Engine 2 knows it no more and drops it without a word"
DOUBTS = {
    "fp8.amax_compute_algo": (
        "Accelerate drops most_recent on the way to Transformer Engine, which takes max"
    ),
    "fp8.interval": _GONE,
    **dict.fromkeys(
        (f"fp8.override_linear_precision.{gemm}" for gemm in ("fprop", "dgrad", "wgrad")), _GONE
    ),
}
"""What Accelerate says and does not carry out."""
