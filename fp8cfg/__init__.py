"""fp8cfg: typed recipes for low-precision training with Hydra, Fiddle and FP8.

    from fp8cfg.recipes import llama_8b
    recipe = llama_8b(); recipe.trainer.plugins = fp8cfg.bf16_with_fp8_mixed(); recipe.fp8.margin = 1
    print(fp8cfg.plan(recipe, gpu="h100", gpus=64)); print(fp8cfg.explain(recipe, "fp8.margin"))
    job = fp8cfg.build(recipe); fp8cfg.fit(job)

`import fp8cfg` loads neither torch, Hydra nor Fiddle. Each name is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fp8cfg.schema import __version__ as __version__

# For type checkers and editors, the same names as in _HOMES; "as" makes them public.
if TYPE_CHECKING:
    from fp8cfg import interop as interop
    from fp8cfg import recipes as recipes
    from fp8cfg.building import graph
    from fp8cfg.building import graph_tags as graph_tags
    from fp8cfg.building.averaging import Average as Average
    from fp8cfg.building.averaging import averaged as averaged
    from fp8cfg.building.builder import build as build
    from fp8cfg.building.builder import lower as lower
    from fp8cfg.building.job import Job as Job
    from fp8cfg.composition import compose as compose
    from fp8cfg.composition import from_yaml as from_yaml
    from fp8cfg.composition import to_yaml as to_yaml
    from fp8cfg.composition.structured_config import structured_config as structured_config
    from fp8cfg.conversion.autowrap import apply_fp8_autowrap as apply_fp8_autowrap
    from fp8cfg.conversion.autowrap import contextual_fp8_autocast as contextual_fp8_autocast
    from fp8cfg.conversion.convert import convert_back as convert_back
    from fp8cfg.conversion.convert import convert_model as convert_model
    from fp8cfg.conversion.convert import has_fp8_layers as has_fp8_layers
    from fp8cfg.conversion.convert import (
        has_transformer_engine_layers as has_transformer_engine_layers,
    )
    from fp8cfg.execution.executor import Command as Command
    from fp8cfg.execution.executor import Execution as Execution
    from fp8cfg.execution.executor import Executor as Executor
    from fp8cfg.execution.executor import LocalExecutor as LocalExecutor
    from fp8cfg.execution.executor import TorchrunExecutor as TorchrunExecutor
    from fp8cfg.execution.executor import run as run
    from fp8cfg.execution.slurm import SlurmExecutor as SlurmExecutor
    from fp8cfg.numerics.statistics import collect_statistics as collect_statistics
    from fp8cfg.planning.coverage import coverage as coverage
    from fp8cfg.planning.plan_recipe import plan as plan
    from fp8cfg.planning.plan_report import PlanReport
    from fp8cfg.report.key_explanation import Explanation as Explanation
    from fp8cfg.report.key_explanation import explain as explain
    from fp8cfg.run_folder.run_folder import RunFolder as RunFolder
    from fp8cfg.schema.data import Data as Data
    from fp8cfg.schema.errors import ConfigError as ConfigError
    from fp8cfg.schema.errors import NotFP8Error as NotFP8Error
    from fp8cfg.schema.errors import exit_codes as exit_codes
    from fp8cfg.schema.fp8 import FP8 as FP8
    from fp8cfg.schema.fp8 import OverrideLinearPrecision as OverrideLinearPrecision
    from fp8cfg.schema.model import LoRA as LoRA
    from fp8cfg.schema.model import Model as Model
    from fp8cfg.schema.model import RopeScaling as RopeScaling
    from fp8cfg.schema.precision import Precision as Precision
    from fp8cfg.schema.precision import Storage as Storage
    from fp8cfg.schema.presets import PresetFunction
    from fp8cfg.schema.recipe import Recipe as Recipe
    from fp8cfg.schema.recipe_registry import recipe as recipe
    from fp8cfg.schema.training import Checkpoint as Checkpoint
    from fp8cfg.schema.training import Log as Log
    from fp8cfg.schema.training import Optim as Optim
    from fp8cfg.schema.training import Strategy as Strategy
    from fp8cfg.schema.training import Timeout as Timeout
    from fp8cfg.schema.training import Trainer as Trainer
    from fp8cfg.studies.advice import advise as advise
    from fp8cfg.studies.advice import advise_model as advise_model
    from fp8cfg.studies.advice_report import Advice as Advice
    from fp8cfg.studies.comparison import Comparison as Comparison
    from fp8cfg.studies.comparison import compare_runs as compare_runs
    from fp8cfg.studies.parity import parity as parity
    from fp8cfg.studies.parity_report import ParityReport as ParityReport
    from fp8cfg.studies.report import write_report as write_report
    from fp8cfg.studies.run_data import RunData as RunData
    from fp8cfg.studies.run_data import find_runs as find_runs
    from fp8cfg.studies.run_data import read_run as read_run
    from fp8cfg.training.data import run_data as run_data
    from fp8cfg.training.runs import fit as fit
    from fp8cfg.training.runs import resume as resume
    from fp8cfg.training.step_report import Callback as Callback

    graph_nodes = graph
    Plan = PlanReport

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

# To a type checker a module with __getattr__ has every name.
if not TYPE_CHECKING:
    _HOMES = {
        "fp8cfg.building.builder": "build lower",
        "fp8cfg.composition": "compose from_yaml to_yaml",
        "fp8cfg.composition.structured_config": "structured_config",
        "fp8cfg.schema.data": "Data",
        "fp8cfg.schema.errors": "ConfigError NotFP8Error exit_codes",
        "fp8cfg.schema.fp8": "FP8 OverrideLinearPrecision",
        "fp8cfg.schema.model": "LoRA Model RopeScaling",
        "fp8cfg.schema.precision": "Precision Storage",
        "fp8cfg.schema.recipe": "Recipe",
        "fp8cfg.schema.recipe_registry": "recipe",
        "fp8cfg.schema.training": "Checkpoint Log Optim Strategy Timeout Trainer",
        "fp8cfg.conversion.autowrap": "apply_fp8_autowrap contextual_fp8_autocast",
        "fp8cfg.conversion.convert": (
            "convert_back convert_model has_fp8_layers has_transformer_engine_layers"
        ),
        "fp8cfg.building.averaging": "Average averaged",
        "fp8cfg.execution.executor": "Command Execution Executor LocalExecutor TorchrunExecutor run",
        "fp8cfg.execution.slurm": "SlurmExecutor",
        "fp8cfg.building.job": "Job",
        "fp8cfg.planning.coverage": "coverage",
        "fp8cfg.report.key_explanation": "Explanation explain",
        "fp8cfg.planning.plan_report": "Plan",
        "fp8cfg.planning.plan_recipe": "plan",
        "fp8cfg.training.step_report": "Callback",
        "fp8cfg.run_folder.run_folder": "RunFolder",
        "fp8cfg.studies.parity": "parity",
        "fp8cfg.studies.parity_report": "ParityReport",
        "fp8cfg.studies.advice": "advise advise_model",
        "fp8cfg.studies.advice_report": "Advice",
        "fp8cfg.studies.comparison": "Comparison compare_runs",
        "fp8cfg.studies.run_data": "RunData find_runs read_run",
        "fp8cfg.studies.report": "write_report",
        "fp8cfg.training.data": "run_data",
        "fp8cfg.training.runs": "fit resume",
        "fp8cfg.numerics.statistics": "collect_statistics",
    }
    _OWN_NAMES = {"Plan": "PlanReport"}
    """Names that differ in their own modules."""
    _HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
    _PRESETS = [name for name, kind in __annotations__.items() if kind == "PresetFunction"]
    _MODULES = {
        "graph_nodes": "fp8cfg.building.graph",
        "graph_tags": "fp8cfg.building.graph_tags",
        "interop": "fp8cfg.interop",
        "recipes": "fp8cfg.recipes",
    }
    __all__ = [*_HOME, *_MODULES, *_PRESETS]

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), _OWN_NAMES.get(name, name))
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name in _PRESETS:
            return importlib.import_module("fp8cfg.schema.presets").PRESETS[name]
        raise AttributeError(f"module 'fp8cfg' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
