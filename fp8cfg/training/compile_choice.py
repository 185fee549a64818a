"""Choice of torch.compile: a rule of the recipe and the machine's compiler alone, so that a resumed run decides alike."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from fp8cfg.backends import REFERENCE, backend_registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.errors import ConfigError, NotFP8Error
from fp8cfg.config.recipe import Recipe
from fp8cfg.job import Job
from fp8cfg.report.coverage import planned
from fp8cfg.training.compiled_gradients import compare
from fp8cfg.training.distributed.world import World

WORTH_FLOPS = {"cpu": 4e13, "cuda": 1e17}
"""Matmul FLOPs of a run from which compiling pays for itself: a few minutes of a core, or of a GPU."""
_DISABLING = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Variables that make torch.compile return what it is given, or fail, where they are 1."""


def compiles(
    recipe: Recipe, plan: Sequence[PlannedLinear], device: str, backend: str = REFERENCE
) -> bool:
    """Whether this run is compiled. Raises ConfigError where trainer.compile=on and it cannot be."""
    wanted = recipe.trainer.compile
    if not backend_registry.capabilities(backend).compiles:
        if wanted == "on":
            raise ConfigError(
                f"trainer.compile=on: layers of backend={backend} are not compiled; write off"
            )
        return False
    if wanted == "on":
        _refuse_disabled()
    cxx = os.environ.get("CXX", "g++")  # as Inductor reads it
    there = (
        importlib.util.find_spec("triton") is not None
        if device == "cuda"
        else shutil.which(cxx) is not None
    )
    if wanted == "on" and not there:
        what = "triton" if device == "cuda" else f"C++ compiler ({cxx})"
        unset = ", or unset CXX" if device != "cuda" and "CXX" in os.environ else ""
        raise ConfigError(f"trainer.compile=on: no {what} here; write off{unset}")
    if wanted != "auto":
        return wanted == "on"
    coverage = planned(recipe, plan)
    per_token = coverage.attention_flops + sum(6.0 * p.in_features * p.out_features for p in plan)
    t = recipe.trainer
    there = there and _disabled() is None
    return (
        there
        and per_token * t.global_batch_size * recipe.model.seq_length * t.max_steps
        >= WORTH_FLOPS[device]
    )


def _disabled() -> str | None:
    """The variable that disables torch.compile, if one does."""
    return next((name for name in _DISABLING if os.environ.get(name) == "1"), None)


def _refuse_disabled() -> None:
    if name := _disabled():
        raise ConfigError(
            f"{name}=1: this environment variable disables torch.compile; unset it, or write"
            " trainer.compile=off"
        )


def compile_as_chosen(
    job: Job, before: dict[str, Any] | None, world: World, say: Callable[[str], None]
) -> None:
    """Compile the model of `job` as trainer.compile says; a resumed run, which had the state `before`, as it was then, since
    compiled sums round differently. Raises ConfigError, and NotFP8Error where compiled gradients are wrong.
    """
    compiled = compiles(job.recipe, job.plan, job.device.type, job.choice.backend)
    if before and before["recipe"]["trainer"]["compile"] == job.recipe.trainer.compile:
        compiled = before["compiled"]
    if compiled and not job.compiled:
        _refuse_disabled()
        _compare_compiled(job, world, say)
        say("compiling the model; the first steps take longer")
        job.compile_model()


def _compare_compiled(job: Job, world: World, say: Callable[[str], None]) -> None:
    """On the first rank; where compiled gradients are wrong there, no rank trains."""
    began, wrong = time.perf_counter(), None
    try:
        compared = world.first and compare(job) is not None
    except NotFP8Error as e:
        wrong = e
    if world.any(wrong is not None):
        raise wrong or NotFP8Error("the first rank found compiled gradients wrong; it says which")
    if compared:
        say(
            "compiled gradients of one layer are the eager ones"
            f" ({time.perf_counter() - began:.1f} s)"
        )
