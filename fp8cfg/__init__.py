"""fp8cfg: typed recipes for low-precision training, composed by Hydra, lowered by Fiddle, trained in FP8.

    from fp8cfg.recipes import llama_8b
    recipe = llama_8b(); recipe.trainer.plugins = fp8cfg.bf16_with_fp8_mixed(); recipe.fp8.margin = 1
    print(fp8cfg.plan(recipe, gpu="h100", gpus=64)); print(fp8cfg.explain(recipe, "fp8.margin"))
    job = fp8cfg.build(recipe); fp8cfg.fit(job)

Importing fp8cfg loads neither torch, Hydra nor Fiddle; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if (
    TYPE_CHECKING
):  # for type checkers and editors the same names as in _HOMES; "as" makes them public
    from fp8cfg import interop as interop
    from fp8cfg import recipes as recipes
    from fp8cfg.builder import build as build
    from fp8cfg.builder import lower as lower
    from fp8cfg.composition import compose as compose
    from fp8cfg.composition import from_yaml as from_yaml
    from fp8cfg.composition import to_yaml as to_yaml
    from fp8cfg.composition.structured_config import structured_config as structured_config
    from fp8cfg.config.data import Data as Data
    from fp8cfg.config.errors import ConfigError as ConfigError
    from fp8cfg.config.errors import NotFP8Error as NotFP8Error
    from fp8cfg.config.exit_codes import exit_codes as exit_codes
    from fp8cfg.config.fp8 import FP8 as FP8
    from fp8cfg.config.fp8 import OverrideLinearPrecision as OverrideLinearPrecision
    from fp8cfg.config.lora import LoRA as LoRA
    from fp8cfg.config.model import Model as Model
    from fp8cfg.config.model import RopeScaling as RopeScaling
    from fp8cfg.config.precision import Precision as Precision
    from fp8cfg.config.precision import Storage as Storage
    from fp8cfg.config.presets import PresetFunction
    from fp8cfg.config.recipe import Recipe as Recipe
    from fp8cfg.config.recipe_registry import recipe as recipe
    from fp8cfg.config.training_nodes import Checkpoint as Checkpoint
    from fp8cfg.config.training_nodes import Log as Log
    from fp8cfg.config.training_nodes import Optim as Optim
    from fp8cfg.config.training_nodes import Strategy as Strategy
    from fp8cfg.config.training_nodes import Timeout as Timeout
    from fp8cfg.config.training_nodes import Trainer as Trainer
    from fp8cfg.conversion.autowrap import apply_fp8_autowrap as apply_fp8_autowrap
    from fp8cfg.conversion.autowrap import contextual_fp8_autocast as contextual_fp8_autocast
    from fp8cfg.conversion.averaging import Average as Average
    from fp8cfg.conversion.averaging import averaged as averaged
    from fp8cfg.conversion.convert import convert_back as convert_back
    from fp8cfg.conversion.convert import convert_model as convert_model
    from fp8cfg.conversion.convert import has_fp8_layers as has_fp8_layers
    from fp8cfg.conversion.convert import (
        has_transformer_engine_layers as has_transformer_engine_layers,
    )
    from fp8cfg.execution.executor import Executor as Executor
    from fp8cfg.execution.executor import LocalExecutor as LocalExecutor
    from fp8cfg.execution.executor import TorchrunExecutor as TorchrunExecutor
    from fp8cfg.execution.runs import Execution as Execution
    from fp8cfg.execution.runs import run as run
    from fp8cfg.execution.slurm import SlurmExecutor as SlurmExecutor
    from fp8cfg.job import Job as Job
    from fp8cfg.report.coverage import coverage as coverage
    from fp8cfg.report.key_explanation import Explanation as Explanation
    from fp8cfg.report.key_explanation import explain as explain
    from fp8cfg.report.plan_report import Plan as Plan
    from fp8cfg.run_plan import plan as plan
    from fp8cfg.training.callback import Callback as Callback
    from fp8cfg.training.run_folder import RunFolder as RunFolder
    from fp8cfg.training.runs import fit as fit
    from fp8cfg.training.runs import resume as resume

bf16_mixed: PresetFunction
fp16_mixed: PresetFunction
fp32: PresetFunction
bf16_with_fp8_mixed: PresetFunction
fp16_with_fp8_mixed: PresetFunction
bf16_with_fp8_delayed_scaling_mixed: PresetFunction
fp16_with_fp8_delayed_scaling_mixed: PresetFunction
bf16_with_fp8_current_scaling_mixed: PresetFunction
fp16_with_fp8_current_scaling_mixed: PresetFunction
bf16_with_fp8_subchannel_scaling_mixed: PresetFunction
fp16_with_fp8_subchannel_scaling_mixed: PresetFunction
bf16_with_mxfp8_mixed: PresetFunction
fp16_with_mxfp8_mixed: PresetFunction
nemotron_h_bf16_with_fp8_current_scaling_mixed: PresetFunction
nanov2_bf16_with_fp8_current_scaling_mixed: PresetFunction
bf16_with_nvfp4_mixed: PresetFunction
nemotron_3_super_bf16_with_nvfp4_mixed: PresetFunction
bf16_precision_aware_mixed: PresetFunction
bf16_adamw_fp8_mixed: PresetFunction
bf16_with_fp8_te_fused_adam_mixed: PresetFunction
bf16_with_fp8_block_deepseek_v3_mixed: PresetFunction
bf16_with_fp8_current_coat_mixed: PresetFunction
fp16_amp: PresetFunction
bf16_with_fp8_amp: PresetFunction

if not TYPE_CHECKING:  # to a type checker a module with __getattr__ has every name
    _HOMES = {
        "fp8cfg.builder": "build lower",
        "fp8cfg.composition": "compose from_yaml to_yaml",
        "fp8cfg.composition.structured_config": "structured_config",
        "fp8cfg.config.data": "Data",
        "fp8cfg.config.errors": "ConfigError NotFP8Error",
        "fp8cfg.config.exit_codes": "exit_codes",
        "fp8cfg.config.fp8": "FP8 OverrideLinearPrecision",
        "fp8cfg.config.lora": "LoRA",
        "fp8cfg.config.model": "Model RopeScaling",
        "fp8cfg.config.precision": "Precision Storage",
        "fp8cfg.config.recipe": "Recipe",
        "fp8cfg.config.recipe_registry": "recipe",
        "fp8cfg.config.training_nodes": "Checkpoint Log Optim Strategy Timeout Trainer",
        "fp8cfg.conversion.autowrap": "apply_fp8_autowrap contextual_fp8_autocast",
        "fp8cfg.conversion.averaging": "Average averaged",
        "fp8cfg.conversion.convert": (
            "convert_back convert_model has_fp8_layers has_transformer_engine_layers"
        ),
        "fp8cfg.execution.executor": "Executor LocalExecutor TorchrunExecutor",
        "fp8cfg.execution.runs": "Execution run",
        "fp8cfg.execution.slurm": "SlurmExecutor",
        "fp8cfg.job": "Job",
        "fp8cfg.report.coverage": "coverage",
        "fp8cfg.report.key_explanation": "Explanation explain",
        "fp8cfg.report.plan_report": "Plan",
        "fp8cfg.run_plan": "plan",
        "fp8cfg.training.callback": "Callback",
        "fp8cfg.training.run_folder": "RunFolder",
        "fp8cfg.training.runs": "fit resume",
    }
    _HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
    _PRESETS = [name for name, kind in __annotations__.items() if kind == "PresetFunction"]
    __all__ = [*_HOME, "interop", "recipes", *_PRESETS]

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
        if name in ("interop", "recipes"):
            return importlib.import_module(f"fp8cfg.{name}")
        if name in _PRESETS:
            return importlib.import_module("fp8cfg.config.presets").PRESETS[name]
        raise AttributeError(f"module 'fp8cfg' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
