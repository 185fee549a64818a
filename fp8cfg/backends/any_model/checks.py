"""First pass in FP8: the check, unasked, that a converted model multiplies in FP8 at all, at its first backward pass or step.

A loop may never enter the autocast context: it forgot to, or a library replaced the `forward` that enters it (TRL), or calls
another one past it. Its losses are then those of high precision, and nothing else tells.

What is accused is training: a gradient that comes back to a layer, or has reached a weight, while no layer has multiplied in FP8.
An evaluation has no gradient, a layer that a step leaves out has no product, and an autocast context that was disabled was asked
for. Compiled passes are not looked at one by one; the step after them is.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8cfg.backends.any_model.conversion_state import CONVERSION, PLANNED, Converted, converted
from fp8cfg.backends.gemm_plan import HIGH_PRECISION
from fp8cfg.backends.protocol import Observed
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.schema.errors import NotFP8Error

_CURE = (
    "run the model inside of its autocast context, or call fp8cfg.apply_fp8_autowrap(model,"
    " recipe); for training in high precision on purpose enter autocast(enabled=False)"
)


def watch(model: nn.Module) -> None:
    """Look at the backward passes through the converted layers of `model` until one of these has multiplied in FP8."""
    for layer in model.modules():
        if PLANNED in vars(layer):
            layer.register_forward_hook(_look)


def unwatch(model: nn.Module) -> None:
    """Remove the hooks of `watch`."""
    for layer in model.modules():
        for key in [key for key, hook in layer._forward_hooks.items() if hook is _look]:
            del layer._forward_hooks[key]


def entered(model: nn.Module, enabled: bool) -> None:
    """Note that an autocast context of `model` was entered, or, not `enabled`, that training in high precision was asked for."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        converted(model).asked_off = not enabled


def check(model: nn.Module) -> bool:
    """Whether this is the first step of `model` after one of its converted layers has multiplied in FP8. Raises NotFP8Error where
    it was trained and none has; each step asks until one has."""
    state = converted(model)
    if state.checked:
        return False
    seen = state.backend.observed(model)
    state.checked = state.engaged = state.engaged or any(any(ran.values()) for ran in seen.values())
    asked_off, state.asked_off = state.asked_off, False
    if not state.engaged and not asked_off and _trained(model, seen):
        raise NotFP8Error(f"no layer multiplied in FP8 before this step; {_CURE}")
    return state.engaged


def _trained(model: nn.Module, seen: Observed) -> bool:
    """Whether a backward pass went through a converted layer, or reached its weight otherwise; one that another module shares may
    have its gradient from there."""
    if any(ran.get(gemm) == HIGH_PRECISION for ran in seen.values() for gemm in ("dgrad", "wgrad")):
        return True
    shared = shared_weights(model)
    weights = [
        layer._parameters.get("weight") for layer in model.modules() if PLANNED in vars(layer)
    ]
    return any(isinstance(w, Tensor) and w.grad is not None and w not in shared for w in weights)


def _look(layer: nn.Module, args: Any, y: Any) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    state: Converted = vars(layer)[CONVERSION]
    # Exactly Tensor: a DTensor or a fake one has no record to read. A layer whose fprop stays in high precision tells nothing.
    if (
        state.engaged
        or type(y) is not Tensor
        or y.is_meta
        or not y.requires_grad
        or not vars(layer)[PLANNED].gemms[0]
    ):
        return
    # Only fprop: the record of a copied layer still has the backward GEMMs of its original.
    if state.backend.observed(layer)[""].get("fprop"):
        state.engaged = True
    else:
        y.register_hook(partial(_refuse, state))


def _refuse(state: Converted, gradient: Tensor) -> None:
    if not (state.engaged or state.asked_off):
        raise NotFP8Error(f"a backward pass, and no layer multiplied in FP8 before it; {_CURE}")


_SUMMING = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Wrappers that sum gradients by themselves."""


class StepWatch:
    """Detects that an optimizer trains the weights while `fp8.step()` is never called, which leaves delayed scaling with the scales
    of its first pass.

    It counts finished steps of torch's optimizers, not writes to the weights: SAM and LBFGS change weights within a step, and
    GradScaler skips steps whose gradients overflow.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = {id(w) for w in weights if w.requires_grad}
        self.updated = False
        # The optimizer module keeps the hook: it must not keep the model alive.
        watch = weakref.ref(self)
        self.hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: _note_update(watch, optimizer)
        )
        weakref.finalize(self, self.hook.remove)

    def entered(self, steps: int) -> None:
        """Called where a training pass begins, after `steps` calls of `fp8.step()`. Warns once."""
        if steps:
            self.hook.remove()
        elif self.updated:
            self.updated = False
            self.hook.remove()
            warnings.warn(
                "weights were updated and fp8.step() was never called, which rolls histories and"
                " moves scales under fp8.scaling=delayed; call it after each optimizer step",
                RuntimeWarning,
                stacklevel=4,
            )


def _note_update(watch: weakref.ref[StepWatch], optimizer: torch.optim.Optimizer) -> None:
    alive = watch()
    # Fused optimizers get the overflow from GradScaler and skip the step themselves.
    overflow = getattr(optimizer, "found_inf", None)
    if alive is None or (overflow is not None and overflow.item()):
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    alive.updated = alive.updated or any(id(p) in alive.weights for p in parameters)


def warn_of_sums(model: nn.Module) -> None:
    """Warn where several ranks step `model` with gradients that were not reduced over the ranks."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and not _is_summed(model):
        warnings.warn(
            f"the gradients of this step were not summed over the {ranks} ranks, so each trains a different model; call job.sum_gradients() before the optimizer's step",
            RuntimeWarning,
            stacklevel=5,
        )


def _is_summed(model: nn.Module) -> bool:
    """Whether a wrapper around `model`, or around one of its layers, reduces gradients. A module does not know its wrappers, so
    all objects of the process are searched, once.
    """
    import gc

    from torch import nn

    if any(
        hasattr(module, "set_requires_gradient_sync") for module in model.modules()
    ):  # FSDP2's fully_shard
        return True
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    wrappers = [
        module
        for module in modules
        if any(base.__name__ in _SUMMING for base in type(module).__mro__)
    ]
    return any(module is model for wrapper in wrappers for module in wrapper.modules())
