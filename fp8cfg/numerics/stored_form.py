"""Stored form of a model's state: the bytes that training goes on from, where `state_dict()` gives weights that anyone can use.

    state_dict()            the plain model's keys alone; a weight that is stored in FP8, or in a codec with a scale, dequantized
    stored_state_dict()     those weights as they are stored, and FP8 state: scales, amax histories, counts of random draws
    fp8_state_dict()        what of the stored form is not in the other

`load_state_dict` of a model takes the first two. A load without FP8 state is a load of new weights, and scales start anew: the
next step says so, once. A weight that is dequantized for `state_dict()` is a new tensor: a write to it does not reach the layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from fp8cfg.numerics.weight_access import as_saved

_stored: ContextVar[bool] = ContextVar("stored_form", default=False)
ANEW = "fp8_scales_anew"
"""Attribute of a layer that has lost its scales and amax history to a load without them."""


class StoredWeight(nn.Module):
    """Base class of a layer whose `state_dict()` gives its weight dequantized. That of a copy refuses writes: classes of averages
    (timm's ModelEma) copy a model and then write into `state_dict()` of the copy, which for such a weight would do nothing.
    """

    copied = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.copied = True

    def saved(self, weight: Tensor) -> Tensor:
        """`weight`, dequantized, as an entry of `state_dict()`."""
        return as_saved(weight) if self.copied else weight


def in_stored_form() -> bool:
    """Whether the `state_dict()` under way is to give the stored form."""
    return _stored.get()


def stored_state_dict(model: nn.Module, keep_vars: bool = False) -> dict[str, Tensor]:
    """The stored form of the state of `model`, no copies; `keep_vars` as in torch. What a checkpoint of a run has."""
    token = _stored.set(True)
    try:
        return model.state_dict(keep_vars=keep_vars)
    finally:
        _stored.reset(token)


def fp8_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What of the stored form `model.state_dict()` does not give, copies: entries whose last part begins with `fp8_`, and the codes
    of the weights beside them."""
    stored = stored_state_dict(model)
    coded = {
        f"{name.rpartition('.')[0]}.weight".lstrip(".")
        for name in stored
        if _is_fp8(name, "fp8_weight")
    }
    return {
        name: t.detach().clone() for name, t in stored.items() if _is_fp8(name) or name in coded
    }


def load_fp8_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put the result of `fp8_state_dict` into a model of the same conversion: load weights first. An amax history of another length
    is truncated or padded. Raises ValueError, before anything is changed, for missing and unexpected names.
    """
    own = fp8_state_dict(model).keys()
    for problem, names in (("missing", own - state.keys()), ("unexpected", state.keys() - own)):
        if names:
            raise ValueError(
                f"FP8 state: {len(names)} entries {problem}, among them {min(names)}; it is of"
                " another model or recipe"
            )
    model.load_state_dict(dict(state), strict=False)


def is_fp8_state(name: str) -> bool:
    """Whether an entry of the stored form is FP8 state, and no parameter."""
    return _is_fp8(name)


@contextmanager
def persistent(layer: nn.Module, names: Iterable[str], on: bool = True) -> Iterator[None]:
    """Let the buffers `names` of `layer`, which are in no state dict, be in the one that is made or loaded inside."""
    left_out = layer._non_persistent_buffers_set
    if on:
        layer._non_persistent_buffers_set = left_out - set(names)
    try:
        yield
    finally:
        layer._non_persistent_buffers_set = left_out


def say_scales_anew(layers: Iterable[nn.Module]) -> None:
    """Warn, once, where weights were loaded into `layers` without the FP8 state of before."""
    if [layer for layer in layers if vars(layer).pop(ANEW, False)]:
        warnings.warn(
            "weights were loaded without FP8 state, and scales and amax histories started anew;"
            " fp8.state_dict() and job.state_dict() give it, load_state_dict() of the same takes it"
            " back",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_fp8(name: str, begin: str = "fp8_") -> bool:
    return name.rpartition(".")[2].startswith(begin)
