"""Linear stand-ins: an nn.Linear in the place of each module that is one in another layout (`linear_layouts`), converted as any.

The weight becomes a matrix [out, in] in place, and stays the same Parameter. `state_dict()` and `load_state_dict()` have it as it
was, so that checkpoints are the plain model's, and `convert_back` puts the module back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from fp8cfg.backends import packed_attention
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.linear_layouts import CONV1D, LinearLayout, as_linear, layout_of
from fp8cfg.backends.module_swap import CARRIED, linear_with, replaced
from fp8cfg.backends.stored_weights import shared_weights

SHELL = "replaced_module"
"""Attribute of a layer that took such a module's place: that one without its Parameters, in a tuple, for it is no submodule."""
_ENTRIES = "_save_to_state_dict", "_load_from_state_dict"
"""What torch calls of a layer to save and to load it."""
ADAPTED = ".base_layer"
"""PEFT's name of the layer that an adapter is added to; it reads the weight."""
Shells = dict[str, tuple[nn.Module, LinearLayout]]
"""Modules without their Parameters, by name, and their layouts."""


def planned_as(model: nn.Module, fp8: bool) -> dict[str, nn.Linear]:
    """For each layer of `model` in another layout an nn.Linear of its shape and dtype, without memory, by name. Left out are those
    whose weight another module reads as it is, and where nothing runs in `fp8` what would gain nothing from being a matrix.
    """
    shared, found = shared_weights(model), dict[str, nn.Linear]()
    for name, module in model.named_modules():
        layout = (
            layout_of(module) if name and module._parameters.get("weight") not in shared else None
        )
        if layout is CONV1D or (layout and fp8 and not name.endswith(ADAPTED)):
            found[name] = as_linear(module, layout)
        elif fp8 and packed_attention.takes(module, shared):
            found[packed_attention.name_in(name)] = packed_attention.as_linear(module)
    return found


def to_linear(model: nn.Module, plan: Sequence[PlannedLinear]) -> Shells:
    """Put an nn.Linear in the place of each such module of `model` that `plan` has; a convolution that stays in high precision is
    left as it is. Returns what has to be `attach`ed once layers are what they are to be."""
    found: Shells = {}
    packed_attention.take(model, [planned.name for planned in plan])
    for name, fp8 in [(planned.name, planned.fp8) for planned in plan]:
        module = model.get_submodule(name)
        if (layout := layout_of(module)) is not None and (fp8 or layout is CONV1D):
            weight, bias = module._parameters["weight"], module._parameters["bias"]
            assert weight is not None
            _relaid(weight, layout.matrix)
            replaced(model, name, linear := linear_with(weight, bias))
            del vars(linear)[CARRIED]  # what stands in its place next notes that for itself
            module._parameters.update(weight=None, bias=None)
            if not layout.forward:
                _tell_adapter(model, name, transposed=False)
            found[name] = module, layout
    return found


def attach(model: nn.Module, found: Shells) -> None:
    """Let the layers that took the places of the modules `found` save, load and multiply as those."""
    packed_attention.attach(model)
    for name, (module, layout) in found.items():
        layer = model.get_submodule(name)
        entries = partial(_save, layer, module, layout), partial(_load, layer, layout)
        vars(layer).update({SHELL: (module, layout)} | dict(zip(_ENTRIES, entries, strict=True)))
        if layout.forward:
            vars(layer)["forward"] = partial(
                layout.forward, module, partial(type(layer).forward, layer)
            )


def shells(model: nn.Module) -> Shells:
    """The module in whose place each stand-in of `model` is, by name."""
    return {
        name: vars(layer)[SHELL] for name, layer in model.named_modules() if SHELL in vars(layer)
    }


def back(model: nn.Module, found: Shells) -> None:
    """Put the modules `found` back in the places of the plain layers that have their names."""
    for name, (module, layout) in found.items():
        linear = model.get_submodule(name)
        for own in (SHELL, "forward", *_ENTRIES):
            vars(linear).pop(own, None)
        vars(linear)[CARRIED] = []
        weight = linear._parameters["weight"]
        assert weight is not None
        _relaid(weight, partial(layout.weight, module))
        module._parameters.update(weight=weight, bias=linear._parameters["bias"])
        replaced(model, name, module)
        if not layout.forward:
            _tell_adapter(model, name, transposed=True)
    packed_attention.give_back(model)


def _tell_adapter(model: nn.Module, name: str, transposed: bool) -> None:
    """PEFT's layer around the Conv1D `name`, if that is what holds it, adds to a weight that is `transposed`, or not."""
    adapter = model.get_submodule(name.rpartition(".")[0])
    if isinstance(getattr(adapter, "fan_in_fan_out", None), bool):
        adapter.fan_in_fan_out = transposed  # type: ignore[assignment]


def _relaid(weight: nn.Parameter, relay: Callable[[Tensor], Tensor]) -> None:
    gradient, weight.grad = weight.grad, None
    weight.data = relay(weight.data).contiguous()
    if gradient is not None:
        weight.grad = relay(gradient).contiguous()


def _save(
    layer: nn.Module,
    module: nn.Module,
    layout: LinearLayout,
    state: dict[str, Any],
    prefix: str,
    keep_vars: bool,
) -> None:
    type(layer)._save_to_state_dict(layer, state, prefix, keep_vars)
    if not _stored(state, prefix):
        state[f"{prefix}weight"] = layout.weight(module, state[f"{prefix}weight"])


def _load(
    layer: nn.Module, layout: LinearLayout, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    weight = state.get(f"{prefix}weight")
    if isinstance(weight, Tensor) and not _stored(state, prefix):
        state = {**state, f"{prefix}weight": layout.matrix(weight)}
    type(layer)._load_from_state_dict(layer, state, prefix, *rest)


def _stored(state: Iterable[str], prefix: str) -> bool:
    """Whether `state` has the weight as codes, which are [out, in], beside their scale."""
    return any(name.startswith(f"{prefix}fp8_weight") for name in state)
