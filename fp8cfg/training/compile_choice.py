"""Choice of torch.compile: a rule of the recipe and the machine's compiler alone, so that a resumed run decides alike."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence

from fp8cfg.backends import REFERENCE, backend_registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.report.coverage import planned

WORTH_FLOPS = {"cpu": 4e13, "cuda": 1e17}
"""Matmul FLOPs of a run from which compiling pays for itself: a few minutes of a core, or of a GPU."""


def compiles(recipe: Recipe, plan: Sequence[PlannedLinear], device: str, backend: str = REFERENCE) -> bool:
    """Whether this run is compiled. Raises ConfigError where trainer.compile=on and it cannot be."""
    wanted = recipe.trainer.compile
    if not backend_registry.capabilities(backend).compiles:
        if wanted == "on":
            raise ConfigError(f"trainer.compile=on: layers of backend={backend} are not compiled; write off")
        return False
    there = importlib.util.find_spec("triton") is not None if device == "cuda" else shutil.which("g++") is not None
    if wanted == "on" and not there:
        raise ConfigError(f"trainer.compile=on: no {'triton' if device == 'cuda' else 'C++ compiler (g++)'} here; write off")
    if wanted != "auto":
        return wanted == "on"
    coverage = planned(recipe, plan)
    per_token = coverage.attention_flops + sum(6.0 * p.in_features * p.out_features for p in plan)
    t = recipe.trainer
    return there and per_token * t.global_batch_size * recipe.model.seq_length * t.max_steps >= WORTH_FLOPS[device]
