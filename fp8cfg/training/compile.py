"""Choice of torch.compile, and the comparison of a compiled run's first microbatch with eager code.

The choice depends on the recipe and the compilers of the machine, so that a resumed run decides alike.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.backends import REFERENCE, registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.building.job import Job
from fp8cfg.data import Batches
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS
from fp8cfg.numerics.overflow_counts import pause_overflow_counts
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.coverage import planned_coverage
from fp8cfg.schema.errors import ConfigError, NotFP8Error
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training.step import check_pass

TOLERANCE = 0.5
"""Largest difference of a compiled gradient from the eager one, relative to the norm of the eager one.

Compiled code rounds bf16 values in other places, and FP8 enlarges the difference. The largest seen is 0.05 under FP8 and 0.2 under NVFP4.
A gradient that is zero, of another tensor, or off by a factor of two differs by 1."""
LOSS_TOLERANCE = 0.02
"""Largest relative difference of the compiled loss."""
_LEAST = 1e-4
"""Gradients below this share of the norm of all gradients are compared with it instead of their own norm: sums that cancel, such as
the gradient of a key's bias, are rounding errors."""


def compare(job: Job, batches: Batches, step: int, world: World) -> float:
    """Compiles the model of `job`, and compares the first microbatch of a step with eager code: its loss and every gradient.

    Random state, FP8 state and gradients are as before afterwards.

    Returns:
        The largest relative difference of a gradient on this rank.

    Raises:
        NotFP8Error: On all ranks, if the loss or a gradient of any rank differs by more than the tolerance.
    """
    loss, gradients = _pass(job, batches, step, world)
    job.compile_model()
    compiled_loss, compiled_gradients = _pass(job, batches, step, world)
    name, most = _largest_difference(compiled_gradients, gradients)
    problem = ""
    if not most <= TOLERANCE:
        problem = f"the gradient of {name} differs by {most:.1%} from the eager one"
    elif loss.isfinite() and not (compiled_loss - loss).abs() <= LOSS_TOLERANCE * loss.abs():
        problem = f"the loss is {compiled_loss.item():.4g}, the eager one {loss.item():.4g}"
    if world.any(bool(problem)):
        raise NotFP8Error(
            f"torch {torch.__version__} compiles this recipe wrongly: in the first microbatch"
            f" {problem or 'a gradient of another rank is wrong'}; set trainer.compile=off, or"
            " install another torch"
        )
    return most


def _pass(job: Job, batches: Batches, step: int, world: World) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of the first microbatch, on the host; the state of `job` is restored."""
    buffers = {
        name: buffer.clone()
        for name, buffer in job.model.named_buffers()
        if name.rpartition(".")[2] not in WEIGHT_BUFFERS  # large, and a pass only reads them
    }
    devices = [job.device] if job.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), pause_overflow_counts(), _low_loss_scale(job):
        loss = check_pass(job, batches, step, world).cpu()
    gradients = {
        name: local(p.grad).to("cpu", copy=True)
        for name, p in job.model.named_parameters()
        if p.grad is not None
    }
    job.optimizer.zero_grad()
    with torch.no_grad():
        for name, before in buffers.items():
            job.model.get_buffer(name).copy_(before)
    for layer in fp8_linears(job.model):
        if layer.fsdp_shard is not None:
            layer.fsdp_shard.quantized = (
                None  # the next pass quantizes it again, and records its amax
            )
    return loss, gradients


@contextmanager
def _low_loss_scale(job: Job) -> Iterator[None]:
    """A context with a loss scale of at most 1024. The first one is 2^32, and overflowed gradients cannot be compared."""
    scaler = job.loss_scaler
    if scaler is None:
        yield
        return
    before = scaler.scale
    scaler.scale = min(before, 1024.0)
    try:
        yield
    finally:
        scaler.scale = before


def _draws_random_numbers(model: nn.Module) -> bool:
    dropouts = (m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    return getattr(model, "draws", False) or any(dropout.p > 0 for dropout in dropouts)


def _largest_difference(
    compiled: Mapping[str, Tensor], eager: Mapping[str, Tensor]
) -> tuple[str, float]:
    """The name of the gradient that differs most, and its relative difference.

    It is infinite for NaN, and for a gradient that only one of the two passes has. An eager gradient that overflowed is left out.
    """
    if names := compiled.keys() ^ eager.keys():
        return min(names), math.inf
    norms = {name: gradient.float().norm().item() for name, gradient in eager.items()}
    least = _LEAST * math.hypot(*(norm for norm in norms.values() if math.isfinite(norm)))
    largest = "", 0.0
    for name, norm in norms.items():
        if not math.isfinite(norm):
            continue
        difference = (compiled[name].float() - eager[name].float()).norm().item()
        if difference == 0:
            continue
        relative = difference / max(norm, least) if max(norm, least) else math.inf
        if math.isnan(relative):
            relative = math.inf
        if relative > largest[1]:
            largest = name, relative
    return largest


WORTH_FLOPS = {"cpu": 4e13, "cuda": 1e17}
"""Matmul FLOPs of a run from which compiling pays for itself: a few minutes of a core, or of a GPU."""
_DISABLING = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Variables that make torch.compile return what it is given, or fail, where they are 1."""


def compiles(
    recipe: Recipe, plan: Sequence[PlannedLinear], device: str, backend: str = REFERENCE
) -> bool:
    """Whether this run is compiled. Raises ConfigError where trainer.compile=on and it cannot be."""
    wanted = recipe.trainer.compile
    if not registry.capabilities(backend).compiles:
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
    coverage = planned_coverage(recipe, plan)
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
    job: Job,
    before: dict[str, Any] | None,
    batches: Batches,
    step: int,
    world: World,
    say: Callable[[str], None],
) -> None:
    """Compiles the model of `job` if trainer.compile says so, and compares the first microbatch of `step` with eager code.

    A resumed run, which had the state `before`, is compiled if it was before: compiled sums round differently.

    Raises:
        ConfigError: If trainer.compile=on cannot be followed.
        NotFP8Error: If compiled gradients are wrong.
    """
    compiled = compiles(job.recipe, job.plan, job.device.type, job.choice.backend)
    if before and before["recipe"]["trainer"]["compile"] == job.recipe.trainer.compile:
        compiled = before["compiled"]
    if not compiled or job.compiled:
        return
    _refuse_disabled()
    say("compiling the model; the first step takes longer")
    if _draws_random_numbers(job.model):
        # Inductor draws other random numbers than eager code.
        job.compile_model()
        return
    began = time.perf_counter()
    most = compare(job, batches, step, world)
    say(
        f"compiled gradients of the first microbatch match the eager ones ({most:.1%} apart at"
        f" most, {time.perf_counter() - began:.1f} s)"
    )
