"""Linear stand-ins: nn.Linear in place of linear modules with another weight layout.

These are Conv1D of transformers and convolutions with kernels of 1. For the packed projection of
nn.MultiheadAttention see packed_projection.py. A stand-in is converted like any linear layer. Its
weight is changed to a matrix [out, in] in place and stays the same Parameter. `state_dict` and
`load_state_dict` keep the original layout, so checkpoints match the plain model. `convert_back`
restores the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from fp8cfg.backends.any_model.module_swap import CARRIED, linear_with, replace_module
from fp8cfg.backends.any_model.packed_projection import (
    add_projections,
    attach_projections,
    attention_as_linear,
    has_convertible_projection,
    packed_name,
    remove_projections,
)
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.stored_weights import shared_weights

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LinearLayout:
    """How a module stores and applies the weight of a linear layer.

    Attributes:
        matrix: Returns the weight of the module as [out, in], a view.
        weight: Returns a matrix [out, in] in the layout of the module, a view.
        forward: Computes the module's output from the module, a linear function from [..., in] to
            [..., out], and the input. None if the linear function is all.
    """

    matrix: Callable[[Tensor], Tensor]
    weight: Callable[[nn.Module, Tensor], Tensor]
    forward: Callable[[nn.Module, Callable[[Tensor], Tensor], Tensor], Tensor] | None = None


def layout_of(module: nn.Module) -> LinearLayout | None:
    """Returns the layout of `module`, or None if it is not exactly such a module.

    Subclasses, patched forwards and additional parameters could compute something else.
    """
    if "forward" in vars(module):
        return None
    if {*module._parameters, *module._buffers, *module._modules} != {"weight", "bias"}:
        return None
    cls = type(module)
    # Compared by name, so that transformers is not imported.
    if (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return CONV1D
    if cls in _CONVOLUTIONS and _is_pointwise(module):
        return POINTWISE
    return None


def as_linear(module: nn.Module, layout: LinearLayout) -> nn.Linear:
    """Returns an nn.Linear on the meta device with the shape and dtype of `module`."""
    weight = module.get_parameter("weight")
    out_features, in_features = layout.matrix(weight.to("meta")).shape
    has_bias = module._parameters["bias"] is not None
    return nn.Linear(in_features, out_features, bias=has_bias, device="meta", dtype=weight.dtype)


def _is_pointwise(conv: nn.Module) -> bool:
    """Whether a convolution is a linear layer over channels: kernels of 1, no padding, one group.

    A stride only skips positions.
    """
    assert isinstance(conv, _CONVOLUTIONS)
    padded = conv.padding not in ("valid", "same") and any(conv.padding)
    return set(conv.kernel_size) == {1} and conv.groups == 1 and not padded


def _pointwise_forward(conv: nn.Module, linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies `linear` to the channels of `x` [batch, in, ...] or [in, ...].

    The result has the memory format of `x`, as from a convolution.
    """
    assert isinstance(conv, _CONVOLUTIONS)
    channel_dim = -len(conv.kernel_size) - 1
    is_channels_last = x.movedim(channel_dim, -1).is_contiguous()
    for dim, step in enumerate(conv.stride, channel_dim + 1):
        if step > 1:
            # unfold with a window of 1 keeps every step-th position.
            x = x.unfold(dim, 1, step).squeeze(-1)
    y = linear(x.movedim(channel_dim, -1).contiguous()).movedim(-1, channel_dim)
    if is_channels_last:
        return y
    return y.contiguous()


def _conv1d_matrix(weight: Tensor) -> Tensor:
    """Returns the weight of Conv1D [in, out] as [out, in]."""
    return weight.t() if weight.dim() == 2 else weight


def _conv1d_weight(conv1d: nn.Module, matrix: Tensor) -> Tensor:
    """Returns a matrix [out, in] as the weight of Conv1D."""
    return matrix.t()


def _pointwise_matrix(weight: Tensor) -> Tensor:
    """Returns the weight of a convolution with kernels of 1 as [out, in]."""
    return weight.flatten(1) if weight.dim() > 2 else weight


def _pointwise_weight(conv: nn.Module, matrix: Tensor) -> Tensor:
    """Returns a matrix [out, in] as the weight of a convolution with kernels of 1."""
    assert isinstance(conv, _CONVOLUTIONS)
    return matrix.reshape(*matrix.shape, *conv.kernel_size)


CONV1D = LinearLayout(_conv1d_matrix, _conv1d_weight)
POINTWISE = LinearLayout(_pointwise_matrix, _pointwise_weight, _pointwise_forward)

ORIGINAL = "replaced_module"
"""Attribute of a stand-in: a tuple of the original module without its Parameters, and its layout.
A tuple, because torch would register a bare module as a submodule."""
ADAPTED = ".base_layer"
"""Suffix of a layer with a PEFT adapter. The adapter reads its weight."""
Originals = dict[str, tuple[nn.Module, LinearLayout]]
"""Original modules without their Parameters, and their layouts, by name."""


def plan_stand_ins(model: nn.Module, fp8: bool) -> dict[str, nn.Linear]:
    """Returns an nn.Linear on the meta device for each module that can have a stand-in, by name.

    Modules are left out if another module shares the weight. Without `fp8` only Conv1D is included.
    """
    shared = shared_weights(model)
    stand_ins: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        layout = None
        # The root cannot be replaced.
        if name and module._parameters.get("weight") not in shared:
            layout = layout_of(module)
        # A convolution gains nothing from a matrix in high precision, and PEFT adapters read its
        # weight as a kernel.
        if layout is CONV1D or (layout and fp8 and not name.endswith(ADAPTED)):
            stand_ins[name] = as_linear(module, layout)
        elif fp8 and has_convertible_projection(module, shared):
            stand_ins[packed_name(name)] = attention_as_linear(module)
    return stand_ins


def to_linear(model: nn.Module, plan: Sequence[PlannedLinear]) -> Originals:
    """Replaces each module of `plan` in another layout by an nn.Linear, in place.

    A convolution that stays in high precision is not replaced.

    Returns:
        The replaced modules. Call `attach_layouts` with them after the conversion.
    """
    originals: Originals = {}
    add_projections(model, [planned.name for planned in plan])
    for planned in plan:
        name = planned.name
        module = model.get_submodule(name)
        layout = layout_of(module)
        if layout is None or not (planned.fp8 or layout is CONV1D):
            continue
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None
        _change_layout(weight, layout.matrix)
        linear = linear_with(weight, bias)
        replace_module(model, name, linear)
        del vars(linear)[CARRIED]  # the FP8 layer that replaces it sets its own
        module._parameters.update(weight=None, bias=None)
        if not layout.forward:
            _set_fan_in_fan_out(model, name, transposed=False)
        originals[name] = module, layout
    return originals


def attach_layouts(model: nn.Module, originals: Originals) -> None:
    """Makes stand-ins save, load and multiply in the layout of the original modules."""
    attach_projections(model)
    for name, (module, layout) in originals.items():
        layer = model.get_submodule(name)
        vars(layer)[ORIGINAL] = (module, layout)
        vars(layer)["_save_to_state_dict"] = partial(_save, layer, module, layout)
        vars(layer)["_load_from_state_dict"] = partial(_load, layer, layout)
        if layout.forward:
            linear_forward = partial(type(layer).forward, layer)
            vars(layer)["forward"] = partial(layout.forward, module, linear_forward)


def original_modules(model: nn.Module) -> Originals:
    """Returns the original module and layout of each stand-in of `model`, by name."""
    return {
        name: vars(layer)[ORIGINAL]
        for name, layer in model.named_modules()
        if ORIGINAL in vars(layer)
    }


def restore_modules(model: nn.Module, originals: Originals) -> None:
    """Puts the original modules back in place of their plain nn.Linear."""
    for name, (module, layout) in originals.items():
        linear = model.get_submodule(name)
        for attribute in (ORIGINAL, "forward", "_save_to_state_dict", "_load_from_state_dict"):
            vars(linear).pop(attribute, None)
        vars(linear)[CARRIED] = []
        weight = linear._parameters["weight"]
        assert weight is not None
        _change_layout(weight, partial(layout.weight, module))
        module._parameters.update(weight=weight, bias=linear._parameters["bias"])
        replace_module(model, name, module)
        if not layout.forward:
            _set_fan_in_fan_out(model, name, transposed=True)
    remove_projections(model)


def _set_fan_in_fan_out(model: nn.Module, name: str, transposed: bool) -> None:
    """Tells the PEFT layer around a Conv1D whether the weight is transposed."""
    adapter = model.get_submodule(name.rpartition(".")[0])
    if isinstance(getattr(adapter, "fan_in_fan_out", None), bool):
        adapter.fan_in_fan_out = transposed  # type: ignore[assignment]


def _change_layout(weight: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the layout of a Parameter and of its gradient, in place."""
    # A gradient can only be assigned in the shape of its weight, so it is set afterwards.
    gradient = weight.grad
    weight.grad = None
    weight.data = change(weight.data).contiguous()
    if gradient is not None:
        weight.grad = change(gradient).contiguous()


def _save(
    layer: nn.Module,
    module: nn.Module,
    layout: LinearLayout,
    state: dict[str, Any],
    prefix: str,
    keep_vars: bool,
) -> None:
    """Saves a stand-in with the weight in the original layout, except in the stored form."""
    type(layer)._save_to_state_dict(layer, state, prefix, keep_vars)
    if not _has_codes(state, prefix):
        state[f"{prefix}weight"] = layout.weight(module, state[f"{prefix}weight"])


def _load(
    layer: nn.Module, layout: LinearLayout, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Loads a stand-in from a state dict in the original layout or in the stored form."""
    weight = state.get(f"{prefix}weight")
    if isinstance(weight, Tensor) and not _has_codes(state, prefix):
        state = {**state, f"{prefix}weight": layout.matrix(weight)}
    type(layer)._load_from_state_dict(layer, state, prefix, *rest)


def _has_codes(state: Iterable[str], prefix: str) -> bool:
    """Whether `state` has the weight as FP8 codes, which are always [out, in]."""
    return any(name.startswith(f"{prefix}fp8_weight") for name in state)
