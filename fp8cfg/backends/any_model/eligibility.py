"""Eligibility of linear layers in a custom model for FP8, and their plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from fp8cfg.backends import registry
from fp8cfg.backends.any_model import conversion_state
from fp8cfg.backends.any_model.conversion_state import REASON, multiplied
from fp8cfg.backends.any_model.linear_like import as_linear, layout_of, plan_stand_ins
from fp8cfg.backends.any_model.module_swap import casts_of, differs
from fp8cfg.backends.any_model.packed_projection import packed_name
from fp8cfg.backends.gemm_plan import (
    ATTENTION_GEMMS,
    GEMMS,
    OWN_FORWARD,
    Misfit,
    Numbering,
    PlannedAttention,
    PlannedLinear,
    Unwatched,
    has_trained,
    plan_linears,
    products_left_out,
)
from fp8cfg.backends.protocol import Observed
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.fp8 import FP8

SURE = ("output_layer", "lm_head")
"""Names of output layers in Megatron and transformers, at any place."""
_CONTAINERS = re.compile(r"(head|heads|classifier|cls)$")
_NAMES = re.compile(
    r"(to_logits|logits|head|heads|classifier|unembed|unembedding|embed_out|score|qa_outputs"
    r"|logit_proj|final_proj|generator|proj_out(_\d+)?)$"
)
_VAGUE = re.compile(r"(out|output|fc|decoder|proj_out|projection|out_proj)$")
"""Possible names of an output layer. They count only for the last layer, if its sizes differ."""
_SIZES = (
    "vocab_size",
    "n_vocab",
    "num_tokens",
    "padded_vocab_size",
    "num_classes",
    "num_labels",
    "n_classes",
    "output_size",
)
_BASE = ".base_layer"
"""Suffix of a layer with a PEFT adapter."""


def output_layers(
    model: nn.Module, linears: Mapping[str, nn.Linear], stacks: Collection[str]
) -> list[str]:
    """Returns the names of the output layers. They stay in high precision by default.

    Args:
        model: The model.
        linears: Its linear layers, by name.
        stacks: Names of the lists of Transformer layers.
    """
    # Certain signs come first. Names and sizes are guesses, only for models without these.
    signs = (_asked, _sure, _tied)
    if found := {name for sign in signs for name in sign(model, linears)}:
        return [name for name in linears if name in found]
    outside = [
        name for name in linears if not any(not at or name.startswith(f"{at}.") for at in stacks)
    ]
    order = list(linears)
    inside = [order.index(name) for name in linears if name not in outside]
    after = [name for name in outside if order.index(name) > max(inside, default=-1)]
    return _named(linears, outside, after) or _wide(model, linears, after)


def _asked(model: nn.Module, linears: Mapping[str, nn.Linear]) -> Iterator[str]:
    """Yields the layer from get_output_embeddings of transformers."""
    for module in model.modules():
        if callable(ask := getattr(type(module), "get_output_embeddings", None)):
            try:
                own = ask(module)
            # transformers raises these for a base model without a head.
            except (NotImplementedError, AttributeError):
                continue
            own = getattr(own, "base_layer", own)
            yield from (name for name, m in linears.items() if m is own)


def _sure(model: nn.Module, linears: Mapping[str, nn.Linear]) -> Iterator[str]:
    """Yields layers with a name from SURE."""
    return (name for name in linears if _leaf(name) in SURE)


def _tied(model: nn.Module, linears: Mapping[str, nn.Linear]) -> Iterator[str]:
    """Yields layers tied to an embedding."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return (name for name, m in linears.items() if id(m._parameters.get("weight")) in tables)


def _named(linears: Mapping[str, nn.Linear], outside: list[str], after: list[str]) -> list[str]:
    """Returns likely output layers outside of Transformer layers, by name."""
    found = [
        name
        for name in outside
        if _NAMES.match(_leaf(name)) or any(map(_CONTAINERS.match, name.split(".")[:-1]))
    ]
    # A head may have hidden layers. Only the last layer counts, and parallel ones of its size.
    if found:
        return [
            name for name in found if linears[name].out_features == linears[found[-1]].out_features
        ]
    last = after[-1:]
    return [
        name
        for name in last
        if _VAGUE.match(_leaf(name)) and linears[name].in_features != linears[name].out_features
    ]


def _wide(model: nn.Module, linears: Mapping[str, nn.Linear], after: list[str]) -> list[str]:
    """Returns the last of `after` whose output size is the vocabulary or the number of labels.

    The vocabulary is the largest embedding, or a size from the model or its config.
    """
    sizes = {
        max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    }
    for module in model.modules():
        for owner in (vars(module), vars(module).get("config")):
            sizes |= {size for key in _SIZES if isinstance(size := _get(owner, key), int)}
    return [
        name
        for name in after
        if linears[name].out_features in sizes and linears[name].in_features not in sizes
    ][-1:]


def _get(owner: object, key: str) -> object:
    """Returns a value of a config, which is a mapping or an object."""
    return owner.get(key) if isinstance(owner, Mapping) else getattr(owner, key, None)


def _leaf(name: str) -> str:
    """Returns the last part of a module name, without PEFT's suffix."""
    return name.removesuffix(_BASE).rpartition(".")[2]


_TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Lookup tables have no GEMM. A tied output layer multiplies and counts instead."""
_ELEMENTWISE = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU)


def unwatched(model: nn.Module, watched: Collection[nn.Module]) -> list[Unwatched]:
    """Returns the modules with matrices outside of linear layers.

    A parametrization holds a part of the weight of its layer, and belongs to the layer.

    Args:
        model: The model.
        watched: Layers with recorded GEMMs. Plain nn.Linear layers are recorded too.
    """
    layers = [m for m in model.modules() if m in watched or isinstance(m, (nn.Linear, *_TABLES))]
    inside = {part for layer in layers for part in layer.modules()}
    seen = {id(p) for part in inside for p in part._parameters.values()}
    found = []
    for name, module in model.named_modules():
        if module in inside or isinstance(module, _ELEMENTWISE):
            continue
        # Shared parameters count once.
        matrices = [p for p in _matrices(module) if id(p) not in seen]
        seen |= {id(p) for p in matrices}
        if matrices:
            reason = "is not watched" if _of_a_library(module) else "is no linear layer"
            weights, reason = sum(p.numel() for p in matrices), f"{type(module).__name__} {reason}"
            found.append(Unwatched(name or "the model itself", weights, reason, multiplied(module)))
    return found


def _matrices(module: nn.Module) -> Iterator[Tensor]:
    """Yields floating-point parameters of `module` itself with two or more dimensions above 1."""
    held = (
        p
        for p in module._parameters.values()
        if isinstance(p, Tensor) and not isinstance(p, UninitializedParameter)
    )
    return (p for p in held if p.is_floating_point() and sum(size > 1 for size in p.shape) > 1)


def _of_a_library(module: nn.Module) -> bool:
    """Whether it is a layer of a backend's library. It may use FP8 without a record."""
    known = [
        f"{at}." for name in registry.names() for at in registry.capabilities(name).layer_modules
    ]
    return any(f"{base.__module__}.".startswith(tuple(known)) for base in type(module).__mro__)


_ADAPTER = re.compile(r"(?:^|\.)lora_\w+(?:\.|$)", re.IGNORECASE)
"""Adapters of PEFT (lora_A, lora_B), diffusers (lora_down) and torchtune (lora_a)."""
_NUMBER = re.compile(r"(?<![^.])(\d+)(?=\.)")


def plan_model(
    model: nn.Module,
    fp8: FP8,
    misfit: Misfit,
    linear: Collection[type[nn.Linear]] = (),
    norms: bool = False,
) -> list[PlannedLinear]:
    """Returns the GEMM plan of each linear layer of a custom model.

    Layers with another weight layout are included, such as Conv1D (linear_like.py).

    Args:
        model: The model.
        fp8: FP8 settings.
        misfit: Returns why the backend cannot run a layer of these sizes, or "".
        linear: Subclasses of nn.Linear to convert on the user's request.
        norms: Whether the backend replaces norms too.

    Raises:
        ConfigError: A key has no effect on custom models, a class in `linear` is not linear, or
            `plan_linears` raises it.
    """
    if fp8.dot_product_attention:
        raise ConfigError(
            "fp8.dot_product_attention=true: has no effect on a custom model, whose attention"
            " stays as it is"
        )
    stand_ins = plan_stand_ins(model, fp8.enabled)
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if isinstance(layer := stand_ins.get(name, module), nn.Linear):
            found[name] = layer
        elif (packed := packed_name(name)) in stand_ins:
            found[packed] = stand_ins[packed]
    refuse_if(_not_linear(linear, found.values()))
    ends = ("high_precision_at_start", "high_precision_at_end")
    first_last = {f"fp8.{key}": count for key in ends if (count := getattr(fp8, key))}
    lists = layer_lists(model)
    if first_last and not lists:
        raise ConfigError(
            [
                f"{key}={count}: has no effect, the model has no list of like layers; set {key}=0"
                for key, count in first_last.items()
            ]
        )
    shapes = [(name, m.in_features, m.out_features) for name, m in found.items()]
    # nn.MultiheadAttention multiplies the weight of its out_proj itself, unless it was given a
    # stand-in.
    owners = {
        id(m): parent
        for name, parent in model.named_modules()
        if packed_name(name) not in stand_ins
        for m in parent.children()
    }
    odd = _adapters(found, fp8) | {
        name: why for name, m in found.items() if (why := _odd(m, owners.get(id(m)), linear))
    }
    planned = [
        m
        for name, m in model.named_modules()
        if name in stand_ins or packed_name(name) in stand_ins
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
    """Returns the length of each outermost list of equal modules, by name.

    These lists contain the Transformer layers, whatever their name.
    """
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
    """Returns a function from the name of a linear layer to its layer number and their count."""

    def number(name: str) -> tuple[int, int] | None:
        for at, count in lists.items():
            if _inside(name, at):
                index = _NUMBER.match(name, len(at) + 1 if at else 0)
                return (int(index[1]), count) if index else None
        return None

    return number


def _inside(name: str, at: str) -> bool:
    """Whether the module `name` is inside of the module `at`. The root has the name ""."""
    return not at or name.startswith(at + ".")


def _adapters(names: Iterable[str], fp8: FP8) -> dict[str, str]:
    """Returns a reason for each LoRA adapter without an explicit pattern in fp8.include.

    Adapters are narrow, and they are the trained part, so they stay in high precision by default.
    """
    named = [pattern for pattern in fp8.include if "lora" in pattern.lower()]
    return {
        name: "LoRA adapter; fp8.include names those that run in FP8"
        for name in names
        if _ADAPTER.search(name) and not any(fnmatchcase(name, pattern) for pattern in named)
    }


def _not_linear(linear: Collection[type[nn.Linear]], layers: Collection[nn.Linear]) -> list[str]:
    """Returns an error for each class in `linear` of a wrong type, without layers, or not linear."""
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
    """Returns why `linear` cannot be replaced, or ""."""
    kind = type(linear)
    if "forward" in vars(linear):
        return f"{kind.__name__} {OWN_FORWARD}"
    if linear._compiled_call_impl is not None:
        return "it is compiled already; compile it after the conversion"
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


def observed(model: nn.Module) -> tuple[list[PlannedLinear], list[PlannedAttention]]:
    """Returns the observed GEMMs of each linear layer and each converted attention of `model`."""
    seen: Observed = {}
    for backend in registry.loaded_backends():
        seen |= backend.observed(model)
    trained = has_trained(seen)
    linears, attentions = [], []
    for name, module in model.named_modules():
        ran = seen.get(name, {})
        layer = (
            as_linear(module, layout)
            if REASON in vars(module) and (layout := layout_of(module))
            else module
        )
        # Layers of a library need not be nn.Linear, but their records have a fprop.
        if isinstance(layer, nn.Linear) or "fprop" in ran:
            gemms = tuple(ran.get(g) for g in GEMMS)
            linears.append(
                PlannedLinear(
                    name,
                    layer.in_features,
                    layer.out_features,
                    gemms,  # type: ignore[arg-type]
                    _reason(module, ran),
                    conversion_state.multiplied(module),
                    left_out=products_left_out(ran, has_frozen_weight(module), trained),
                )
            )
        elif ran:
            attentions.append(PlannedAttention(name, tuple(ran.get(g) for g in ATTENTION_GEMMS)))
    return linears, attentions


def has_frozen_weight(module: nn.Module) -> bool:
    """Whether the weight of a linear layer needs no gradient."""
    weight = module._parameters.get("weight")
    return weight is not None and not weight.requires_grad


def beside(model: nn.Module) -> list[Unwatched]:
    """Returns the parameters of `model` outside of its linear layers."""
    watched = {
        model.get_submodule(name)
        for backend in registry.loaded_backends()
        for name in backend.observed(model)
    }
    return unwatched(
        model, watched | {module for module in model.modules() if REASON in vars(module)}
    )


def _reason(module: nn.Module, ran: object) -> str:
    """Returns why a layer stayed in high precision, or "" if nothing is known."""
    if ran or getattr(module, REASON, ""):
        return str(getattr(module, REASON, ""))
    return (
        "not converted" if type(module) is nn.Linear else f"{type(module).__name__} is not watched"
    )
