"""Exclusion reasons and shared conversion state, stored on the layers of a converted model.

They are attributes of the layers, not of the model, so that copies and wrappers of the model have them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from fp8cfg.backends import backend_registry
from fp8cfg.backends.autocast_context import autocast
from fp8cfg.backends.backend_choice import Choice
from fp8cfg.backends.ddp_refusal import allow_ddp
from fp8cfg.backends.flops import unwatch
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.protocol import Backend
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.fp8 import FP8, own_scales

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
    `torch_autocast` is the dtype of torch's autocast around a job's given model.
    """

    choice: Choice
    fp8: FP8
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

    def autocast(self, model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """The context in which `model` runs in FP8, or not `enabled`, in high precision."""
        return autocast(self.backend, model, enabled, self.torch_autocast)

    @property
    def backend(self) -> Backend:
        """The code of the backend that converted the layers."""
        return backend_registry.backend(self.choice.backend)

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
        choice, fp8.model_copy(deep=True), own_optimizer, torch_autocast=torch_autocast
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
