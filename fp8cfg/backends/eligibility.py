"""Eligibility of nn.Linear layers in a user model: which can be replaced by FP8 layers, where they are, and their plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import UninitializedParameter

from fp8cfg.backends.casting_linear import casts_of, differs
from fp8cfg.backends.gemm_plan import OWN_FORWARD, Misfit, Numbering, PlannedLinear, plan_linears
from fp8cfg.backends.linear_stand_ins import planned_as
from fp8cfg.backends.output_layers import output_layers
from fp8cfg.backends.packed_attention import name_in
from fp8cfg.backends.unconverted_modules import unwatched
from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.config.fp8 import FP8

_ADAPTER = re.compile(r"(?:^|\.)lora_\w+(?:\.|$)", re.IGNORECASE)
"""Adapters of PEFT (lora_A, lora_B), diffusers (lora_down, lora_up) and torchtune (lora_a, lora_b)."""
_NUMBER = re.compile(r"(?<![^.])(\d+)(?=\.)")


def plan_model(
    model: nn.Module,
    fp8: FP8,
    misfit: Misfit,
    linear: Collection[type[nn.Linear]] = (),
    norms: bool = False,
) -> list[PlannedLinear]:
    """The GEMM plan of each linear layer of `model`, by name, those in another layout among them (`linear_stand_ins`); `linear`
    are subclasses of nn.Linear that the user says are linear, and `norms` whether the backend replaces norms too. Raises
    ConfigError as `plan_linears` does, for a key that only the Transformer of this project supports, and for a class of `linear`
    whose forward computes something else.
    """
    if fp8.dot_product_attention:
        raise ConfigError(
            "fp8.dot_product_attention=true: has no effect on a model of your own, whose attention"
            " stays as it is"
        )
    stand_ins = planned_as(model, fp8.enabled)
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if isinstance(layer := stand_ins.get(name, module), nn.Linear):
            found[name] = layer
        elif (packed := name_in(name)) in stand_ins:
            found[packed] = stand_ins[packed]
    refuse_if(_not_linear(linear, found.values()))
    ends = ("high_precision_at_start", "high_precision_at_end")
    first_last = {f"fp8.{key}": count for key in ends if (count := getattr(fp8, key))}
    lists = layer_lists(model)
    if first_last and not lists:
        raise ConfigError(
            [
                f"{key}={count}: has no effect, the model has no list of like layers; write {key}=0"
                for key, count in first_last.items()
            ]
        )
    shapes = [(name, m.in_features, m.out_features) for name, m in found.items()]
    owners = {
        id(m): parent
        for name, parent in model.named_modules()
        if name_in(name) not in stand_ins
        for m in parent.children()
    }
    odd = _adapters(found, fp8) | {
        name: why for name, m in found.items() if (why := _odd(m, owners.get(id(m)), linear))
    }
    planned = [
        m for name, m in model.named_modules() if name in stand_ins or name_in(name) in stand_ins
    ]
    other = sorted({part.reason for part in unwatched(model, planned)})
    return plan_linears(
        shapes,
        fp8,
        _numbering(lists),
        misfit,
        output_layers(model, found, lists),
        odd,
        other,
        (
            [name for name, m in model.named_modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]
            if norms
            else ()
        ),
    )


def layer_lists(model: nn.Module) -> dict[str, int]:
    """The outermost lists of like modules, which hold the Transformer layers whatever they are called: name -> length."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and not any(
            _inside(name, other) for other in found
        ):
            children = list(module.children())
            if (
                len(children) > 1
                and len({type(child) for child in children}) == 1
                and not isinstance(children[0], nn.Linear)
            ):
                found[name] = len(children)
    return found


def _numbering(lists: dict[str, int]) -> Numbering:
    def number(name: str) -> tuple[int, int] | None:
        for at, count in lists.items():
            if _inside(name, at):
                index = _NUMBER.match(name, len(at) + 1 if at else 0)
                return (int(index[1]), count) if index else None
        return None

    return number


def _inside(name: str, at: str) -> bool:
    return not at or name.startswith(at + ".")


def _adapters(names: Iterable[str], fp8: FP8) -> dict[str, str]:
    """The LoRA adapters that no pattern of fp8.include names as such: they are narrow, and what is trained is in them."""
    named = [pattern for pattern in fp8.include if "lora" in pattern.lower()]
    return {
        name: "LoRA adapter; fp8.include names those that run in FP8"
        for name in names
        if _ADAPTER.search(name) and not any(fnmatchcase(name, pattern) for pattern in named)
    }


def _not_linear(linear: Collection[type[nn.Linear]], layers: Collection[nn.Linear]) -> list[str]:
    """A line for each class of `linear` that is none, or is in no layer, or computes something else than F.linear."""
    lines = []
    for cls in linear:
        if not (isinstance(cls, type) and issubclass(cls, nn.Linear)):
            lines.append(f"linear={cls!r}: expected a subclass of torch.nn.Linear")
        elif not (mine := [layer for layer in layers if isinstance(layer, cls)]):
            lines.append(f"linear={cls.__name__}: the model has no such layer")
        elif any(differs(layer) for layer in mine):
            lines.append(
                f"linear={cls.__name__}: its forward is not F.linear of input and weight, cast to"
                " some dtype, and FP8 would compute something else; leave it out"
            )
    return lines


def _odd(
    linear: nn.Linear, owner: nn.Module | None, named: Collection[type[nn.Linear]] = ()
) -> str:
    """Why `linear` cannot be replaced, or an empty string."""
    kind = type(linear)
    if "forward" in vars(linear):
        return f"{kind.__name__} {OWN_FORWARD}"
    if linear._compiled_call_impl is not None:
        return "it is compiled by itself; compile it after"
    if isinstance(owner, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies its weight itself"
    if isinstance(linear.weight, UninitializedParameter):
        return "it is not initialized"
    if {*linear._parameters, *linear._buffers, *linear._modules} != {"weight", "bias"}:
        return "it holds more than weight and bias, or others in their place"
    if not linear.weight.is_floating_point() or linear.weight.dtype.itemsize == 1:
        return f"its weight is {str(linear.weight.dtype).removeprefix('torch.')}"
    if (
        kind.forward is nn.Linear.forward
        or issubclass(kind, tuple(named))
        or casts_of(linear) is not None
    ):
        return ""
    return f"{kind.__name__} {OWN_FORWARD}"
