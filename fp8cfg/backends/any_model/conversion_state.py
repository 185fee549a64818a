"""State of a converted model: reasons for high precision, the plan, and counts of rows.

The state consists of attributes of the layers, not of the model. Copies and wrappers of the model
then have it too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fp8cfg.backends import registry
from fp8cfg.backends.autocast import autocast
from fp8cfg.backends.choice import Choice
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.protocol import Backend
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.fp8 import FP8, own_scales

_JOB = "fp8cfg_job_model"
"""Attribute that marks the model of a job for DistributedDataParallel."""


def refuse_ddp(model: nn.Module) -> None:
    """Makes DistributedDataParallel raise ConfigError for `model` if it cannot sum its gradients.

    It needs whole parameters of at least two bytes, with gradients of the same dtype. A float32 job
    on one rank meets these conditions.
    """
    vars(model)[_JOB] = True
    _register_ddp_check()


def allow_ddp(model: nn.Module) -> None:
    """Undoes `refuse_ddp`."""
    vars(model).pop(_JOB, None)


@functools.cache
def _register_ddp_check() -> None:
    """Registers the check, once per process."""
    # DDP offers no hook, but it registers the model as its submodule.
    register_module_module_registration_hook(_check_ddp)


def _check_ddp(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raises ConfigError if DDP wraps the model of a job that it cannot train."""
    if module is None or not isinstance(owner, DistributedDataParallel):
        return
    # The mark is on the job's model, and `module` may be a wrapper around it.
    parameters: list[nn.Parameter] = []
    for part in module.modules():
        if _JOB in vars(part):
            parameters += part.parameters()
    if any(hasattr(p, "placements") for p in parameters):
        raise ConfigError(
            "DistributedDataParallel: FSDP2 shards the parameters of this job's model and sums"
            " their gradients; do not wrap the model"
        )
    if any(_needs_sum_gradients(p) for p in parameters):
        raise ConfigError(
            "DistributedDataParallel: this model is a job's, with FP8 weights or gradients of"
            " another dtype than their weights, which DDP cannot sum; do not wrap the model and"
            " call job.sum_gradients() before the optimizer's step, or use"
            " fp8cfg.convert_model(model, recipe) and your own optimizer"
        )


def _needs_sum_gradients(p: nn.Parameter) -> bool:
    """Whether DDP cannot sum a parameter in FP8, or a gradient of another dtype."""
    if p.dtype.itemsize < 2:
        return True
    return p.requires_grad and (p.grad_dtype or p.dtype) != p.dtype


_ROWS = "rows_multiplied"


def watch(model: nn.Module) -> None:
    """Counts the rows that each linear layer multiplies, and the positions of each convolution.

    Converted and other layers are counted, for the FLOPs of `coverage`.
    """
    for module in model.modules():
        # A linear layer in place of a convolution has its kernel_size, and inputs [batch, in, ...].
        if isinstance(module, nn.Linear) and not hasattr(module, "kernel_size"):
            module.register_forward_pre_hook(_count_input, with_kwargs=True)
        elif isinstance(module, (nn.Linear, _ConvNd)):
            module.register_forward_hook(_count_positions)


def unwatch(model: nn.Module) -> None:
    """Removes the hooks and the counts of `watch`."""
    for module in model.modules():
        vars(module).pop(_ROWS, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if hook in (_count_input, _count_positions):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


def multiplied(module: nn.Module) -> int | None:
    """Returns the number of rows that `module` has multiplied, or None if it was not counted."""
    return vars(module).get(_ROWS)


def count(module: nn.Module, x: Tensor) -> None:
    """Adds the rows of an input `x` [..., in] to the count of `module`."""
    add_rows(module, x.shape[:-1].numel())


def add_rows(module: nn.Module, rows: int) -> None:
    """Adds `rows` to the count of `module`. Evaluation and compiled code are not counted."""
    if torch.compiler.is_compiling() or not (module.training or torch.is_grad_enabled()):
        return
    # Activation checkpointing repeats a forward pass inside the backward pass. The graph task id is
    # -1 outside of backward passes.
    if torch._C._current_graph_task_id() == -1:
        vars(module)[_ROWS] = vars(module).get(_ROWS, 0) + rows


def _count_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: counts the rows of the first tensor argument."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            count(module, argument)
            return


def _count_positions(module: Any, args: tuple[Any, ...], y: Tensor) -> None:
    """Forward hook: counts one GEMM row for each position of a convolution.

    These are positions of the output, or of the input of a transposed convolution.
    """
    tensor = y
    if isinstance(module, _ConvTransposeNd) and args:
        tensor = args[0]
    # [batch, channels, spatial...], or without a batch.
    num_spatial = len(module.kernel_size)
    spatial = tensor.shape[-num_spatial:]
    batch = tensor.shape[: -(num_spatial + 1)]
    add_rows(module, math.prod((*batch, *spatial)))


REASON = "high_precision_reason"
"""Attribute of a linear layer: why it, or one of its GEMMs, stays in high precision."""
PLANNED = "fp8_planned"
"""Attribute of a converted layer: its PlannedLinear, with its name at the conversion."""
CONVERSION = "fp8_conversion"
"""Attribute of converted layers: their shared `Converted`."""


@dataclass
class Converted:
    """State that all converted layers of a model share.

    Attributes:
        choice: The backend.
        fp8: FP8 settings of the conversion.
        plan: Plan of all linear layers, with their names at the conversion.
        own_optimizer: Whether a job's optimizer rolls the histories.
        steps: Steps after which histories were rolled.
        forward_passes: Training passes of autowrap.
        proved: Whether autowrap has checked that its first pass ran in FP8.
        open_passes: Nested contexts of autowrap that are entered now.
        engaged: Whether a layer has multiplied in FP8.
        checked: Whether a step has seen that.
        disabled_on_purpose: Whether the last context of a training pass was disabled.
        coverage_reported: Whether the warning about a low share of FP8 was considered.
        torch_autocast: Dtype of torch.autocast around the custom model of a job, or "".
    """

    choice: Choice
    fp8: FP8
    plan: Sequence[PlannedLinear] = ()
    own_optimizer: bool = False
    steps: int = 0
    forward_passes: int = 0
    proved: bool = False
    open_passes: int = 0
    engaged: bool = False
    checked: bool = False
    disabled_on_purpose: bool = False
    coverage_reported: bool = False
    torch_autocast: str = ""

    def __getstate__(self) -> dict[str, Any]:
        """Resets the checks in a copy, so that its own first backward pass is checked."""
        return {**vars(self), "engaged": False, "checked": False}

    def autocast(self, model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Returns a context in which `model` runs in FP8, or in high precision if not `enabled`."""
        return autocast(self.backend, model, enabled, self.torch_autocast)

    @property
    def backend(self) -> Backend:
        """Code of the backend that converted the layers."""
        return registry.backend(self.choice.backend)

    def step(self, model: nn.Module) -> None:
        """Rolls the histories and updates the scales after an optimizer step.

        Amaxes are reduced over all ranks, unless each rank keeps its own scales.
        """
        self.steps += 1
        group = None
        if dist.is_available() and dist.is_initialized() and not own_scales(self.fp8):
            group = dist.group.WORLD
        self.backend.after_step(model, group, self.steps)


def mark(
    model: nn.Module,
    fp8: FP8,
    plan: Sequence[PlannedLinear],
    choice: Choice,
    own_optimizer: bool = False,
    torch_autocast: str = "",
) -> None:
    """Stores the state of a conversion on the layers of `plan`.

    Args:
        model: The converted model.
        fp8: FP8 settings.
        plan: Plan of its linear layers.
        choice: The backend.
        own_optimizer: As in Converted.
        torch_autocast: As in Converted.
    """
    # A copy: later changes of the recipe must not change the state of the layers.
    shared = Converted(
        choice, fp8.model_copy(deep=True), plan, own_optimizer, torch_autocast=torch_autocast
    )
    for planned in plan:
        layer = model.get_submodule(planned.name)
        setattr(layer, REASON, planned.reason)
        if planned.fp8:
            setattr(layer, CONVERSION, shared)
            setattr(layer, PLANNED, planned)


def plan_of(model: nn.Module) -> list[PlannedLinear]:
    """Returns the plan of each converted layer with its current name, for example in a wrapper."""
    return [
        replace(vars(layer)[PLANNED], name=name)
        for name, layer in model.named_modules()
        if PLANNED in vars(layer)
    ]


def replaced_layers(model: nn.Module, plan: Sequence[PlannedLinear]) -> list[str]:
    """Returns a problem for each FP8 layer of `plan` that is no longer in `model`.

    Args:
        model: The converted model. Its wrappers may have renamed layers since the conversion.
        plan: The plan of the conversion.
    """
    present = {vars(layer)[PLANNED].name for layer in model.modules() if PLANNED in vars(layer)}
    lines = []
    for planned in plan:
        if planned.fp8 and planned.name not in present:
            lines.append(
                f"{planned.name}: planned in FP8, but no longer a converted layer of the model;"
                " convert the model after all layers are replaced"
            )
    return lines


def with_current_names(model: nn.Module, plan: Sequence[PlannedLinear]) -> list[PlannedLinear]:
    """Returns `plan` with the names that its FP8 layers have now, for example inside a wrapper."""
    return [planned for planned in plan if not planned.fp8] + plan_of(model)


def unmark(model: nn.Module) -> None:
    """Removes marks, row counts, and all hooks of autowrap and `build`."""
    unwatch(model)
    for module in model.modules():
        allow_ddp(module)
        vars(module).pop(REASON, None)
        if autowraps(vars(module).get("forward")):
            del vars(module)["forward"]
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if autowraps(hook):
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)


def autowraps(function: object) -> bool:
    """Whether a `forward` or a hook method was added by `apply_fp8_autowrap`."""
    return hasattr(getattr(function, "__self__", function), "autowraps")


def converted(model: nn.Module) -> Converted:
    """Returns the shared state of the converted layers of `model`.

    Raises:
        ConfigError: No layer is converted.
    """
    for layer in model.modules():
        state = vars(layer).get(CONVERSION)
        if isinstance(state, Converted):
            return state
    raise ConfigError("the model has no converted layers; call fp8cfg.convert_model(model, recipe)")
