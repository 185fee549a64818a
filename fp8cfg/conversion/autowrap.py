"""FP8 autowrap: a model whose forward enters FP8 by itself, through functions named as in Accelerate.

    fp8cfg.convert_model(model, recipe)
    fp8cfg.apply_fp8_autowrap(model, recipe)    # and then any loop, a Trainer's or Accelerate's
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fp8cfg.backends.exclusions import CONVERSION, converted, plan_of
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.fp8 import FP8
from fp8cfg.config.preset_keys import preset_keys
from fp8cfg.config.recipe import Recipe
from fp8cfg.conversion.convert import prove, strangers
from fp8cfg.conversion.preset_values import GIVE_WAY


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], recipe: Recipe, use_during_eval: bool = False
) -> Callable[..., Any]:
    """`model_forward`, which is bound, as a function of the model and its arguments that runs it in FP8: while the model is in
    training mode, or always with `use_during_eval` or the recipe's fp8.use_autocast_during_eval.

    A training pass first rolls the histories of the pass before it, as Transformer Engine does for each forward pass: call no
    `step` beside it (the optimizer of a job rolls by itself). The pass after the first training pass raises NotFP8Error where
    that did not run in FP8, or a converted layer ran outside of it. Raises ConfigError where the layers were converted with
    another `fp8` node than the recipe's.
    Compile a model before, not after."""
    owner, function = getattr(model_forward, "__self__", None), getattr(model_forward, "__func__", None)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = converted(self)
        refuse_if(_other(state.fp8, recipe.fp8))
        if state.forward_passes and not state.proved:
            prove(self, plan_of(self), state.choice, recipe.fp8)
            state.proved = True
        if self.training and torch.is_grad_enabled():
            if state.forward_passes and not state.own_optimizer:
                state.step(self)
            state.forward_passes += 1
        enabled = self.training or use_during_eval or recipe.fp8.use_autocast_during_eval
        with state.backend.autocast(self, enabled):
            if function is not None and isinstance(self, type(owner)):  # a copy of the model runs itself
                return function(self, *args, **kwargs)
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = function or model_forward  # type: ignore[attr-defined]
    return forward


def apply_fp8_autowrap(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Let `model.forward` run in FP8 by itself: see `contextual_fp8_autocast`. `model` holds converted layers, and may be a
    wrapper such as DistributedDataParallel. Raises ConfigError where it holds none, or its forward is wrapped already."""
    refuse_if(strangers(recipe, model))
    refuse_if(_other(converted(model).fp8, recipe.fp8))
    if hasattr(vars(model).get("forward"), CONVERSION):
        raise ConfigError("apply_fp8_autowrap: this model's forward enters FP8 by itself already")
    forward = partial(contextual_fp8_autocast(model.forward, recipe), model)  # a method would be unpickled as the class's own
    if not inspect.ismethod(model.forward):  # what it wraps has no `self` for `partial` to take away
        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    setattr(forward, CONVERSION, True)
    model.forward = forward
    return model


def _other(built: FP8, asked: FP8) -> list[str]:
    """A line for each key of the `fp8` node in which the layers differ from the recipe; those of evaluation and of the proof
    are read anew."""
    late = {"use_autocast_during_eval", "min_coverage", *(preset_keys(asked) & GIVE_WAY)}
    return [f"fp8.{key}={getattr(asked, key)}: the model's layers were converted with {getattr(built, key)}; convert it anew"
            for key in type(built).model_fields if key not in late and getattr(built, key) != getattr(asked, key)]
