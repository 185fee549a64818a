"""Module swap: nn.Linear to FP8Linear and back, with hooks, training flag and user attributes carried over."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from fp8cfg.backends.casting_linear import cast_as
from fp8cfg.config.errors import NotFP8Error

CARRIED = "carried_attributes"
"""Attribute of a layer that took the place of another: names of the user's own attributes, to be taken back."""
_CLASS = "carried_class"
"""Attribute of a layer that took the place of one of a subclass of nn.Linear: that class, to be given back."""
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def replaced(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` in the place of the module `name` of `model`, under every name it has there, with its training flag, hooks and the
    user's own attributes. A linear layer replaced by an FP8 one raises NotFP8Error if it is still called; of a subclass of
    nn.Linear the FP8 one casts as it did, and the plain one that takes that one's place has its class.
    """
    old = model.get_submodule(name)
    carried = vars(old).get(CARRIED, [key for key in vars(old) if key not in vars(new)])
    for key, value in vars(old).items():
        if key.endswith(_HOOKS):
            value.update(
                vars(new)[key]
            )  # the same dict: a handle of the user's removes its hook from it
            _follow(value.values(), new)
        if key.endswith(_HOOKS) or key in carried or key in ("training", "_is_full_backward_hook"):
            vars(new)[key] = value
    for key, child in old._modules.items():  # adapters
        new._modules.setdefault(key, child)
    if CARRIED not in vars(old):
        vars(new)[CARRIED] = carried
        if isinstance(old, nn.Linear) and type(old) is not nn.Linear:
            vars(new)[_CLASS] = type(old)
            cast_as(old, new)
    elif type(new) is nn.Linear:
        new.__class__ = vars(old).get(_CLASS, nn.Linear)
    for parent in list(model.modules()):
        for leaf, child in parent._modules.items():
            if child is old:
                parent._modules[leaf] = new
    if isinstance(old, nn.Linear) and type(new) is not nn.Linear:
        vars(old)["forward"] = partial(_refuse, name)


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotFP8Error(
        f"{name}: the model calls the layer that an FP8 one has taken the place of; it keeps it"
        " where torch does not see it, such as in a list: keep it in an nn.ModuleList"
    )


def _follow(hooks: Iterable[Any], new: nn.Module) -> None:
    """Point hooks that were registered with their module to `new`; torch keeps a weak reference to it in them."""
    for hook in hooks:
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)


def linear_with(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An nn.Linear that holds exactly these Parameters."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    return linear
