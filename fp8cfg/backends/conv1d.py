"""Conv1D of transformers (GPT-2 and its descendants): linear layers whose weight is [in, out], converted as nn.Linear.

Where one is converted its weight is transposed in place, and stays the same Parameter. `state_dict()` and `load_state_dict()` have
it [in, out] as before, so that checkpoints are the plain model's, and `convert_back` puts the Conv1D back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from fp8cfg.backends.module_swap import CARRIED, linear_with, replaced

SHELL = "conv1d"
"""Attribute of a layer that took the place of a Conv1D: that one without its Parameters, in a tuple, for it is no submodule."""
_ENTRIES = "_save_to_state_dict", "_load_from_state_dict"
"""What torch calls of a layer to save and to load it."""


def conv1ds(model: nn.Module, shared: Collection[Tensor]) -> Iterator[tuple[str, nn.Module]]:
    """The Conv1D modules of `model` by name, each once, but for those whose weight is among the `shared` ones: another module
    reads it as it is."""
    for name, module in model.named_modules():
        if name and _is_conv1d(module) and module._parameters["weight"] not in shared:
            yield name, module


def planned_as(conv: nn.Module) -> nn.Linear:
    """An nn.Linear of the shape and the dtype of `conv`, without memory."""
    weight = conv.get_parameter("weight")
    inputs, outputs = weight.shape
    return nn.Linear(inputs, outputs, bias=conv._parameters["bias"] is not None, device="meta", dtype=weight.dtype)


def to_linear(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Put an nn.Linear in the place of each Conv1D among the modules `names` of `model`. Returns what has to be `attach`ed once
    layers are what they are to be."""
    found = {}
    for name in names:
        if _is_conv1d(conv := model.get_submodule(name)):
            weight, bias = conv._parameters["weight"], conv._parameters["bias"]
            assert weight is not None
            _transpose(weight)
            replaced(model, name, linear := linear_with(weight, bias))
            del vars(linear)[CARRIED]  # what stands in its place next notes that for itself
            conv._parameters.update(weight=None, bias=None)
            _tell_adapter(model, name, transposed=False)
            found[name] = conv
    return found


def attach(model: nn.Module, convs: dict[str, nn.Module]) -> None:
    """Let the layers that took the places of `convs`, by name, save and load a weight [in, out]."""
    for name, conv in convs.items():
        layer = model.get_submodule(name)
        vars(layer).update({SHELL: (conv,)} | dict(zip(_ENTRIES, (partial(_save, layer), partial(_load, layer)), strict=True)))


def shells(model: nn.Module) -> dict[str, nn.Module]:
    """The Conv1D of each layer of `model` that took the place of one, by name."""
    return {name: vars(layer)[SHELL][0] for name, layer in model.named_modules() if SHELL in vars(layer)}


def back(model: nn.Module, convs: dict[str, nn.Module]) -> None:
    """Put `convs` back in the places of the plain layers that have their names."""
    for name, conv in convs.items():
        linear = model.get_submodule(name)
        for own in (SHELL, *_ENTRIES):
            vars(linear).pop(own, None)
        vars(linear)[CARRIED] = []
        weight = linear._parameters["weight"]
        assert weight is not None
        _transpose(weight)
        conv._parameters.update(weight=weight, bias=linear._parameters["bias"])
        replaced(model, name, conv)
        _tell_adapter(model, name, transposed=True)


def _tell_adapter(model: nn.Module, name: str, transposed: bool) -> None:
    """PEFT's layer around the layer `name`, if that is what holds it, adds its product to a weight that is `transposed`, or not."""
    adapter = model.get_submodule(name.rpartition(".")[0])
    if isinstance(getattr(adapter, "fan_in_fan_out", None), bool):
        adapter.fan_in_fan_out = transposed  # type: ignore[assignment]


def _is_conv1d(module: nn.Module) -> bool:
    cls = type(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D") and "forward" not in vars(module) and (
        {*module._parameters, *module._buffers, *module._modules} == {"weight", "bias"})


def _transpose(weight: nn.Parameter) -> None:
    gradient, weight.grad = weight.grad, None
    weight.data = weight.data.t().contiguous()
    if gradient is not None:
        weight.grad = gradient.t().contiguous()


def _save(layer: nn.Module, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    type(layer)._save_to_state_dict(layer, state, prefix, keep_vars)
    if not _stored(state, prefix):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()


def _load(layer: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    if f"{prefix}weight" in state and state[f"{prefix}weight"].dim() == 2 and not _stored(state, prefix):
        state = {**state, f"{prefix}weight": state[f"{prefix}weight"].t()}
    type(layer)._load_from_state_dict(layer, state, prefix, *rest)


def _stored(state: Iterable[str], prefix: str) -> bool:
    """Whether `state` has the weight as codes, which are [out, in], beside their scale."""
    return any(name.startswith(f"{prefix}fp8_weight") for name in state)
