"""torch.compile in training runs: when to compile, and a check of compiled gradients.

The check compares the first microbatch of a compiled run with eager code. It catches compiler bugs
before they train a model.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8cfg.backends import REFERENCE, registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.data import Batches
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.layer_plan import attention_flops
from fp8cfg.schema.errors import ConfigError, NotFP8Error
from fp8cfg.training.step import check_pass, extra_pass

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.schema.recipe import Recipe

TOLERANCE = 0.5
"""Largest accepted relative error of a compiled gradient: norm(compiled - eager) / norm(eager).

Compiled code rounds bf16 values at other places and FP8 amplifies this. The largest error seen was
0.05 with FP8 and 0.2 with NVFP4. A zero gradient has an error of 1, as has one twice as large.
"""
LOSS_TOLERANCE = 0.02
"""Largest accepted relative error of the compiled loss."""
_LEAST = 1e-4
"""Smallest denominator of a relative error, as a fraction of the global gradient norm.

Some gradients cancel to zero, such as the gradient of the key bias in attention. They consist of
rounding errors only and would have large relative errors.
"""


def compare(job: Job, batches: Batches, step: int, world: World) -> float:
    """Compiles the model and compares loss and gradients of one microbatch with eager code.

    Restores the RNG state and the FP8 state, and clears the gradients. All ranks call it.

    Args:
        job: The job. Its model is compiled afterwards.
        batches: Training data.
        step: Step with the microbatch to compare, counted from 0.
        world: Ranks of the run.

    Returns:
        The largest relative error of a gradient on this rank.

    Raises:
        NotFP8Error: The loss or a gradient exceeds its tolerance. All ranks raise it.
    """
    loss, gradients = _run_pass(job, batches, step, world)
    job.compile_model()
    compiled_loss, compiled_gradients = _run_pass(job, batches, step, world)
    name, error = _largest_difference(compiled_gradients, gradients)
    problem = ""
    # "not <=" instead of ">": a NaN must fail the check.
    if not error <= TOLERANCE:
        problem = f"the gradient of {name} differs by {error:.1%} from the eager one"
    elif loss.isfinite() and not (compiled_loss - loss).abs() <= LOSS_TOLERANCE * loss.abs():
        problem = f"the loss is {compiled_loss.item():.4g}, the eager one {loss.item():.4g}"
    # A collective: ranks without a problem would otherwise wait for the failed one.
    if world.any(bool(problem)):
        raise NotFP8Error(
            f"torch {torch.__version__} compiles this recipe wrongly: in the first microbatch"
            f" {problem or 'a gradient of another rank is wrong'}; set trainer.compile=off, or"
            " install another torch"
        )
    return error


def _run_pass(
    job: Job, batches: Batches, step: int, world: World
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the gradients of the first microbatch on the CPU. Restores the job."""
    devices = [job.device] if job.device.type == "cuda" else []
    with extra_pass(job), torch.random.fork_rng(devices=devices), _low_loss_scale(job):
        loss = check_pass(job, batches, step, world).cpu()
        gradients = {
            name: local(p.grad).to("cpu", copy=True)
            for name, p in job.model.named_parameters()
            if p.grad is not None
        }
    return loss, gradients


@contextmanager
def _low_loss_scale(job: Job) -> Iterator[None]:
    """Limits the loss scale to 1024. Overflowed gradients could not be compared.

    By default fp16 runs start at 2^32.
    """
    scaler = job.loss_scaler
    if scaler is None:
        yield
        return
    old_scale = scaler.scale
    scaler.scale = min(old_scale, 1024.0)
    try:
        yield
    finally:
        scaler.scale = old_scale


def _draws_random_numbers(model: nn.Module) -> bool:
    """Whether the forward pass has active dropout."""
    dropouts = (m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    return getattr(model, "draws", False) or any(dropout.p > 0 for dropout in dropouts)


def _largest_difference(
    compiled: Mapping[str, Tensor], eager: Mapping[str, Tensor]
) -> tuple[str, float]:
    """Returns the gradient with the largest relative error, and this error.

    The error is infinite for NaN and for a gradient of only one of the passes. Gradients with an
    overflow in eager code are skipped.
    """
    unmatched = compiled.keys() ^ eager.keys()
    if unmatched:
        return min(unmatched), math.inf
    norms = {name: gradient.float().norm().item() for name, gradient in eager.items()}
    floor = _LEAST * math.hypot(*(norm for norm in norms.values() if math.isfinite(norm)))
    worst_name = ""
    largest_error = 0.0
    for name, norm in norms.items():
        if not math.isfinite(norm):
            continue
        difference = (compiled[name].float() - eager[name].float()).norm().item()
        if difference == 0:
            continue
        relative = math.inf
        if max(norm, floor) > 0:
            relative = difference / max(norm, floor)
        if math.isnan(relative):
            relative = math.inf
        if relative > largest_error:
            worst_name = name
            largest_error = relative
    return worst_name, largest_error


WORTH_FLOPS = {"cpu": 4e13, "cuda": 1e17}
"""Matmul FLOPs of a run above which compilation pays off: a few minutes on one core or GPU."""
_DISABLING = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Environment variables that disable torch.compile or let it fail, if set to 1."""


def compiles(
    recipe: Recipe, plan: Sequence[PlannedLinear], device: str, backend: str = REFERENCE
) -> bool:
    """Whether to compile a new run of `recipe`.

    The answer depends on the recipe and on the compilers of this machine only.

    Args:
        recipe: The recipe.
        plan: Its linear layers.
        device: "cpu" or "cuda".
        backend: Backend of the FP8 layers.

    Raises:
        ConfigError: trainer.compile=on, but the backend or this machine cannot compile.
    """
    setting = recipe.trainer.compile
    if not registry.capabilities(backend).compiles:
        if setting == "on":
            raise ConfigError(
                f"trainer.compile=on: backend={backend} does not support torch.compile; set it to"
                " off"
            )
        return False
    if setting == "on":
        _refuse_disabled()
    cxx = os.environ.get("CXX", "g++")  # Inductor's default
    advice = "set it to off"
    if device == "cuda":
        compiler = "triton"
        can_compile = importlib.util.find_spec("triton") is not None
    else:
        compiler = f"C++ compiler ({cxx})"
        can_compile = shutil.which(cxx) is not None
        if "CXX" in os.environ:
            advice += ", or unset CXX"
    if setting == "on" and not can_compile:
        raise ConfigError(f"trainer.compile=on: no {compiler} here; {advice}")
    if setting != "auto":
        return setting == "on"
    # 6 FLOPs per weight and token: forward, dgrad and wgrad take one multiply and one add each.
    per_token = attention_flops(recipe) + sum(6.0 * p.in_features * p.out_features for p in plan)
    t = recipe.trainer
    flops = per_token * t.global_batch_size * recipe.model.seq_length * t.max_steps
    return can_compile and _disabling_variable() is None and flops >= WORTH_FLOPS[device]


def _disabling_variable() -> str | None:
    """Returns the environment variable that disables torch.compile, or None."""
    return next((name for name in _DISABLING if os.environ.get(name) == "1"), None)


def _refuse_disabled() -> None:
    """Raises ConfigError if an environment variable disables torch.compile."""
    name = _disabling_variable()
    if name is not None:
        raise ConfigError(
            f"{name}=1: this environment variable disables torch.compile; unset it, or set"
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
    """Compiles the model if trainer.compile asks for it, and checks it with `compare`.

    All ranks call it. It does nothing if the job is compiled already.

    Args:
        job: The job.
        before: State of the checkpoint of a resumed run, None for a new run.
        batches: Training data.
        step: First step of the run, counted from 0.
        world: Ranks of the run.
        say: Prints a message.

    Raises:
        ConfigError: The run must be compiled, but cannot be.
        NotFP8Error: Compiled gradients are wrong.
    """
    compiled = compiles(job.recipe, job.plan, job.device.type, job.choice.backend)
    # A resumed run keeps its choice: compiled sums round differently. With compile=auto a changed
    # max_steps or another machine could change the choice.
    if before and before["recipe"]["trainer"]["compile"] == job.recipe.trainer.compile:
        compiled = before["compiled"]
    if not compiled or job.compiled:
        return
    _refuse_disabled()
    say("compiling the model; the first step takes longer")
    if _draws_random_numbers(job.model):
        # Inductor draws other random numbers than eager code, so the gradients would differ.
        job.compile_model()
        return
    began = time.perf_counter()
    error = compare(job, batches, step, world)
    say(
        f"compiled gradients of the first microbatch match the eager ones ({error:.1%} apart at"
        f" most, {time.perf_counter() - began:.1f} s)"
    )
