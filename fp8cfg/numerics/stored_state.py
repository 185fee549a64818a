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
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp8cfg.numerics.fp8_weights import as_saved

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
        if is_fp8_state(name, "fp8_weight")
    }
    return {
        name: t.detach().clone()
        for name, t in stored.items()
        if is_fp8_state(name) or name in coded
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


def is_fp8_state(name: str, prefix: str = "fp8_") -> bool:
    """Whether an entry of the stored form is FP8 state and no parameter: its last part begins with `prefix`."""
    return name.rpartition(".")[2].startswith(prefix)


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


RAN = ("ran_forward", "ran_backward")
"""int32 [3] each: the records of products (numerics/gemm.py)."""
BACKWARD_AMAX = "fp8_backward_amax"
"""float32 [1, 3]: the running maxima of a backward pass, as row 0 of the amax record has them."""
AMAX = "fp8_amax"
"""float32 [1, 3], of attention [1, 6]: the amax record of a layer without a history, which is there for infinite amaxes. Finite
ones are not all in it: kernels that scale tiles write infinity alone."""


class PassRecords(nn.Module):
    """Base class of a linear layer that records its passes."""

    ran_forward: Tensor
    ran_backward: Tensor
    fp8_amax_history: Tensor | None
    fp8_amax: Tensor | None
    fp8_backward_amax: Tensor

    def record_passes(self, history: bool, device: torch.device) -> None:
        """Register the buffers; `history` where there is one, whose row 0 is the amax record."""
        for name in RAN:
            self.register_buffer(
                name, torch.zeros(3, dtype=torch.int32, device=device), persistent=False
            )
        self.register_buffer(
            AMAX,
            None if history else torch.zeros(1, 3, dtype=torch.float32, device=device),
            persistent=False,
        )
        self.register_buffer(
            BACKWARD_AMAX, torch.zeros(1, 3, dtype=torch.float32, device=device), persistent=False
        )

    @property
    def gemms_ran(self) -> Tensor:
        """int32 [3] for fprop, dgrad and wgrad: what each product last multiplied, see `gemm.decode`. A new tensor."""
        return self.ran_forward + self.ran_backward

    def clear_gemms_ran(self) -> None:
        """Forget which products ran."""
        for name in RAN:
            getattr(self, name).zero_()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if in_stored_form():
            fold_backward([self])
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if prefix + "fp8_amax_history" in state_dict:
            forget_backward([self])


class Recorded(Protocol):
    """A layer with an amax record."""

    fp8_amax_history: Tensor | None
    fp8_amax: Tensor | None


def amax_record(layer: Recorded) -> Tensor:
    """The buffer whose row 0 has the running maximum of each tensor since the last update: the history under delayed scaling."""
    record = layer.fp8_amax if layer.fp8_amax_history is None else layer.fp8_amax_history
    assert record is not None, "a layer has one of the two"
    return record


@torch.no_grad()
def fold_backward(layers: Iterable[PassRecords]) -> None:
    """Fold the amaxes of backward passes into the amax records of `layers`, which then have all; in few launches."""
    pairs = [(amax_record(layer)[0], layer.fp8_backward_amax[0]) for layer in layers]
    if pairs:
        rows, seen = zip(*pairs, strict=True)
        torch._foreach_maximum_(rows, seen)


@torch.no_grad()
def forget_backward(layers: Iterable[PassRecords]) -> None:
    """Begin anew with the amaxes of backward passes."""
    if seen := [layer.fp8_backward_amax for layer in layers]:
        torch._foreach_zero_(seen)
