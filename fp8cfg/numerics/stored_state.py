"""State of FP8 layers: their amax records, and the two forms of their state dict.

    state_dict()            keys of the plain model; stored weights are decoded
    stored_state_dict()     weights as stored, and FP8 state: scales, amax histories, random draws
    fp8_state_dict()        the entries missing in the first form

`load_state_dict` of a model takes the first two. A load without FP8 state is a load of new weights:
scales start anew, and the next step warns once. A decoded weight in `state_dict()` is a new tensor; a
write to it does not reach the layer.

In the stored form a layer under delayed scaling adds `fp8_scale` [3] and `fp8_amax_history` [length, 3],
float32, with the columns input, weight, grad_output. A stored weight adds its scales (fp8_weights.py).
A float8 weight of another scaling is dequantized and quantized again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor, nn

from fp8cfg.numerics.formats import FORMAT_BY_DTYPE
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, FP8Weight, plain
from fp8cfg.numerics.scaling import Scaling

AMAX = "fp8_amax"
"""float32 [1, 3], attention [1, 6]: the amax record of a layer without a history.

It exists for infinite amaxes. Kernels that scale tiles write no finite ones.
"""
BACKWARD_AMAX = "fp8_backward_amax"
"""float32 [1, 3]: the amax record of backward passes."""
RAN = ("ran_forward", "ran_backward")
"""int32 [3] each: which GEMMs ran in forward and in backward passes (gemm.py)."""
ROUNDING_COUNT = "fp8_rounding_count"
"""int32 []: the number of backward passes that drew random numbers for rounding."""
ANEW = "fp8_scales_anew"
"""Attribute of a layer that was loaded without scales and amax history."""
BUFFERS = ("fp8_scale", "fp8_amax_history", *WEIGHT_BUFFERS)
"""Buffers of the stored form, without the count of random draws."""

_stored_form: ContextVar[bool] = ContextVar("stored_form", default=False)


class FP8Layer(Protocol):
    """A layer with FP8 state, linear or attention."""

    scaling: Scaling
    fp8_scale: Tensor | None
    fp8_amax_history: Tensor | None
    fp8_amax: Tensor | None

    def fresh_state(self) -> dict[str, Tensor]: ...


class FP8LinearLayer(FP8Layer, Protocol):
    """A linear layer with FP8 state."""

    fp8_backward_amax: Tensor

    @property
    def parameter(self) -> nn.Parameter: ...


def amax_record(layer: FP8Layer) -> Tensor:
    """Returns the buffer whose row 0 has the largest amaxes since the last update.

    Under delayed scaling it is the amax history.
    """
    if layer.fp8_amax_history is not None:
        return layer.fp8_amax_history
    assert layer.fp8_amax is not None, "a layer has one of the two"
    return layer.fp8_amax


@torch.no_grad()
def fold_backward(layers: Iterable[FP8LinearLayer]) -> None:
    """Folds the amaxes of backward passes into the amax records. Launches few kernels."""
    records = []
    backward_amaxes = []
    for layer in layers:
        records.append(amax_record(layer)[0])
        backward_amaxes.append(layer.fp8_backward_amax[0])
    if records:
        torch._foreach_maximum_(records, backward_amaxes)


@torch.no_grad()
def forget_backward(layers: Iterable[FP8LinearLayer]) -> None:
    """Zeros the amax records of backward passes."""
    backward_amaxes = [layer.fp8_backward_amax for layer in layers]
    if backward_amaxes:
        torch._foreach_zero_(backward_amaxes)


def in_stored_form() -> bool:
    """Tells whether the current `state_dict()` call returns the stored form."""
    return _stored_form.get()


def stored_state_dict(model: nn.Module, keep_vars: bool = False) -> dict[str, Tensor]:
    """Returns the stored form of the model's state, without copies.

    Checkpoints of runs contain this form. `keep_vars` has torch's meaning.
    """
    token = _stored_form.set(True)
    try:
        return model.state_dict(keep_vars=keep_vars)
    finally:
        _stored_form.reset(token)


def fp8_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the entries missing in `model.state_dict()`.

    Their last part begins with `fp8_`, or they are codes of scaled weights.
    """
    stored = stored_state_dict(model)
    names = set()
    for name in stored:
        if is_fp8_state(name):
            names.add(name)
        if is_fp8_state(name, "fp8_weight"):
            module = name.rpartition(".")[0]
            names.add(f"{module}.weight".lstrip("."))
    return {name: stored[name].detach().clone() for name in stored if name in names}


def load_fp8_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads the result of `fp8_state_dict` into a model with the same conversion.

    Load the weights first. An amax history of another length is truncated or padded.

    Raises:
        ValueError: Names are missing or unexpected. Nothing is changed.
    """
    expected = fp8_state_dict(model).keys()
    missing = expected - state.keys()
    unexpected = state.keys() - expected
    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise ValueError(
                f"FP8 state: {len(names)} entries {problem}, among them {min(names)}; the state is"
                " from another model or recipe"
            )
    model.load_state_dict(dict(state), strict=False)


def is_fp8_state(name: str, prefix: str = "fp8_") -> bool:
    """Tells whether an entry of the stored form is FP8 state: its last part has the prefix."""
    return name.rpartition(".")[2].startswith(prefix)


def move_without_cast(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Moves a tensor of FP8 state to the device of `fn(tensor)`, but keeps its dtype.

    Args:
        fn: The function that `nn.Module._apply` applies: of `model.cuda()`, `model.bfloat16()`, ...
        tensor: A buffer or a stored weight.
    """
    result = fn(tensor)
    if result.dtype == tensor.dtype:
        return result
    return tensor.to(result.device)


@contextmanager
def persistent(layer: nn.Module, names: Iterable[str], on: bool = True) -> Iterator[None]:
    """Includes non-persistent buffers in state dicts saved or loaded inside."""
    excluded = layer._non_persistent_buffers_set
    if on:
        layer._non_persistent_buffers_set = excluded - set(names)
    try:
        yield
    finally:
        layer._non_persistent_buffers_set = excluded


def say_scales_anew(layers: Iterable[nn.Module]) -> None:
    """Warns once if weights were loaded into `layers` without their FP8 state."""
    # All flags are cleared, so that the next step does not warn again.
    flags = [vars(layer).pop(ANEW, False) for layer in layers]
    if any(flags):
        warnings.warn(
            "weights were loaded without FP8 state, so scales and amax histories were reset; to keep"
            " them, save fp8.state_dict() or job.state_dict() and load it with load_state_dict()",
            RuntimeWarning,
            stacklevel=2,
        )


def high_precision_state_dict(
    state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Converts the stored form of an FP8 model to the state dict of the model without FP8.

    Args:
        state: The stored form.
        dtype: Dtype of dequantized weights.

    Returns:
        `state` without scales and histories. Tensors other than float8 weights are not copied.
    """
    converted = {}
    for name, tensor in state.items():
        prefix, dot, leaf = name.rpartition(".")
        if leaf in BUFFERS or leaf == ROUNDING_COUNT:
            continue
        stored = None
        if leaf == "weight":
            stored = _stored_weight(state, prefix + dot)
        if stored is not None:
            tensor = stored.values(dtype)
        converted[name] = tensor
    return converted


def _stored_weight(state: Mapping[str, Tensor], prefix: str) -> FP8Weight | None:
    """Returns the weight of a layer if it is stored in float8 or with a scale."""
    weight = state.get(prefix + "weight")
    scale_inv, *second = (state.get(prefix + name) for name in WEIGHT_BUFFERS)
    if weight is None or (scale_inv is None and weight.dtype not in FORMAT_BY_DTYPE):
        return None
    if scale_inv is None:
        raise RuntimeError(
            f"{prefix}weight is {weight.dtype} and needs {prefix}{WEIGHT_BUFFERS[0]}"
        )
    return FP8Weight(weight, scale_inv, *second)


def prepare_load(layer: FP8LinearLayer, state: dict[str, Tensor], prefix: str) -> Tensor | None:
    """Completes `state`, in place, with the entries that a linear layer expects.

    Returns:
        A high-precision weight that the layer quantizes after everything else is loaded, or None.
    """
    weight = state.get(prefix + "weight")
    fp8_names = [prefix + name for name in (*BUFFERS, ROUNDING_COUNT)]
    if weight is None and not any(name in state for name in fp8_names):
        return None  # nn.Module reports the missing weight
    complete_delayed(layer, state, prefix)
    count = getattr(layer, ROUNDING_COUNT)
    if count is None:
        state.pop(prefix + ROUNDING_COUNT, None)
    elif prefix + ROUNDING_COUNT not in state:
        state[prefix + ROUNDING_COUNT] = torch.zeros_like(count)
        vars(layer)[ANEW] = True
    if weight is None or weight.shape != layer.parameter.shape:
        return None

    buffers = {}
    for name in WEIGHT_BUFFERS:
        buffer = getattr(layer, name)
        if buffer is not None:
            buffers[prefix + name] = buffer
    saved = {}
    for name in WEIGHT_BUFFERS:
        if state.get(prefix + name) is not None:
            saved[prefix + name] = state[prefix + name]
    if weight.dtype == layer.parameter.dtype and _forms(saved) == _forms(buffers):
        return None  # stored as the layer stores it

    # The weight is in high precision or of another scaling.
    stored = _stored_weight(state, prefix)
    for name in WEIGHT_BUFFERS:
        state.pop(prefix + name, None)
    if not buffers:
        if stored is not None:
            state[prefix + "weight"] = stored.values(layer.parameter.dtype)
        return None
    # The load copies the layer's tensors to themselves; then the layer quantizes the weight.
    state[prefix + "weight"] = plain(layer.parameter)
    state.update(buffers)
    if stored is not None:
        weight = stored.values(torch.float32)
    return weight


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def complete_delayed(layer: FP8Layer, state: dict[str, Tensor], prefix: str) -> None:
    """Gives `state`, in place, the scales and the amax history of `layer`.

    Missing ones and scales that were not set are fresh, unexpected ones are removed. A history of
    another length is truncated or padded.
    """
    scale = prefix + "fp8_scale"
    history = prefix + "fp8_amax_history"
    vars(layer).pop(ANEW, None)
    if layer.fp8_scale is None or layer.fp8_amax_history is None:
        state.pop(scale, None)
        state.pop(history, None)
        return
    if scale not in state:
        for name, tensor in layer.fresh_state().items():
            state[prefix + name] = tensor
        vars(layer)[ANEW] = True
        return
    # 0 is a scale that was not set yet. Under first_step=te scales are always set.
    state[scale] = state[scale].masked_fill(state[scale] == 0, layer.scaling.first_scale)
    if history in state and state[history].shape[1:] == layer.fp8_amax_history.shape[1:]:
        state[history] = fit_history(state[history], layer.fp8_amax_history)


def fit_history(saved: Tensor, like: Tensor) -> Tensor:
    """Truncates or pads an amax history [L, columns] to the length of `like`.

    Row 0 stays the running maximum, and the newest past steps stay last.
    """
    if len(saved) == len(like):
        return saved
    num_past_steps = min(len(saved), len(like)) - 1
    history = torch.zeros_like(like)
    history[0] = saved[0]
    if num_past_steps:
        history[-num_past_steps:] = saved[-num_past_steps:]
    return history
