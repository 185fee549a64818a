"""Exclusion reasons and shared conversion state, stored on the layers of a converted model.

They are attributes of the layers, not of the model, so that copies and wrappers of the model have them too.
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
"""Attribute of a job's model."""


def refuse_ddp(model: nn.Module) -> None:
    """Let DistributedDataParallel refuse `model`, and whatever module holds it, unless each of its parameters is whole, of two
    bytes or more, and has, where it trains, a gradient of its own dtype, as in a float32 job of one rank or of a model of one's
    own."""
    vars(model)[_JOB] = True
    _watch()


def allow_ddp(model: nn.Module) -> None:
    """Undo `refuse_ddp`."""
    vars(model).pop(_JOB, None)


@functools.cache
def _watch() -> None:
    """Once in a process."""
    register_module_module_registration_hook(_registered)


def _registered(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    if module is None or not isinstance(owner, DistributedDataParallel):
        return
    of_jobs = [p for part in module.modules() if _JOB in vars(part) for p in part.parameters()]
    if any(hasattr(p, "placements") for p in of_jobs):
        raise ConfigError(
            "DistributedDataParallel: this model is a job's, and FSDP2 has its parameters and sums"
            " their gradients; leave the model out of it"
        )
    if any(
        p.dtype.itemsize < 2 or (p.requires_grad and (p.grad_dtype or p.dtype) != p.dtype)
        for p in of_jobs
    ):
        raise ConfigError(
            "DistributedDataParallel: this model is a job's, and it cannot sum weights in FP8, nor"
            " gradients of another dtype than their weights; leave the model out of it and call"
            " job.sum_gradients() before the optimizer's step, or take fp8cfg.convert_model(model,"
            " recipe) and an optimizer of yours"
        )


_ROWS = "rows_multiplied"


def watch(model: nn.Module) -> None:
    """Count the rows that each linear layer of `model`, converted or not, multiplies, and the positions that each convolution
    computes.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and not hasattr(
            module, "kernel_size"
        ):  # as one that took the place of a convolution has
            module.register_forward_pre_hook(_count_input, with_kwargs=True)
        elif isinstance(module, (nn.Linear, _ConvNd)):
            module.register_forward_hook(_count_places)


def unwatch(model: nn.Module) -> None:
    """Remove the hooks of `watch` and the counts."""
    for module in model.modules():
        vars(module).pop(_ROWS, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [
                key for key, hook in hooks.items() if hook in (_count_input, _count_places)
            ]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def multiplied(module: nn.Module) -> int | None:
    """The number of rows that `module` has multiplied; None where none was counted."""
    return vars(module).get(_ROWS)


def count(module: nn.Module, x: Tensor) -> None:
    """Add the rows of `x` [..., in], which `module` is about to multiply, to its count."""
    add_rows(module, x.shape[:-1].numel())


def add_rows(module: nn.Module, rows: int) -> None:
    """Add `rows`, which `module` multiplies, to its count."""
    if torch.compiler.is_compiling() or not (module.training or torch.is_grad_enabled()):
        return
    if (
        torch._C._current_graph_task_id() == -1
    ):  # not in a backward pass: a recomputation there was counted before
        vars(module)[_ROWS] = vars(module).get(_ROWS, 0) + rows


def _count_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = next((given for given in (*args, *kwargs.values()) if isinstance(given, Tensor)), None)
    if x is not None:
        count(module, x)


def _count_places(module: Any, args: tuple[Any, ...], y: Tensor) -> None:
    """A kernel is multiplied once for each position of the output, a transposed one for each of the input."""
    at = args[0] if isinstance(module, _ConvTransposeNd) and args else y
    spatial = at.shape[-(len(module.kernel_size)) :]
    batch = at.shape[: -(len(module.kernel_size) + 1)]
    add_rows(module, math.prod((*batch, *spatial)))


REASON = "high_precision_reason"
"""Attribute of a linear layer: why it, or a product of it, stays in high precision."""
PLANNED = "fp8_planned"
"""Attribute of converted layers: what was planned for each, under the name that it had then."""
CONVERSION = "fp8_conversion"
"""Attribute of converted layers: the `Converted` that they share."""


@dataclass
class Converted:
    """State that all converted layers of a model share: their backend, their `fp8` node, and the number of steps whose histories
    were rolled. `own_optimizer` says that a job's optimizer rolls them. Of autowrap `forward_passes` counts those of training,
    `proved` says that the first of them ran in FP8, and `under_way` counts its contexts that are entered, one inside of another.
    `engaged` says that a layer has multiplied in FP8, `checked` that a step has found it out; `asked_off` that the last context of
    a training pass was disabled; `share_said` that the share of FP8 was looked at.
    `torch_autocast` is the dtype of torch's autocast around a job's given model. `plan` has all linear layers of the model, under
    the names that they had when it was converted.
    """

    choice: Choice
    fp8: FP8
    plan: Sequence[PlannedLinear] = ()
    own_optimizer: bool = False
    steps: int = 0
    forward_passes: int = 0
    proved: bool = False
    under_way: int = 0
    engaged: bool = False
    checked: bool = False
    asked_off: bool = False
    share_said: bool = False
    torch_autocast: str = ""

    def __getstate__(self) -> dict[str, Any]:
        """A copy (copy.deepcopy, torch.save) was not seen in FP8 yet: its first backward pass is checked."""
        return {**vars(self), "engaged": False, "checked": False}

    def autocast(self, model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """The context in which `model` runs in FP8, or not `enabled`, in high precision."""
        return autocast(self.backend, model, enabled, self.torch_autocast)

    @property
    def backend(self) -> Backend:
        """The code of the backend that converted the layers."""
        return registry.backend(self.choice.backend)

    def step(self, model: nn.Module) -> None:
        """Roll the histories of `model` and move its scales, as after an optimizer step; amaxes are reduced over all ranks."""
        self.steps += 1
        there = dist.is_available() and dist.is_initialized()
        group = None if own_scales(self.fp8) or not there else dist.group.WORLD
        self.backend.after_step(model, group, self.steps)


def mark(
    model: nn.Module,
    fp8: FP8,
    plan: Sequence[PlannedLinear],
    choice: Choice,
    own_optimizer: bool = False,
    torch_autocast: str = "",
) -> None:
    """Store the exclusion reason, and for converted layers plan and shared state, on each layer of `plan`."""
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
    """The plan of each converted layer of `model`, under its name there: names in a wrapper differ from the model's own."""
    return [
        replace(vars(layer)[PLANNED], name=name)
        for name, layer in model.named_modules()
        if PLANNED in vars(layer)
    ]


def replaced_layers(model: nn.Module, plan: Sequence[PlannedLinear]) -> list[str]:
    """Returns a line for each FP8 layer of `plan` that is no longer a layer of `model`.

    Args:
        model: The converted model. Its wrappers may have renamed layers since the conversion.
        plan: What was planned when the model was converted.
    """
    present = {vars(layer)[PLANNED].name for layer in model.modules() if PLANNED in vars(layer)}
    return [
        f"{planned.name}: planned in FP8, and no longer a converted layer of the model; convert"
        " the model after the last layer is replaced"
        for planned in plan
        if planned.fp8 and planned.name not in present
    ]


def with_current_names(model: nn.Module, plan: Sequence[PlannedLinear]) -> list[PlannedLinear]:
    """Returns `plan` with the names that its FP8 layers have now, for example inside a wrapper."""
    return [planned for planned in plan if not planned.fp8] + plan_of(model)


def unmark(model: nn.Module) -> None:
    """Remove the marks of layers that were not converted, the row counts, and what autowrap and `build` have put on modules."""
    unwatch(model)
    for module in model.modules():
        allow_ddp(module)
        vars(module).pop(REASON, None)
        if autowraps(vars(module).get("forward")):
            del vars(module)["forward"]
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if autowraps(hook)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def autowraps(function: object) -> bool:
    """Whether it is what `apply_fp8_autowrap` enters by: a `forward`, or a hook, which is a method."""
    return hasattr(getattr(function, "__self__", function), "autowraps")


def converted(model: nn.Module) -> Converted:
    """The state that the converted layers of `model` share. Raises ConfigError where no layer is converted."""
    for layer in model.modules():
        if isinstance(found := vars(layer).get(CONVERSION), Converted):
            return found
    raise ConfigError(
        "the model has no layers that fp8cfg.convert_model(model, recipe) has converted"
    )
