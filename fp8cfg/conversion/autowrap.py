"""FP8 autowrap: a model that enters FP8 by itself, through functions named as in Accelerate.

    fp8cfg.convert_model(model, recipe)
    fp8cfg.apply_fp8_autowrap(model, recipe)    # and then any loop, a Trainer's or Accelerate's

It enters by hooks and by `forward`: TRL puts a forward of its own in the place of the model's, and hooks stay; PEFT calls
`forward`, which hooks do not see. Entered by both, a pass is one pass.
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
from fp8cfg.conversion.convert import GIVE_WAY, given_recipe, no_recipe, prove, strangers
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import preset_keys, spelled
from fp8cfg.schema.recipe import Recipe


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """`model_forward`, which is bound, as a function of the model and its arguments that runs it in FP8: while the model is in
    training mode, or always with `use_during_eval` or the recipe's fp8.use_autocast_during_eval. `recipe` is what `convert_model`
    was given, or equal to it.

    A training pass first rolls the histories of the pass before it, as Transformer Engine does for each forward pass: call no
    `step` beside it (the optimizer of a job rolls by itself). The pass after the first training pass raises NotFP8Error where
    that did not run in FP8, or a converted layer ran outside of it. Raises ConfigError where the layers were converted with
    another `fp8` node than the recipe's.
    Compile a model before, not after."""
    recipe = given_recipe(recipe)
    refuse_if(no_recipe(recipe))
    owner, function = (
        getattr(model_forward, "__self__", None),
        getattr(model_forward, "__func__", None),
    )

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, nn.Module):
            raise ConfigError(
                "contextual_fp8_autocast: its function takes the model first, not a"
                f" {type(self).__name__}; write model.forward = types.MethodType(function, model),"
                " or apply_fp8_autowrap(model, recipe)"
            )
        with _pass(self, recipe, use_during_eval):
            if function is not None and isinstance(
                self, type(owner)
            ):  # a copy of the model runs itself
                return function(self, *args, **kwargs)
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = function or model_forward  # type: ignore[attr-defined]
    return forward


def apply_fp8_autowrap(model: nn.Module, recipe: Any) -> nn.Module:
    """Let `model` run in FP8 by itself, whether it is called or its `forward` is: see `contextual_fp8_autocast`. `model` holds
    converted layers, and may be a wrapper such as DistributedDataParallel. Raises ConfigError where it holds none, or is wrapped
    already."""
    recipe = given_recipe(recipe)
    refuse_if(strangers(recipe, model))
    refuse_if(_other(converted(model).fp8, recipe.fp8))
    if any(autowraps(hook) for hook in model._forward_pre_hooks.values()):
        raise ConfigError("apply_fp8_autowrap: this model's forward enters FP8 already")
    forward = partial(
        contextual_fp8_autocast(model.forward, recipe), model
    )  # a method would be unpickled as the class's own
    if not inspect.ismethod(
        model.forward
    ):  # what it wraps has no `self` for `partial` to take away
        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    forward.autowraps = True  # type: ignore[attr-defined]
    model.forward = forward
    hooks = PassHooks(recipe)
    model.register_forward_pre_hook(hooks.enter, prepend=True)
    model.register_forward_hook(hooks.leave, always_call=True)
    return model


class PassHooks:
    """The forward hooks of one autowrapped model. What is compiled has none: there its `forward` enters."""

    autowraps = True

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.entered: list[AbstractContextManager[None]] = []

    def enter(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if (
            len(self.entered) == converted(model).under_way
        ):  # none of its forwards is under way: a call before was interrupted,
            self._close()  # by what is no Exception (Ctrl-C), after which torch calls no hook
        context = _pass(model, self.recipe)
        context.__enter__()
        self.entered.append(context)

    def leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if (
            not torch.compiler.is_compiling() and self.entered
        ):  # empty where a hook in front of `enter` raised
            self.entered.pop().__exit__(None, None, None)

    def _close(self) -> None:
        while self.entered:
            self.entered.pop().__exit__(None, None, None)


@contextmanager
def _pass(model: nn.Module, recipe: Recipe, use_during_eval: bool = False) -> Iterator[None]:
    """A forward pass of `model`. One inside of another is the same pass: nothing is rolled or proved anew."""
    state = converted(model)
    refuse_if(_other(state.fp8, recipe.fp8))
    if not state.under_way:
        if state.forward_passes and not state.proved:
            prove(model, state.plan, state.choice, recipe.fp8)
            state.proved = True
        if model.training and torch.is_grad_enabled():
            if state.forward_passes and not state.own_optimizer:
                state.step(model)
            state.forward_passes += 1
    enabled = model.training or use_during_eval or recipe.fp8.use_autocast_during_eval
    state.under_way += 1
    try:
        with state.autocast(model, enabled):
            yield
    finally:
        state.under_way -= 1


def _other(built: FP8, asked: FP8) -> list[str]:
    """A line for each key of the `fp8` node in which the layers differ from the recipe; those of evaluation and of the proof
    are read anew."""
    late = {"use_autocast_during_eval", "min_coverage", *(preset_keys(asked) & GIVE_WAY)}
    return [
        f"fp8.{key}={spelled(now)}: the model's layers were converted with {spelled(then)}; convert it again"
        for key, then in built
        if key not in late and then != (now := getattr(asked, key))
    ]
