"""Imported keys without effect: removed from the recipe, and reported where somebody wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.config.fp8 import ONLY_UNDER
from fp8cfg.config.key_names import full
from fp8cfg.config.recipe import fields
from fp8cfg.interop.key_table import Values
from fp8cfg.scalings import SCALINGS

_LOSS_SCALE = {
    f"precision.{k}"
    for k in (
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
    )
}


def without_effect(ours: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    """Take the values out that would do nothing; a line for each that somebody wrote, in their words (`origin`), and that is not
    our default anyway."""
    lines = []
    for key in list(ours):
        why = _idle(key, ours)
        if why:
            value = ours.pop(key)
            if key in origin and (value != default(key) or why == _FINE):
                lines.append(f"{origin[key]}: {why}")
    formats = SCALINGS[ours.get("fp8.scaling", "delayed")].formats
    if ours.get("fp8.enabled") and len(formats) == 1:
        ours["fp8.format"] = formats[0]
    return list(dict.fromkeys(lines))


_FINE = (
    "MXFP8 and NVFP4 are E4M3 both ways here; E5M2 gradients under fine-grained scales make"
    " training diverge"
)


def _idle(key: str, ours: Values) -> str | None:
    """Why a value does nothing, or None where it does something."""
    scaling = ours.get("fp8.scaling", "delayed")
    if not ours.get("fp8.enabled") and (key.startswith("fp8.") or key in ("backend", "opt_level")):
        return "has no effect, nothing there turns FP8 on"
    if key.startswith("fp8.") and scaling not in ONLY_UNDER.get(
        key.removeprefix("fp8."), (scaling,)
    ):
        return f"has no effect under {scaling} scaling"
    if key == "fp8.format" and ours[key] not in SCALINGS[scaling].formats:
        return _FINE
    if key == "fp8.amax_compute_algo" and ours.get("fp8.amax_history_len") == 1:
        return "has no effect with a history of one"
    if key in _LOSS_SCALE and ours.get("precision.compute") != "fp16":
        return "has no effect, loss scaling is for fp16"
    if key in _LOSS_SCALE and key != "precision.loss_scale" and ours.get("precision.loss_scale"):
        return f"has no effect, the loss scale is {ours['precision.loss_scale']:g} throughout"
    return None


def changed(ours: Values) -> list[str]:
    """The keys that are not our defaults."""
    return [k for k, v in ours.items() if v != default(k)]


def default(key: str) -> Any:
    """Our default of a short key."""
    return fields()[full(key)].get_default(call_default_factory=True)
