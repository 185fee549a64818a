"""fp8cfg: typed recipes for low-precision training, composed by Hydra, lowered by Fiddle, trained in FP8.

    from fp8cfg.recipes import llama_8b
    recipe = llama_8b(); recipe.trainer.plugins = fp8cfg.bf16_with_fp8_mixed(); recipe.fp8.margin = 1
    job = fp8cfg.build(recipe); fp8cfg.fit(job)

Importing fp8cfg loads neither torch, Hydra nor Fiddle; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PRESETS = "fp8cfg.config.presets"
_WHERE = {
    "Recipe": "fp8cfg.config.recipe", "Model": "fp8cfg.config.model", "RopeScaling": "fp8cfg.config.model",
    "FP8": "fp8cfg.config.fp8", "OverrideLinearPrecision": "fp8cfg.config.fp8",
    "Precision": "fp8cfg.config.precision", "Storage": "fp8cfg.config.precision",
    "Data": "fp8cfg.config.training_nodes", "Optim": "fp8cfg.config.training_nodes", "Trainer": "fp8cfg.config.training_nodes",
    "Strategy": "fp8cfg.config.training_nodes", "Checkpoint": "fp8cfg.config.training_nodes", "Log": "fp8cfg.config.training_nodes",
    "ConfigError": "fp8cfg.config.errors", "NotFP8Error": "fp8cfg.config.errors", "recipe": "fp8cfg.config.recipe_registry",
    "compose": "fp8cfg.composition", "from_yaml": "fp8cfg.composition", "to_yaml": "fp8cfg.composition",
    "lower": "fp8cfg.builder", "build": "fp8cfg.builder", "Job": "fp8cfg.builder",
    "fit": "fp8cfg.training.loop", "coverage": "fp8cfg.report.coverage",
    "convert_model": "fp8cfg.conversion.convert", "convert_back": "fp8cfg.conversion.convert",
    "has_fp8_layers": "fp8cfg.conversion.convert",
    "has_transformer_engine_layers": "fp8cfg.conversion.convert", "contextual_fp8_autocast": "fp8cfg.conversion.autowrap",
    "apply_fp8_autowrap": "fp8cfg.conversion.autowrap",
}
_PRESET_NAMES = (
    "bf16_mixed", "fp16_mixed", "fp32", "bf16_with_fp8_mixed", "fp16_with_fp8_mixed",
    "bf16_with_fp8_delayed_scaling_mixed", "fp16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed", "fp16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed", "fp16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed", "fp16_with_mxfp8_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed", "nanov2_bf16_with_fp8_current_scaling_mixed",
    "bf16_with_nvfp4_mixed", "nemotron_3_super_bf16_with_nvfp4_mixed",
    "bf16_precision_aware_mixed", "bf16_adamw_fp8_mixed", "bf16_with_fp8_te_fused_adam_mixed",
    "bf16_with_fp8_block_deepseek_v3_mixed", "bf16_with_fp8_current_coat_mixed",
)
__all__ = [*_WHERE, *_PRESET_NAMES]


def __getattr__(name: str) -> Any:
    if name in _PRESET_NAMES:
        return importlib.import_module(_PRESETS).PRESETS[name]
    if name == "interop":
        return importlib.import_module("fp8cfg.interop")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'fp8cfg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
