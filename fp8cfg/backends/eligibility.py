"""Eligibility of nn.Linear layers in a user model: which can be replaced by FP8 layers, where they are, and their plan."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import UninitializedParameter

from fp8cfg.backends.gemm_plan import Misfit, Numbering, PlannedLinear, plan_linears
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.fp8 import FP8

OUTPUT = ("output_layer", "lm_head")
"""Names of output layers (Megatron's, transformers'), beside what a model calls its own."""
_NUMBER = re.compile(r"(?<![^.])(\d+)(?=\.)")


def plan_model(model: nn.Module, fp8: FP8, misfit: Misfit) -> list[PlannedLinear]:
    """The GEMM plan of each linear layer of `model`, by name. Raises ConfigError as `plan_linears` does, and for a key that only
    the Transformer of this project supports.
    """
    if fp8.dot_product_attention:
        raise ConfigError("fp8.dot_product_attention=True: has no effect on a model of your own, whose attention stays as it is")
    found = dict(linears(model))
    ends = ("high_precision_at_start", "high_precision_at_end")
    first_last = {f"fp8.{key}": count for key in ends if (count := getattr(fp8, key))}
    lists = layer_lists(model)
    if first_last and not lists:
        raise ConfigError([f"{key}={count}: has no effect, the model has no list of like layers; write {key}=0"
                           for key, count in first_last.items()])
    shapes = [(name, m.in_features, m.out_features) for name, m in found.items()]
    owners = {id(m): parent for parent in model.modules() for m in parent.children()}
    odd = {name: why for name, m in found.items() if (why := _odd(m, owners.get(id(m))))}
    return plan_linears(shapes, fp8, _numbering(lists), misfit, _outputs(model, found), odd)


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """All nn.Linear modules of `model`, subclasses included, each once under its first name."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))


def layer_lists(model: nn.Module) -> dict[str, int]:
    """The outermost lists of like modules, which hold the Transformer layers whatever they are called: name -> length."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and not any(_inside(name, other) for other in found):
            children = list(module.children())
            if len(children) > 1 and len({type(child) for child in children}) == 1 and not isinstance(children[0], nn.Linear):
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


def _outputs(model: nn.Module, found: dict[str, nn.Linear]) -> list[str]:
    """Names of the output layers: the usual names, and the result of transformers' get_output_embeddings."""
    ask = getattr(model, "get_output_embeddings", None)
    own = ask() if callable(ask) else None
    return [name for name, m in found.items() if m is own or name.rpartition(".")[2] in OUTPUT]


def _odd(linear: nn.Linear, owner: nn.Module | None) -> str:
    """Why `linear` cannot be replaced, or an empty string."""
    kind = type(linear)
    if kind.forward is not nn.Linear.forward or "forward" in vars(linear):
        return f"{kind.__name__} has a forward of its own"
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
    return ""
