"""Precision presets: functions, most of them named as in NeMo and Megatron-Bridge, that read the files under `conf/precision/`.

The values stand in those files and nowhere else; a function returns one as a typed object.
"""

from __future__ import annotations

from typing import Any, Protocol

from fp8cfg.config.errors import ConfigError, suggest
from fp8cfg.config.files import CONF, read_yaml
from fp8cfg.config.precision import Precision

FUNCTIONS = {
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
    "bf16_with_fp8_mixed": "bf16_fp8",
    "fp16_with_fp8_mixed": "fp16_fp8",
    "bf16_with_fp8_delayed_scaling_mixed": "bf16_fp8",
    "fp16_with_fp8_delayed_scaling_mixed": "fp16_fp8",
    "bf16_with_fp8_current_scaling_mixed": "bf16_fp8_current",
    "fp16_with_fp8_current_scaling_mixed": "fp16_fp8_current",
    "bf16_with_fp8_subchannel_scaling_mixed": "bf16_fp8_block",
    "fp16_with_fp8_subchannel_scaling_mixed": "fp16_fp8_block",
    "bf16_with_mxfp8_mixed": "bf16_mxfp8",
    "fp16_with_mxfp8_mixed": "fp16_mxfp8",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": "nemotron_h_bf16_fp8_current",
    "nanov2_bf16_with_fp8_current_scaling_mixed": "nanov2_bf16_fp8_block",
    "bf16_with_nvfp4_mixed": "bf16_nvfp4",
    "nemotron_3_super_bf16_with_nvfp4_mixed": "nemotron_3_super_bf16_nvfp4",
    "bf16_precision_aware_mixed": "bf16_precision_aware",
    "bf16_with_fp8_te_fused_adam_mixed": "bf16_fp8_te_fused_adam",
    "bf16_with_fp8_block_deepseek_v3_mixed": "bf16_fp8_block_deepseek_v3",
    "bf16_adamw_fp8_mixed": "bf16_adamw_fp8",
    "bf16_with_fp8_current_coat_mixed": "bf16_fp8_current_coat",
    "fp32": "fp32",
}
"""Preset function -> file under conf/precision/."""


class PresetFunction(Protocol):
    """A precision preset: returns its file's values as a fresh Precision, with those of `changes` replaced, nested keys by
    mappings, as in `bf16_with_fp8_mixed(fp8={"margin": 1})`. Raises ConfigError as assignment does."""

    def __call__(self, **changes: Any) -> Precision: ...


def choices() -> list[str]:
    """The short names of the shipped presets, sorted."""
    return sorted(p.stem for p in (CONF / "precision").glob("*.yaml"))


def stem(name: str) -> str:
    """The file under conf/precision/ that a preset function, or NeMo's hyphenated spelling of one, names; `name` itself else."""
    spelled = name.replace("-", "_").lower()
    return FUNCTIONS.get(spelled, spelled)


def precision_preset(name: str) -> Precision:
    """The preset `name` as a fresh object: a file's short name, a function's name, or NeMo's hyphenated spelling.

    Raises ConfigError with the nearest name where there is none.
    """
    known = choices()
    if stem(name) not in known:
        raise ConfigError(f"precision={name}: no such precision preset" + suggest(name, [*known, *FUNCTIONS]))
    return Precision(**read_yaml(CONF / "precision" / f"{stem(name)}.yaml"))


def _function(name: str, stem: str) -> PresetFunction:
    def preset(**changes: Any) -> Precision:
        return precision_preset(stem).merged(changes)

    preset.__name__ = preset.__qualname__ = name
    preset.__doc__ = f"The precision preset conf/precision/{stem}.yaml as a fresh Precision; keyword arguments replace keys."
    return preset


PRESETS: dict[str, PresetFunction] = {name: _function(name, stem) for name, stem in FUNCTIONS.items()}
"""Preset functions by name; each is importable from fp8cfg."""
