"""What is left with a model that was converted: the reasons of layers in high precision, and what the converted ones share.

It stands with the layers, not beside the model, so that copies and wrappers of a model have it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from fp8cfg.backends import backend_registry
from fp8cfg.backends.backend_choice import Choice
from fp8cfg.backends.flops import unwatch
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.protocol import Backend
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.fp8 import FP8

REASON = "high_precision_reason"
"""Attribute of a linear layer: why it, or a product of it, stays in high precision."""
PLANNED = "fp8_planned"
"""Attribute of converted layers: what was planned for each, under the name that it had then."""
CONVERSION = "fp8_conversion"
"""Attribute of converted layers: the `Converted` that they share."""


@dataclass
class Converted:
    """The backend of converted layers, their `fp8` node, the steps that were rolled. `own_optimizer` says that a job's optimizer
    rolls them; `forward_passes` counts those of training, and `proved` that the first of them ran in FP8."""

    choice: Choice
    fp8: FP8
    own_optimizer: bool = False
    steps: int = 0
    forward_passes: int = 0
    proved: bool = False

    @property
    def backend(self) -> Backend:
        """The code of the backend."""
        return backend_registry.backend(self.choice.backend)

    def step(self, model: nn.Module) -> None:
        """Roll the histories of `model` and move its scales, as after an optimizer step; amaxes are reduced over all ranks."""
        self.steps += 1
        group = dist.group.WORLD if self.fp8.reduce_amax and dist.is_available() and dist.is_initialized() else None
        self.backend.after_step(model, group, self.steps)


def mark(model: nn.Module, fp8: FP8, plan: Sequence[PlannedLinear], choice: Choice, own_optimizer: bool = False) -> None:
    """Leave with each layer of `plan` what it is to remember."""
    shared = Converted(choice, fp8.model_copy(deep=True), own_optimizer)
    for planned in plan:
        layer = model.get_submodule(planned.name)
        setattr(layer, REASON, planned.reason)
        if planned.fp8:
            setattr(layer, CONVERSION, shared)
            setattr(layer, PLANNED, planned)


def plan_of(model: nn.Module) -> list[PlannedLinear]:
    """What was planned for each converted layer of `model`, under its name there: a wrapper's differ from those of the model."""
    return [replace(vars(layer)[PLANNED], name=name) for name, layer in model.named_modules() if PLANNED in vars(layer)]


def unmark(model: nn.Module) -> None:
    """Take back what `mark` left with layers that were not converted, and what was counted."""
    unwatch(model)
    for layer in model.modules():
        vars(layer).pop(REASON, None)


def converted(model: nn.Module) -> Converted:
    """What the converted layers of `model` share. Raises ConfigError where it has none."""
    for layer in model.modules():
        if isinstance(found := vars(layer).get(CONVERSION), Converted):
            return found
    raise ConfigError("the model has no layers that fp8cfg.convert_model(model, recipe) has converted")
