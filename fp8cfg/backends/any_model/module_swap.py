"""Module swap: replaces nn.Linear by FP8Linear and back. Hooks, flags and user attributes stay."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.schema.errors import NotFP8Error

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_AUTOCAST = (torch.bfloat16, torch.float16)


class _NotALinear(Exception):
    """The forward of a layer depends on more than its input, for example on random numbers."""


class Casts(NamedTuple):
    """How a subclass of nn.Linear casts its operands.

    Attributes:
        to: Dtype of the GEMM: "input", "weight" or a fixed dtype.
        back: Whether the output is cast to the dtype of the input.
    """

    to: torch.dtype | str
    back: bool

    def gemm_dtype(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """Returns the dtype of the GEMM for an input and a weight of these dtypes."""
        if isinstance(self.to, torch.dtype):
            return self.to
        return {"input": x, "weight": weight}[self.to]


def casts_of(linear: nn.Linear) -> Casts | None:
    """Returns how a subclass of nn.Linear casts, found by running a small copy of it.

    Args:
        linear: A layer whose class has its own forward.

    Returns:
        The casts, or None if the forward is not F.linear with casts, or cannot be run.
    """
    if linear.weight.is_meta:
        return None
    with (
        torch.random.fork_rng(devices=()),
        torch.enable_grad(),
        torch.autocast(linear.weight.device.type, enabled=False),
    ):
        try:
            small = _small_copy(linear)
            runs = []
            for x in _inputs(small):
                tensors = _run_reproducibly(small, x)
                if tensors is not None:
                    runs.append((x, tensors))
        # User code may raise anything. The layer then stays in high precision.
        except Exception:
            return None
        if not runs:
            return None
        # Values and gradients must have the same bits as a reference with these casts.
        for to in ("input", "weight", *_DTYPES):
            for back in (False, True):
                casts = Casts(to, back)
                reference = partial(_reference, small, casts)
                if all(_same(tensors, _run(reference, small, x)) for x, tensors in runs):
                    return casts
    return None


def differs(linear: nn.Linear) -> bool:
    """Whether a layer's forward runs on a small copy but is not F.linear with casts."""
    if casts_of(linear) is not None:
        return False
    with torch.random.fork_rng(devices=()):
        try:
            small = _small_copy(linear)
            return any(_run_reproducibly(small, x) is not None for x in _inputs(small))
        except _NotALinear:
            return True
        except Exception:
            return False


def cast_as(old: nn.Module, new: nn.Module) -> None:
    """Makes the layer `new` cast like `old`, which it replaces."""
    if not isinstance(old, nn.Linear) or type(old).forward is nn.Linear.forward:
        return
    casts = casts_of(old)
    if casts is not None:
        vars(new)["forward"] = partial(_forward, new, casts)


def _forward(layer: nn.Module, casts: Casts, x: Tensor) -> Tensor:
    """Forward pass of an FP8 layer with the casts of the replaced class.

    torch.autocast does the cast, because all backends follow it for input, weight and bias.
    """
    device = x.device.type
    weight = layer._parameters["weight"]
    assert weight is not None
    run = type(layer).forward
    # Under the user's autocast F.linear casts its operands after the casts of the class.
    if torch.is_autocast_enabled(device):
        y: Tensor = run(layer, x)
    else:
        dtype = casts.gemm_dtype(x.dtype, weight.dtype)
        needs_cast = dtype in _AUTOCAST and dtype != weight.dtype
        autocast_dtype = dtype if dtype in _AUTOCAST else None
        with torch.autocast(device, autocast_dtype, enabled=needs_cast):
            y = run(layer, x.to(dtype))
    if casts.back:
        return y.to(x.dtype)
    return y


def _small_copy(linear: nn.Linear) -> nn.Linear:
    """Returns a copy of `linear` with 16 inputs, 24 outputs, random weights and no hooks."""
    small = copy.copy(linear)
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (24, 16), "bias": (24,)}
    parameters: dict[str, nn.Parameter | None] = {}
    for name, p in linear._parameters.items():
        parameters[name] = None
        if p is not None:
            values = torch.randn(shapes[name], generator=generator, dtype=torch.float32)
            parameters[name] = nn.Parameter(values.to(p.device, p.dtype))
    vars(small).update(_parameters=parameters, in_features=16, out_features=24)
    return small


def _inputs(small: nn.Linear) -> Iterator[Tensor]:
    """Yields inputs [8, 16] and [2, 4, 16] in all dtypes, with small, large and outlier values."""
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    # A forward with a clamp, a norm or its own quantization differs on some of these rows.
    rows[2:4] *= 1e-3
    rows[4:6] *= 1e3
    rows[6, 3] = -5e3
    for dtype in _DTYPES:
        x = rows.to(small.weight.device, dtype)
        yield from (x.clone().requires_grad_(), x.clone().view(2, 4, 16).requires_grad_())


def _run_reproducibly(small: nn.Linear, x: Tensor) -> list[Tensor] | None:
    """Returns output and gradients of the forward of `small` for `x`.

    Returns:
        The tensors, or None if the layer rejects the dtype, as nn.Linear does.

    Raises:
        _NotALinear: Training and evaluation differ, or two runs do.
    """
    runs: list[list[Tensor] | None] = []
    for training in (True, False, True):
        vars(small)["training"] = training
        try:
            runs.append(_run(partial(type(small).forward, small), small, x))
        except RuntimeError:
            runs.append(None)
    first, *others = runs
    if first is None and others[0] is None:
        return None
    if first is None:
        raise _NotALinear
    for tensors in others:
        if tensors is None or not _same(first, tensors):
            raise _NotALinear
    return first


def _run(forward: Any, small: nn.Linear, x: Tensor) -> list[Tensor]:
    """Returns the output of `forward`, and the gradients of input and parameters."""
    y = forward(x)
    inputs = [x, *(p for p in small._parameters.values() if p is not None)]
    if not y.requires_grad:
        return [y]
    grad_output = torch.linspace(-1, 1, y.numel(), dtype=torch.float32, device=y.device)
    grad_output = grad_output.view(y.shape).to(y.dtype)
    # Zero gradients for unused inputs keep the lists of two forwards comparable.
    gradients = torch.autograd.grad(y, inputs, grad_output, materialize_grads=True)
    return [y.detach(), *gradients]


def _reference(small: nn.Linear, casts: Casts, x: Tensor) -> Tensor:
    """Computes F.linear with the given casts."""
    dtype = casts.gemm_dtype(x.dtype, small.weight.dtype)
    bias: Tensor | None = small.bias
    if bias is not None:
        bias = bias.to(dtype)
    y = F.linear(x.to(dtype), small.weight.to(dtype), bias)
    if casts.back:
        return y.to(x.dtype)
    return y


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two lists of tensors have the same dtypes and bits."""
    if len(a) != len(b):
        return False
    return all(s.dtype == t.dtype and torch.equal(s, t) for s, t in zip(a, b, strict=True))


CARRIED = "carried_attributes"
"""Attribute of a replacement: names of the user attributes that it took over."""
_CLASS = "carried_class"
"""Attribute of a replacement: the subclass of nn.Linear to restore on conversion back."""
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replaces a module under all its names in a model.

    The new module gets the training flag, hooks and user attributes of the old one. An FP8 layer
    also casts like a subclass of nn.Linear that it replaces. Its plain replacement gets that class
    back. A replaced linear layer raises NotFP8Error if it is still called.

    Args:
        model: The model.
        name: Name of the old module.
        new: The new module.
    """
    old = model.get_submodule(name)
    # User attributes. A replacement of a replacement takes over the same ones.
    carried = vars(old).get(CARRIED, [key for key in vars(old) if key not in vars(new)])
    for key, value in vars(old).items():
        if key.endswith(_HOOKS):
            # The dict object must stay: handles of the user remove hooks from it.
            value.update(vars(new)[key])
            _rebind_hooks(value.values(), new)
            vars(new)[key] = value
        elif key in carried or key in ("training", "_is_full_backward_hook"):
            vars(new)[key] = value
    for key, child in old._modules.items():  # for example adapters
        new._modules.setdefault(key, child)
    is_conversion = CARRIED not in vars(old)
    if is_conversion:
        vars(new)[CARRIED] = carried
        if isinstance(old, nn.Linear) and type(old) is not nn.Linear:
            vars(new)[_CLASS] = type(old)
            cast_as(old, new)
            if isinstance(new, nn.Linear):
                classes: Any = (type(new), type(old))
                new.__class__ = _subclass_of_both(*classes)
    elif type(new) is nn.Linear:
        # Back to the plain layer, with the class that it had.
        new.__class__ = vars(old).get(_CLASS, nn.Linear)
    for parent in list(model.modules()):
        for leaf, child in parent._modules.items():
            if child is old:
                parent._modules[leaf] = new
    # Code with its own reference to the old layer would silently run it in high precision.
    if isinstance(old, nn.Linear) and type(new) is not nn.Linear:
        vars(old)["forward"] = partial(_refuse, name)


@functools.cache
def _subclass_of_both(fp8_class: Any, user_class: Any) -> Any:
    """Returns a subclass of `fp8_class` whose instances also pass isinstance(layer, user_class).

    Projects count parameters, initialize layers and choose optimizer groups by their own class.
    Methods of `fp8_class` come first.
    """
    members = {"__module__": fp8_class.__module__, "__reduce_ex__": _reduce}
    return type(fp8_class.__name__, (fp8_class, user_class), members)


def _reduce(layer: nn.Linear, protocol: int) -> tuple[Any, ...]:
    """Pickles a layer of `_subclass_of_both`. Pickle cannot import such a class by name."""
    return _new_layer, type(layer).__bases__, layer.__getstate__()


def _new_layer(fp8_class: Any, user_class: Any) -> nn.Linear:
    """Creates an empty layer of `_subclass_of_both`, for pickle."""
    cls = _subclass_of_both(fp8_class, user_class)
    layer: nn.Linear = cls.__new__(cls)
    return layer


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    """Forward of a replaced layer. Raises NotFP8Error."""
    raise NotFP8Error(
        f"{name}: the model calls the layer that an FP8 layer has replaced, because it keeps a"
        " reference outside of torch's modules, such as in a list; keep it in an nn.ModuleList"
    )


def _rebind_hooks(hooks: Iterable[Any], new: nn.Module) -> None:
    """Points hooks that torch bound to their module to `new`. They have a weak reference to it."""
    for hook in hooks:
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)


def linear_with(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Returns an nn.Linear with these Parameters, weight [out, in] and bias [out]."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    return linear
