"""Checks that a converted model runs in FP8, at its first backward pass or optimizer step.

A loop may never enter the autocast context. It forgot to, or a library such as TRL replaced or
bypassed the `forward` that enters it. The losses are then high-precision losses, and nothing else
would show the mistake.

Only training counts: a gradient reached a layer or a weight before any layer multiplied in FP8.
Evaluation, skipped layers and disabled autocast contexts are not errors. Compiled passes are
checked in the next step.
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
    "run the forward pass inside autocast() or call fp8cfg.apply_fp8_autowrap(model, recipe); to"
    " train in high precision, use autocast(enabled=False)"
)


def watch(model: nn.Module) -> None:
    """Checks the backward passes through converted layers until one has multiplied in FP8."""
    for layer in model.modules():
        if PLANNED in vars(layer):
            layer.register_forward_hook(_look)


def unwatch(model: nn.Module) -> None:
    """Removes the hooks of `watch`."""
    for layer in model.modules():
        for key in [key for key, hook in layer._forward_hooks.items() if hook is _look]:
            del layer._forward_hooks[key]


def entered(model: nn.Module, enabled: bool) -> None:
    """Records that an autocast context was entered, and whether it was disabled on purpose."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        converted(model).asked_off = not enabled


def check(model: nn.Module) -> bool:
    """Checks the training passes before an optimizer step.

    Returns:
        Whether this is the first step after a layer has multiplied in FP8.

    Raises:
        NotFP8Error: The model was trained, but no layer has multiplied in FP8.
    """
    state = converted(model)
    if state.checked:
        return False
    seen = state.backend.observed(model)
    state.checked = state.engaged = state.engaged or any(any(ran.values()) for ran in seen.values())
    # Each step needs its own disabled context to be exempt.
    asked_off, state.asked_off = state.asked_off, False
    if not state.engaged and not asked_off and _trained(model, seen):
        raise NotFP8Error(f"no layer ran in FP8 before this step; {_CURE}")
    return state.engaged


def _trained(model: nn.Module, seen: Observed) -> bool:
    """Whether a backward pass went through a converted layer or reached its weight.

    A weight that another module shares may have its gradient from there, so it does not count.
    """
    if any(ran.get(gemm) == HIGH_PRECISION for ran in seen.values() for gemm in ("dgrad", "wgrad")):
        return True
    shared = shared_weights(model)
    weights = [
        layer._parameters.get("weight") for layer in model.modules() if PLANNED in vars(layer)
    ]
    return any(isinstance(w, Tensor) and w.grad is not None and w not in shared for w in weights)


def _look(layer: nn.Module, args: Any, y: Any) -> None:
    """Forward hook: checks that the layer ran in FP8, or lets its backward pass raise."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    state: Converted = vars(layer)[CONVERSION]
    # DTensors and fake tensors are subclasses and have no record. A layer with fprop in high
    # precision cannot show whether the context was entered.
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
    """Gradient hook: raises NotFP8Error if still no layer has multiplied in FP8."""
    if not (state.engaged or state.asked_off):
        raise NotFP8Error(f"no layer ran in FP8 before this backward pass; {_CURE}")


_SUMMING = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Wrappers that sum gradients by themselves."""


class StepWatch:
    """Detects a loop that trains the weights but never calls `fp8.step()`.

    Delayed scaling would then keep the scales of its first pass. Finished steps of torch's
    optimizers are counted, not writes to the weights. SAM and LBFGS write several times per step,
    and GradScaler skips steps whose gradients overflow.

    Args:
        weights: Weights of the converted layers.
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
        """Called when a training pass begins, after `steps` calls of `fp8.step()`. Warns once."""
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
    """Optimizer hook: records that the optimizer has updated one of the weights."""
    alive = watch()
    # Fused optimizers get the overflow from GradScaler and skip the step themselves.
    overflow = getattr(optimizer, "found_inf", None)
    if alive is None or (overflow is not None and overflow.item()):
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    alive.updated = alive.updated or any(id(p) in alive.weights for p in parameters)


def warn_of_sums(model: nn.Module) -> None:
    """Warns if several ranks step `model` with gradients that were not summed over ranks."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and not _is_summed(model):
        warnings.warn(
            f"the gradients of this step were not summed over the {ranks} ranks, so each trains a different model; call job.sum_gradients() before the optimizer's step",
            RuntimeWarning,
            stacklevel=5,
        )


def _is_summed(model: nn.Module) -> bool:
    """Whether a wrapper around `model`, or around one of its layers, reduces gradients.

    A module does not know its wrappers, so this searches all objects of the process. Called once.
    """
    import gc

    from torch import nn

    # fully_shard of FSDP2 does not wrap a module. It adds methods to its class.
    if any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):
        return True
    # type(o), not isinstance: proxies with a custom __class__ would run their own code.
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    wrappers = [
        module
        for module in modules
        if any(base.__name__ in _SUMMING for base in type(module).__mro__)
    ]
    return any(module is model for wrapper in wrappers for module in wrapper.modules())
