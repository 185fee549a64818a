"""Implied settings of another project: what its FP8 library does although no key says so, and the GPUs that it requires."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from fp8cfg.config.backend_capabilities import capabilities
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.precision import Precision
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.rules_fsdp import KEPT
from fp8cfg.config.storage import COLUMNS, of_level
from fp8cfg.interop.key_table import Values
from fp8cfg.interop.precision_effect import changed
from fp8cfg.layer_plan import plan
from fp8cfg.scalings import SCALINGS

_KEPT = tuple(f"fp8.override_linear_precision.{gemm}" for gemm in ("fprop", "dgrad", "wgrad"))
_MSAMP = {"fp8.amax_history_len": 16, "fp8.reduce_amax": False, "storage.accumulate": "stored"}
"""What MS-AMP does that is not our default."""
_PARALLEL = tuple(
    f"trainer.strategy.{kind}_parallel_size"
    for kind in ("tensor_model", "pipeline_model", "context")
)
_ALONE = "MS-AMP shards, and has O3, through DeepSpeed alone"


def by_backend(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    """Put into `ours` what the backend does that it names, or another backend where that one could not run it. A line for each
    thing that is not as somebody wrote it, in their words (`origin`)."""
    lines = _under_fsdp(ours, origin) if ours.get("storage.shard") == "fsdp" else []
    under = {"te": _under_te, "msamp": _under_msamp}.get(ours.get("backend", "auto"))
    return lines + (under(ours, origin) if under else []) + _compiled(ours, origin)


def contradictions(ours: Values, origin: Mapping[str, str]) -> list[str]:
    """Lines on what that library has not either: MS-AMP's levels beside weights that are split."""
    levelled = ours.get("fp8.enabled") and (ours.get("backend") == "msamp" or ours.get("opt_level"))
    if not levelled or ours.get("storage.shard") != "fsdp":
        return []
    both = list(
        dict.fromkeys(
            origin[key] for key in ("storage.shard", "opt_level", "backend") if key in origin
        )
    )[:2]
    return [
        f"{' and '.join(both)}: MS-AMP splits no weights; write DeepSpeed's ZeRO stage 1 or 2, or"
        " drop MS-AMP"
    ]


def _compiled(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    backend = ours.get("backend", "auto")
    if ours.get("trainer.compile") != "on" or capabilities(backend).compiles:
        return []
    del ours["trainer.compile"]
    return [
        f"{origin.get('trainer.compile', 'trainer.compile=on')}: layers of backend={backend} are"
        " not compiled here"
    ]


def _under_fsdp(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    sums = ("fp32", "bf16", ours.get("precision.compute", "bf16"))
    kept = {f"storage.{column}": (codec,) for column, codec in KEPT.items()} | {
        "storage.comm": sums
    }
    others = [key for key, codecs in kept.items() if ours.get(key, codecs[0]) not in codecs]
    for key in others:
        del ours[key]
    why = (
        "storage.shard=fsdp keeps weights, gradients and moments in float32, and sums gradients in"
        " that or bf16"
    )
    return [
        f"{said}: {why}" for said in dict.fromkeys(origin[key] for key in others if key in origin)
    ]


def _under_te(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    delayed = SCALINGS[ours.get("fp8.scaling", "delayed")].history
    kept = [key for key in _KEPT if ours.get(key)]
    both = not delayed and kept == [*_KEPT[1:]]  # its backward_override
    lacking = [
        key
        for key in ("fp8.interval", "fp8.multi_head_attention", *(() if both else kept))
        if key in changed(ours)
    ]
    lacking += ["storage.shard=fsdp"] if ours.get("storage.shard") == "fsdp" else []
    if lacking:
        del ours["backend"]
        return (
            [f"{origin['backend']}: backend stays auto, backend=te has no {', '.join(lacking)}"]
            if "backend" in origin
            else []
        )
    if delayed:
        ours["fp8.first_step"] = "te"
    return []


def _under_msamp(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    columns = [key for column in COLUMNS if (key := f"storage.{column}") in ours]
    lines = [
        f"{origin[key]}: MS-AMP's level says what is stored and sent"
        for key in columns
        if key in origin
    ]
    for key in columns:
        del ours[key]
    ours |= _MSAMP
    if ours.get("opt_level") == "O3" or ours.get("storage.shard", "none") not in ("auto", "none"):
        stored = of_level(Precision(backend="msamp", opt_level=ours.get("opt_level")))
        ours |= {
            f"storage.{column}": codec for column, codec in stored.items() if codec == "fp8_pow2"
        }
        ours |= {"backend": "native", "opt_level": ours.get("opt_level", "O2")}
        lines += (
            [f"{origin['backend']}: backend=native with the same storage; {_ALONE}"]
            if "backend" in origin
            else []
        )
    return list(dict.fromkeys(lines))


def rescaled(key: str, ours: Values, back: Values) -> bool:
    """Whether `key` is a column that MS-AMP, by which a recipe is read back, holds under scales of its own."""
    return (ours[key], back[key]) == ("fp8", "fp8_pow2")


def why(key: str, ours: Values, back: Values) -> str:
    """Why `key` is read back otherwise, where the other side's library is the reason; empty where it is not."""
    if key == "backend":
        reasons = {
            ("te", "auto"): "backend=te has not all that is asked for",
            ("msamp", "native"): _ALONE,
        }
        return reasons.get((ours[key], back[key]), "")
    if key == "fp8.first_step" and back[key] == "te":
        return "Transformer Engine begins with scale 1"
    if rescaled(key, ours, back) or (
        back["opt_level"] and key in _MSAMP and back[key] == _MSAMP[key]
    ):
        return f"MS-AMP has {str(back[key]).lower()}"
    return ""


def output_layer(recipe: Recipe) -> list[str]:
    """Leave the output layer of `recipe` in high precision where its sizes fit no FP8; a line on that."""
    if not recipe.fp8.output_layer:
        return []
    try:
        plan(recipe)
    except ConfigError as e:
        misfits = [line for line in e.problems if line.startswith("fp8.output_layer=")]
        recipe.fp8.output_layer = recipe.fp8.output_layer and not misfits
        return [
            line.replace("has no effect, its layers stay", "this one stays") for line in misfits
        ]
    return []


def gpus(recipe: Recipe, ours: Values) -> list[str]:
    """Give `recipe` as many GPUs as the parallel sizes in `ours` multiply to, unless it has a multiple of them; a line on that."""
    trainer, size = recipe.trainer, recipe.trainer.strategy.size
    if trainer.num_nodes * trainer.devices % size == 0 or not any(key in ours for key in _PARALLEL):
        return []
    trainer.devices = gcd(size, 8)
    trainer.num_nodes = size // trainer.devices
    return [
        f"trainer.num_nodes={trainer.num_nodes} and trainer.devices={trainer.devices}: not said"
        f" there; tensor x pipeline x context parallel = {size} GPUs"
    ]
