"""Rotary positions of a Hugging Face config.json: rope_parameters (transformers 5), or rope_theta and rope_scaling before that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8cfg.config.errors import ConfigError
from fp8cfg.config.model import Model, RopeScaling

LLAMA3 = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}


def read_rope(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The rotary keys of the `model` node; those that config.json leaves out are `model`'s. Raises ConfigError for a scaling that
    is not known."""
    given = config.get("rope_parameters") or {}
    full, local = given.get("full_attention", given), given.get("sliding_attention", {})
    if not isinstance(full, Mapping) or not isinstance(local, Mapping):
        raise ConfigError(
            "config.json: rope_parameters: expected an object for each kind of layers"
        )
    scaling = full if given else config.get("rope_scaling") or {}
    said = {
        "rotary_base": full.get("rope_theta", config.get("rope_theta", model.rotary_base)),
        "rotary_percent": full.get(
            "partial_rotary_factor", config.get("partial_rotary_factor", model.rotary_percent)
        ),
        "rope_scaling": _scaling(scaling),
    }
    if model.rotary_base_local is not None:
        said["rotary_base_local"] = local.get(
            "rope_theta", config.get("rope_local_base_freq", model.rotary_base_local)
        )
    return {key: float(value) if isinstance(value, int) else value for key, value in said.items()}


def _scaling(said: Mapping[str, Any]) -> RopeScaling:
    kind = said.get("rope_type", said.get("type", "default"))
    if kind in ("linear", "llama3") and "factor" not in said:
        raise ConfigError(f"config.json: rope_type={kind}: has no factor")
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(factor=said["factor"], rope_type="linear")
    if kind == "llama3":
        return RopeScaling(
            factor=said["factor"],
            **{ours: said[theirs] for theirs, ours in LLAMA3.items() if theirs in said},
        )
    raise ConfigError(
        f"config.json: rope_type={kind}: not in this version; default, linear and llama3 are"
    )


def write_rope(model: Model) -> dict[str, Any]:
    """What config.json says of the rotary keys of `model`, for readers of either spelling."""
    scaling = model.rope_scaling
    stretched: dict[str, Any] = {"rope_type": "default"}
    if scaling.factor != 1.0:
        stretched = {"rope_type": scaling.rope_type, "factor": scaling.factor}
        if scaling.rope_type == "llama3":
            stretched |= {theirs: getattr(scaling, ours) for theirs, ours in LLAMA3.items()}
    full = {"rope_theta": model.rotary_base, **stretched}
    if model.rotary_percent != 1.0:
        full["partial_rotary_factor"] = model.rotary_percent
    before = {
        "rope_theta": model.rotary_base,
        "rope_scaling": stretched if scaling.factor != 1.0 else None,
    }
    if model.rotary_percent != 1.0:
        before["partial_rotary_factor"] = model.rotary_percent
    if model.rotary_base_local is None:
        return {**before, "rope_parameters": full}
    local = {"rope_theta": model.rotary_base_local, "rope_type": "default"}
    return {
        **before,
        "rope_local_base_freq": model.rotary_base_local,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }
