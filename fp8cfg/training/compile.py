"""Choice of torch.compile: a rule of the recipe and the machine's compiler alone, so that a resumed run decides alike."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.backends import REFERENCE, registry
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.building import model as job_parts
from fp8cfg.building.job import Job
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.coverage import planned
from fp8cfg.schema.errors import ConfigError, NotFP8Error
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.recipe import Recipe

TOLERANCE = {"cpu": 0.0, "cuda": 0.01}
"""Largest difference of a compiled tensor from the eager one, as a share of the root mean square of that one. On a CPU both make
the same bits. On a GPU a compiler contracts products and sums, and rounds what it fuses once: a share of a bf16 ulp (0.2 % rms),
and now and then the neighbouring FP8 value. A product whose operand has another scale or format differs by more than one that was
not quantized at all, which is 2.6 % (E4M3) or more away."""
TOKENS, IN_FEATURES, OUT_FEATURES = 256, 128, 384
"""Shape of the layer: whole blocks of every scaling, and no two sizes alike, as in most layers of a model."""


def compare(job: Job) -> float | None:
    """Compare the output and every gradient of one small linear layer, compiled as `job` compiles, with those of an equal one that
    is not. The layer is of the job's backend, scaling and weight storage, with the products of its first layer in FP8; its numbers
    are its own: no random state, no scale and no history of the model moves, and no compilation counts for its code.

    Returns the largest relative difference, None where the job has no layer but torch's own. Raises NotFP8Error, with one line,
    where it is above `TOLERANCE`."""
    if not job.plan:
        return None
    devices = [job.device] if job.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        eager, compiled = _layer(job), _layer(job)
        if all(type(module) is nn.Linear for module in eager):
            return None
        want = _tensors(job, eager, lambda f: f)
        got = _tensors(job, compiled, job.compiler())
    apart = {name: _difference(got[name], tensor) for name, tensor in want.items()}
    name, most = max(apart.items(), key=lambda item: item[1])
    if not most <= (tolerance := TOLERANCE[job.device.type]):
        raise NotFP8Error(
            f"torch {torch.__version__} compiles layers of this recipe wrongly: the {name} of one"
            f" is {most:.2%} away from the eager one ({tolerance:.0%} is allowed); write"
            " trainer.compile=off, or install another torch"
        )
    return most


def _layer(job: Job) -> nn.Sequential:
    """A linear layer as the first one in FP8 of `job`, or its first, on its device, with weights drawn from the seed. It has no
    bias: the gradient of one is a sum in the compiler's own order."""
    like = next((planned for planned in job.plan if planned.fp8), job.plan[0])
    linear = nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False, device="meta").to_empty(device="cpu")
    nn.init.normal_(
        linear.weight,
        std=IN_FEATURES**-0.5,
        generator=torch.Generator().manual_seed(job.recipe.trainer.seed),
    )
    plan = [PlannedLinear("0", IN_FEATURES, OUT_FEATURES, like.gemms, like.reason)]
    model = nn.Sequential(linear).to(job.device)
    job_parts.prepared_model(
        model, _unsharded(job.recipe.precision), plan, job.choice, job.recipe.trainer.seed
    )
    return model


def _unsharded(precision: Precision) -> Precision:
    """`precision` on one rank. FSDP2 gives layers their weights in the dtype of the products."""
    if precision.storage.shard != "fsdp":
        return precision
    return precision.model_copy(
        update={
            "storage": precision.storage.model_copy(update={"shard": "none", "gather": "auto"}),
            "fp8": precision.fp8.model_copy(update={"params": False}),
        }
    )


def _tensors(job: Job, layer: nn.Module, compile: Callable[[Any], Any]) -> dict[str, Tensor]:
    """The output of `layer` and its gradients, by what they are, all float32."""
    dtype, random = (
        DTYPES[job.recipe.precision.compute],
        torch.Generator().manual_seed(job.recipe.trainer.seed),
    )
    x, dy = (
        torch.randn(TOKENS, size, generator=random, dtype=torch.float32).to(job.device, dtype)
        for size in (IN_FEATURES, OUT_FEATURES)
    )
    x.requires_grad_()

    def run(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        return y

    run.__code__ = (
        run.__code__.replace()
    )  # a code object of its own: Dynamo counts compilations of each, and stops at eight
    with registry.backend(job.choice.backend).autocast(layer):
        y = compile(run)(x)
        y.backward(dy.to(y.dtype))
    (weight,) = layer.parameters()
    dx, dw = (
        torch.zeros(1, dtype=torch.float32) if t.grad is None else t.grad.float()
        for t in (x, weight)
    )
    return {"output": y.detach().float(), "input's gradient": dx, "weight's gradient": dw}


def _difference(got: Tensor, want: Tensor) -> float:
    """The root mean square of the difference, as a share of that of `want`; infinite where either has NaN."""
    return (
        0.0
        if torch.equal(got, want)
        else ((got - want).norm() / want.norm()).nan_to_num(nan=torch.inf).item()
    )


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
