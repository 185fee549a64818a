"""Module swap: nn.Linear to FP8Linear and back, with hooks, training flag and user attributes carried over."""

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
    """A forward depends on more than its input."""


class Casts(NamedTuple):
    """The dtype in which a layer multiplies: its input's, its weight's, or a fixed one; `back` says that the output is cast to the
    dtype of the input."""

    to: torch.dtype | str
    back: bool

    def of(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """The dtype for an input of dtype `x`."""
        return (
            self.to if isinstance(self.to, torch.dtype) else {"input": x, "weight": weight}[self.to]
        )


def casts_of(linear: nn.Linear) -> Casts | None:
    """How `linear`, whose class has its own forward, casts; None where it computes something else, or cannot be run."""
    if linear.weight.is_meta:
        return None
    with (
        torch.random.fork_rng(devices=()),
        torch.enable_grad(),
        torch.autocast(linear.weight.device.type, enabled=False),
    ):
        try:
            small = _small(linear)
            ran = [(x, y) for x in _inputs(small) if (y := _ran(small, x)) is not None]
        except Exception:  # whatever code of theirs does: it is not known to be linear
            return None
        if not ran:
            return None
        for to in ("input", "weight", *_DTYPES):
            for back in (False, True):
                casts = Casts(to, back)
                if all(_same(y, _run(partial(_reference, small, casts), small, x)) for x, y in ran):
                    return casts
    return None


def differs(linear: nn.Linear) -> bool:
    """Whether the forward of `linear` runs on a small copy of it, and computes something else than F.linear with casts."""
    if casts_of(linear) is not None:
        return False
    with torch.random.fork_rng(devices=()):
        try:
            small = _small(linear)
            return any(_ran(small, x) is not None for x in _inputs(small))
        except _NotALinear:
            return True
        except Exception:
            return False


def cast_as(old: nn.Module, new: nn.Module) -> None:
    """Let the layer `new` cast as `old` does, whose place it takes."""
    if (
        isinstance(old, nn.Linear)
        and type(old).forward is not nn.Linear.forward
        and (casts := casts_of(old)) is not None
    ):
        vars(new)["forward"] = partial(_forward, new, casts)


def _forward(layer: nn.Module, casts: Casts, x: Tensor) -> Tensor:
    """The forward of an FP8 layer: under torch.autocast, which casts input, weight and bias alike, in every backend."""
    device, weight = x.device.type, layer._parameters["weight"]
    assert weight is not None
    run = type(layer).forward
    if torch.is_autocast_enabled(device):  # then F.linear casts to that dtype last
        y: Tensor = run(layer, x)
        return y.to(x.dtype) if casts.back else y
    dtype = casts.of(x.dtype, weight.dtype)
    with torch.autocast(
        device,
        dtype if dtype in _AUTOCAST else None,
        enabled=dtype in _AUTOCAST and dtype != weight.dtype,
    ):
        y = run(layer, x.to(dtype))
    return y.to(x.dtype) if casts.back else y


def _small(linear: nn.Linear) -> nn.Linear:
    """A copy of `linear`, without its hooks, that has 16 inputs, 24 outputs and a weight drawn at random."""
    small = copy.copy(linear)
    draw = torch.Generator().manual_seed(0)
    shapes = {"weight": (24, 16), "bias": (24,)}
    drawn: dict[str, nn.Parameter | None] = {
        name: (
            None
            if p is None
            else nn.Parameter(
                torch.randn(shapes[name], generator=draw, dtype=torch.float32).to(p.device, p.dtype)
            )
        )
        for name, p in linear._parameters.items()
    }
    vars(small).update(_parameters=drawn, in_features=16, out_features=24)
    return small


def _inputs(small: nn.Linear) -> Iterator[Tensor]:
    """Inputs of two and three dimensions, of all dtypes; rows of ordinary, small and large values, and one with an outlier."""
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    rows[2:4] *= 1e-3
    rows[4:6] *= 1e3
    rows[6, 3] = -5e3
    for dtype in _DTYPES:
        x = rows.to(small.weight.device, dtype)
        yield from (x.clone().requires_grad_(), x.clone().view(2, 4, 16).requires_grad_())


def _ran(small: nn.Linear, x: Tensor) -> list[Tensor] | None:
    """What the forward of `small` makes of `x`, in training and evaluation, and its gradients. None where it refuses the dtype, as
    nn.Linear itself does. Raises _NotALinear where it is not the same twice, or in evaluation."""
    found: list[list[Tensor] | None] = []
    for training in (True, False, True):
        vars(small)["training"] = training
        try:
            found.append(_run(partial(type(small).forward, small), small, x))
        except RuntimeError:
            found.append(None)
    if found[0] is None and found[1] is None:
        return None
    if found[0] is None or any(other is None or not _same(found[0], other) for other in found[1:]):
        raise _NotALinear
    return found[0]


def _run(forward: Any, small: nn.Linear, x: Tensor) -> list[Tensor]:
    y = forward(x)
    inputs = [x, *(p for p in small._parameters.values() if p is not None)]
    g = (
        torch.linspace(-1, 1, y.numel(), dtype=torch.float32, device=y.device)
        .view(y.shape)
        .to(y.dtype)
    )
    if not y.requires_grad:
        return [y]
    return [
        y.detach(),
        *torch.autograd.grad(y, inputs, g, materialize_grads=True),
    ]  # zeros for what it does not read


def _reference(small: nn.Linear, casts: Casts, x: Tensor) -> Tensor:
    dtype = casts.of(x.dtype, small.weight.dtype)
    bias: Tensor | None = small.bias
    y = F.linear(x.to(dtype), small.weight.to(dtype), None if bias is None else bias.to(dtype))
    return y.to(x.dtype) if casts.back else y


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        s.dtype == t.dtype and torch.equal(s, t) for s, t in zip(a, b, strict=True)
    )


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
            if isinstance(new, nn.Linear):
                classes: Any = (type(new), type(old))
                new.__class__ = _subclass_of_both(*classes)
    elif type(new) is nn.Linear:
        new.__class__ = vars(old).get(_CLASS, nn.Linear)
    for parent in list(model.modules()):
        for leaf, child in parent._modules.items():
            if child is old:
                parent._modules[leaf] = new
    if isinstance(old, nn.Linear) and type(new) is not nn.Linear:
        vars(old)["forward"] = partial(_refuse, name)


@functools.cache
def _subclass_of_both(fp8_class: Any, user_class: Any) -> Any:
    """Returns a subclass of `fp8_class` whose instances also pass isinstance(layer, user_class).

    Projects count parameters, initialize layers and choose optimizer groups by their own class. The methods of `fp8_class` come first.
    """
    members = {"__module__": fp8_class.__module__, "__reduce_ex__": _reduce}
    return type(fp8_class.__name__, (fp8_class, user_class), members)


def _reduce(layer: nn.Linear, protocol: int) -> tuple[Any, ...]:
    """Pickles a layer of `_subclass_of_both`, which has no name by which pickle could import it."""
    return _new_layer, type(layer).__bases__, layer.__getstate__()


def _new_layer(fp8_class: Any, user_class: Any) -> nn.Linear:
    both = _subclass_of_both(fp8_class, user_class)
    layer: nn.Linear = both.__new__(both)
    return layer


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
