"""FP8 autowrap: the forward pass of a model enters FP8 without a context in the training loop.

The functions are named as in Accelerate:

    fp8cfg.convert_model(model, recipe)
    fp8cfg.apply_fp8_autowrap(model, recipe)    # then any loop, a Trainer's or Accelerate's

The model enters FP8 through forward hooks and through its `forward`. Both are needed. TRL replaces
`forward` but keeps hooks. PEFT calls `forward` directly, so hooks do not run. If a pass enters
through both, it still counts as one pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fp8cfg.backends.any_model.conversion_state import autowraps, converted
from fp8cfg.conversion.convert import (
    ADJUSTABLE_KEYS,
    argument_errors,
    prove,
    recipe_errors,
    refuse_emulation_on_gpu,
    to_recipe,
)
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import preset_keys, spelled
from fp8cfg.schema.recipe import Recipe


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Wraps a bound forward method so that it runs in FP8.

    Each training pass first rolls the amax histories of the previous pass, as in Transformer
    Engine. Do not call `Conversion.step` as well. A job's optimizer rolls histories in its own step
    instead. The second training pass checks the first one. Compile the model before this call, not
    after.

    Args:
        model_forward: The bound `forward` method of the converted model.
        recipe: The recipe that `convert_model` got, or an equal one.
        use_during_eval: Also runs evaluation in FP8, as fp8.use_autocast_during_eval does.

    Returns:
        A function of the model and the arguments of `model_forward`. It raises ConfigError if the
        layers were converted with other FP8 settings, or if the model was moved to a GPU after the
        conversion. It raises NotFP8Error if the first training pass did not run in FP8.

    Raises:
        ConfigError: `recipe` is not a recipe.
    """
    recipe = to_recipe(recipe)
    refuse_if(recipe_errors(recipe))
    owner = getattr(model_forward, "__self__", None)
    function = getattr(model_forward, "__func__", None)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, nn.Module):
            raise ConfigError(
                "contextual_fp8_autocast: its function takes the model first, not a"
                f" {type(self).__name__}; write model.forward = types.MethodType(function, model),"
                " or apply_fp8_autowrap(model, recipe)"
            )
        with _forward_pass(self, recipe, use_during_eval):
            # A deep copy of the model must run its own layers, not the layers of the original.
            if function is not None and isinstance(self, type(owner)):
                return function(self, *args, **kwargs)
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = function or model_forward  # type: ignore[attr-defined]
    return forward


def apply_fp8_autowrap(model: nn.Module, recipe: Any) -> nn.Module:
    """Makes a converted model run in FP8 whenever it is called, without an autocast context.

    Passes enter FP8 as described in `contextual_fp8_autocast`.

    Args:
        model: The converted model, or a wrapper around it such as DistributedDataParallel.
        recipe: The recipe that `convert_model` got, or an equal one.

    Returns:
        `model`, changed in place.

    Raises:
        ConfigError: The model has no converted layers, was converted with other FP8 settings, or is
            wrapped already.
    """
    recipe = to_recipe(recipe)
    refuse_if(argument_errors(recipe, model))
    refuse_if(_setting_differences(converted(model).fp8, recipe.fp8))
    if any(autowraps(hook) for hook in model._forward_pre_hooks.values()):
        raise ConfigError("apply_fp8_autowrap: this model's forward enters FP8 already")
    # A partial, not a bound method: pickle would restore a method as the forward of the class.
    forward = partial(contextual_fp8_autocast(model.forward, recipe), model)
    # partial() removes the first parameter from the signature. A forward that is not a method has
    # no `self` there, so its own signature is set.
    if not inspect.ismethod(model.forward):
        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    forward.autowraps = True  # type: ignore[attr-defined]
    model.forward = forward
    hooks = PassHooks(recipe)
    model.register_forward_pre_hook(hooks.enter, prepend=True)
    model.register_forward_hook(hooks.leave, always_call=True)
    return model


class PassHooks:
    """Forward hooks of one autowrapped model.

    They do nothing in compiled code. There the wrapped `forward` enters FP8.
    """

    autowraps = True

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.entered: list[AbstractContextManager[None]] = []

    def enter(self, model: nn.Module, args: Any) -> None:
        """Enters FP8 before a forward pass."""
        if torch.compiler.is_compiling():
            return
        # If all open passes were entered by this hook, an earlier call never left its pass. Torch
        # calls no forward hook after Ctrl-C, because KeyboardInterrupt is not an Exception.
        if len(self.entered) == converted(model).open_passes:
            self._leave_all()
        context = _forward_pass(model, self.recipe)
        context.__enter__()
        self.entered.append(context)

    def leave(self, model: nn.Module, args: Any, output: Any) -> None:
        """Leaves the pass that `enter` began."""
        # The list is empty if another pre-hook raised before `enter` ran.
        if not torch.compiler.is_compiling() and self.entered:
            self.entered.pop().__exit__(None, None, None)

    def _leave_all(self) -> None:
        """Leaves all open passes."""
        while self.entered:
            self.entered.pop().__exit__(None, None, None)


@contextmanager
def _forward_pass(
    model: nn.Module, recipe: Recipe, use_during_eval: bool = False
) -> Iterator[None]:
    """Enters a forward pass of `model`. A nested call belongs to the outer pass."""
    state = converted(model)
    refuse_if(_setting_differences(state.fp8, recipe.fp8))
    if not state.open_passes:
        refuse_emulation_on_gpu(model, state.choice, state.fp8)
        if state.forward_passes and not state.proved:
            prove(model, state.plan, state.choice, recipe.fp8)
            state.proved = True
        if model.training and torch.is_grad_enabled():
            # The histories of the previous pass roll here. Its amaxes are complete only after its
            # backward pass.
            if state.forward_passes and not state.own_optimizer:
                state.step(model)
            state.forward_passes += 1
    enabled = model.training or use_during_eval or recipe.fp8.use_autocast_during_eval
    state.open_passes += 1
    try:
        with state.autocast(model, enabled):
            yield
    finally:
        state.open_passes -= 1


def _setting_differences(built: FP8, requested: FP8) -> list[str]:
    """Returns an error for each FP8 setting that differs between the layers and the recipe."""
    # These keys are read in each pass, so they may change. convert_model itself may change values
    # of a preset to fit the model.
    changeable = {
        "use_autocast_during_eval",
        "min_coverage",
        *(preset_keys(requested) & ADJUSTABLE_KEYS),
    }
    errors = []
    for key, built_value in built:
        value = getattr(requested, key)
        if key not in changeable and built_value != value:
            errors.append(
                f"fp8.{key}={spelled(value)}: the model's layers were converted with"
                f" {spelled(built_value)}; convert it again"
            )
    return errors
