"""Checks that a converted model runs in FP8, at its first backward pass or optimizer step.

A loop may never enter the autocast context, for example if a library such as TRL bypasses the
`forward` that enters it. The model then trains in high precision, and nothing else shows it.

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

_ADVICE = (
    "run the forward pass inside autocast() or call fp8cfg.apply_fp8_autowrap(model, recipe); to"
    " train in high precision, use autocast(enabled=False)"
)


def watch(model: nn.Module) -> None:
    """Checks the backward passes through converted layers until one has multiplied in FP8."""
    for layer in model.modules():
        if PLANNED in vars(layer):
            layer.register_forward_hook(_check_forward)


def unwatch(model: nn.Module) -> None:
    """Removes the hooks of `watch`."""
    for layer in model.modules():
        for key, hook in list(layer._forward_hooks.items()):
            if hook is _check_forward:
                del layer._forward_hooks[key]


def note_context(model: nn.Module, enabled: bool) -> None:
    """Records that an autocast context was entered, and whether it was disabled on purpose."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        converted(model).disabled_on_purpose = not enabled


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
    records = state.backend.observed(model)
    if any(any(ran.values()) for ran in records.values()):
        state.engaged = True
    state.checked = state.engaged
    # Each step needs its own disabled context to be exempt.
    disabled_on_purpose = state.disabled_on_purpose
    state.disabled_on_purpose = False
    if not state.engaged and not disabled_on_purpose and _has_trained(model, records):
        raise NotFP8Error(f"no layer ran in FP8 before this step; {_ADVICE}")
    return state.engaged


def _has_trained(model: nn.Module, records: Observed) -> bool:
    """Whether a backward pass went through a converted layer or reached its weight.

    A weight that another module shares may have its gradient from there, so it does not count.
    """
    for ran in records.values():
        if HIGH_PRECISION in (ran.get("dgrad"), ran.get("wgrad")):
            return True
    shared = shared_weights(model)
    for layer in model.modules():
        if PLANNED not in vars(layer):
            continue
        weight = layer._parameters.get("weight")
        if isinstance(weight, Tensor) and weight.grad is not None and weight not in shared:
            return True
    return False


def _check_forward(layer: nn.Module, args: Any, y: Any) -> None:
    """Forward hook: checks that the layer ran in FP8, or lets its backward pass raise."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    state: Converted = vars(layer)[CONVERSION]
    planned_fprop = vars(layer)[PLANNED].gemms[0]
    # A layer with fprop in high precision cannot show whether the context was entered.
    if state.engaged or not planned_fprop:
        return
    # DTensors and fake tensors are subclasses and have no record.
    if type(y) is not Tensor or y.is_meta or not y.requires_grad:
        return
    # Only fprop: the record of a copied layer still has the backward GEMMs of its original.
    if state.backend.observed(layer)[""].get("fprop"):
        state.engaged = True
    else:
        y.register_hook(partial(_refuse, state))


def _refuse(state: Converted, gradient: Tensor) -> None:
    """Gradient hook: raises NotFP8Error if still no layer has multiplied in FP8."""
    if not (state.engaged or state.disabled_on_purpose):
        raise NotFP8Error(f"no layer ran in FP8 before this backward pass; {_ADVICE}")


_SUMMING_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Wrappers that sum gradients over ranks in the backward pass."""


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

    def begin_pass(self, steps: int) -> None:
        """Called when a training pass begins, after `steps` calls of `fp8.step()`. Warns once."""
        if steps:
            self.hook.remove()
        elif self.updated:
            self.updated = False
            self.hook.remove()
            warnings.warn(
                "weights were updated without fp8.step(), which rolls histories and updates scales"
                " under fp8.scaling=delayed; call it after each optimizer step",
                RuntimeWarning,
                stacklevel=5,  # the `with` statement of the user
            )


def _note_update(watch: weakref.ref[StepWatch], optimizer: torch.optim.Optimizer) -> None:
    """Optimizer hook: records that the optimizer has updated one of the weights."""
    step_watch = watch()
    # Fused optimizers get the overflow from GradScaler and skip the step themselves.
    overflow = getattr(optimizer, "found_inf", None)
    if step_watch is None or (overflow is not None and overflow.item()):
        return
    for group in optimizer.param_groups:
        if any(id(p) in step_watch.weights for p in group["params"]):
            step_watch.updated = True


def warn_of_sums(model: nn.Module) -> None:
    """Warns if several ranks step `model` with gradients that were not summed over ranks."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and not _is_summed(model):
        warnings.warn(
            f"the gradients of this step were not summed over the {ranks} ranks, so each trains a"
            " different model; call job.sum_gradients() before the optimizer's step",
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
    for module in modules:
        class_names = {base.__name__ for base in type(module).__mro__}
        if class_names.isdisjoint(_SUMMING_WRAPPERS):
            continue
        if any(part is model for part in module.modules()):
            return True
    return False
