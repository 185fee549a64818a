"""Eligibility of linear layers in a custom model for FP8, and their plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from fp8cfg.backends import registry
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

CERTAIN_NAMES = ("output_layer", "lm_head")
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
    certain = {
        *_from_output_embeddings(model, linears),
        *_with_certain_names(linears),
        *_tied_to_embeddings(model, linears),
    }
    if certain:
        return [name for name in linears if name in certain]
    outside = [name for name in linears if not any(_is_inside(name, stack) for stack in stacks)]
    position = {name: index for index, name in enumerate(linears)}
    last_inside = max((position[name] for name in linears if name not in outside), default=-1)
    after = [name for name in outside if position[name] > last_inside]
    return _by_name(linears, outside, after) or _by_size(model, linears, after)


def _from_output_embeddings(model: nn.Module, linears: Mapping[str, nn.Linear]) -> Iterator[str]:
    """Yields the layer from get_output_embeddings of transformers."""
    for module in model.modules():
        get_output_embeddings = getattr(type(module), "get_output_embeddings", None)
        if not callable(get_output_embeddings):
            continue
        try:
            output = get_output_embeddings(module)
        # transformers raises these for a base model without a head.
        except (NotImplementedError, AttributeError):
            continue
        output = getattr(output, "base_layer", output)
        yield from (name for name, linear in linears.items() if linear is output)


def _with_certain_names(linears: Mapping[str, nn.Linear]) -> Iterator[str]:
    """Yields layers with a name from CERTAIN_NAMES."""
    return (name for name in linears if _leaf(name) in CERTAIN_NAMES)


def _tied_to_embeddings(model: nn.Module, linears: Mapping[str, nn.Linear]) -> Iterator[str]:
    """Yields layers tied to an embedding."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, linear in linears.items():
        if id(linear._parameters.get("weight")) in tables:
            yield name


def _by_name(linears: Mapping[str, nn.Linear], outside: list[str], after: list[str]) -> list[str]:
    """Returns likely output layers outside of Transformer layers, by name."""
    likely = []
    for name in outside:
        parents = name.split(".")[:-1]
        if _NAMES.match(_leaf(name)) or any(_CONTAINERS.match(parent) for parent in parents):
            likely.append(name)
    # A head may have hidden layers. Only the last layer counts, and parallel ones of its size.
    if likely:
        out_features = linears[likely[-1]].out_features
        return [name for name in likely if linears[name].out_features == out_features]
    if not after:
        return []
    last = linears[after[-1]]
    if _VAGUE.match(_leaf(after[-1])) and last.in_features != last.out_features:
        return [after[-1]]
    return []


def _by_size(model: nn.Module, linears: Mapping[str, nn.Linear], after: list[str]) -> list[str]:
    """Returns the last of `after` whose output size is the vocabulary or the number of labels.

    The vocabulary is the largest embedding, or a size from the model or its config.
    """
    table_sizes = [
        module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
    ]
    sizes = {max(table_sizes, default=0)}
    for module in model.modules():
        for config in (vars(module), vars(module).get("config")):
            for key in _SIZES:
                size = _config_value(config, key)
                if isinstance(size, int):
                    sizes.add(size)
    fitting = [
        name
        for name in after
        if linears[name].out_features in sizes and linears[name].in_features not in sizes
    ]
    return fitting[-1:]


def _config_value(config: object, key: str) -> object:
    """Returns a value of a config, which is a mapping or an object, or None."""
    if isinstance(config, Mapping):
        return config.get(key)
    return getattr(config, key, None)


def _leaf(name: str) -> str:
    """Returns the last part of a module name, without PEFT's suffix."""
    return name.removesuffix(_BASE).rpartition(".")[2]


_TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Lookup tables have no GEMM. A tied output layer multiplies and counts instead."""
_ELEMENTWISE = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU)


def unwatched_parameters(model: nn.Module, watched: Collection[nn.Module]) -> list[Unwatched]:
    """Returns the modules with matrices outside of linear layers.

    A parametrization holds a part of the weight of its layer, and belongs to the layer.

    Args:
        model: The model.
        watched: Layers with recorded GEMMs. Plain nn.Linear layers are recorded too.
    """
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in watched or isinstance(module, (nn.Linear, *_TABLES)):
            inside.update(module.modules())
    # Shared parameters count once.
    counted = {id(p) for module in inside for p in module._parameters.values()}
    unwatched = []
    for name, module in model.named_modules():
        if module in inside or isinstance(module, _ELEMENTWISE):
            continue
        matrices = [p for p in _matrices(module) if id(p) not in counted]
        if not matrices:
            continue
        counted |= {id(p) for p in matrices}
        problem = "is not watched" if _is_library_layer(module) else "is no linear layer"
        unwatched.append(
            Unwatched(
                name=name or "the model itself",
                weights=sum(p.numel() for p in matrices),
                reason=f"{type(module).__name__} {problem}",
                rows=multiplied(module),
            )
        )
    return unwatched


def _matrices(module: nn.Module) -> Iterator[Tensor]:
    """Yields floating-point parameters of `module` itself with two or more dimensions above 1."""
    for p in module._parameters.values():
        if not isinstance(p, Tensor) or isinstance(p, UninitializedParameter):
            continue
        if p.is_floating_point() and sum(size > 1 for size in p.shape) > 1:
            yield p


def _is_library_layer(module: nn.Module) -> bool:
    """Whether it is a layer of a backend's library. It may use FP8 without a record."""
    prefixes: list[str] = []
    for name in registry.names():
        prefixes += [f"{path}." for path in registry.capabilities(name).layer_modules]
    return any(f"{base.__module__}.".startswith(tuple(prefixes)) for base in type(module).__mro__)


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
    # Linear layers by name, with stand-ins for modules in another layout.
    stand_ins = plan_stand_ins(model, fp8.enabled)
    linears: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        layer = stand_ins.get(name, module)
        if isinstance(layer, nn.Linear):
            linears[name] = layer
        elif packed_name(name) in stand_ins:
            linears[packed_name(name)] = stand_ins[packed_name(name)]
    refuse_if(_not_linear(linear, linears.values()))
    lists = layer_lists(model)
    if not lists:
        refuse_if(_ends_without_effect(fp8))
    shapes = [(name, layer.in_features, layer.out_features) for name, layer in linears.items()]
    irreplaceable = _adapters(linears, fp8)
    parents = _parents(model, stand_ins)
    for name, layer in linears.items():
        reason = _irreplaceable_reason(layer, parents.get(id(layer)), linear)
        if reason:
            irreplaceable[name] = reason
    replaceable = [
        module
        for name, module in model.named_modules()
        if name in stand_ins or packed_name(name) in stand_ins
    ]
    other_matmuls = {part.reason for part in unwatched_parameters(model, replaceable)}
    norm_names = []
    if norms:
        for name, module in model.named_modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                norm_names.append(name)
    return plan_linears(
        shapes,
        fp8,
        _numbering(lists),
        misfit,
        output_layers(model, linears, lists),
        irreplaceable,
        sorted(other_matmuls),
        norm_names,
    )


def _ends_without_effect(fp8: FP8) -> list[str]:
    """Returns an error for each key that selects first or last layers. They need a layer list."""
    errors = []
    for key in ("high_precision_at_start", "high_precision_at_end"):
        count = getattr(fp8, key)
        if count:
            errors.append(
                f"fp8.{key}={count}: has no effect, the model has no list of like layers; set"
                f" fp8.{key}=0"
            )
    return errors


def _parents(model: nn.Module, stand_ins: Mapping[str, nn.Linear]) -> dict[int, nn.Module]:
    """Returns the parent of each module by the id of the module.

    nn.MultiheadAttention multiplies the weight of its out_proj itself, unless its packed projection
    has a stand-in. Then it calls out_proj, and is left out.
    """
    parents = {}
    for name, parent in model.named_modules():
        if packed_name(name) not in stand_ins:
            for child in parent.children():
                parents[id(child)] = parent
    return parents


def layer_lists(model: nn.Module) -> dict[str, int]:
    """Returns the length of each outermost list of equal modules, by name.

    These lists contain the Transformer layers, whatever their name.
    """
    lists: dict[str, int] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if any(_is_inside(name, outer) for outer in lists):
            continue
        children = list(module.children())
        classes = {type(child) for child in children}
        if len(children) > 1 and len(classes) == 1 and not isinstance(children[0], nn.Linear):
            lists[name] = len(children)
    return lists


def _numbering(lists: dict[str, int]) -> Numbering:
    """Returns a function from the name of a linear layer to its layer number and their count."""

    def number(name: str) -> tuple[int, int] | None:
        for list_name, count in lists.items():
            if _is_inside(name, list_name):
                start = len(list_name) + 1 if list_name else 0
                index = _NUMBER.match(name, start)
                return (int(index[1]), count) if index else None
        return None

    return number


def _is_inside(name: str, outer: str) -> bool:
    """Whether the module `name` is inside of the module `outer`. The root has the name ""."""
    return not outer or name.startswith(f"{outer}.")


def _adapters(names: Iterable[str], fp8: FP8) -> dict[str, str]:
    """Returns a reason for each LoRA adapter without an explicit pattern in fp8.include.

    Adapters are narrow, and they are the trained part, so they stay in high precision by default.
    """
    patterns = [pattern for pattern in fp8.include if "lora" in pattern.lower()]
    reasons = {}
    for name in names:
        if _ADAPTER.search(name) and not any(fnmatchcase(name, pattern) for pattern in patterns):
            reasons[name] = "LoRA adapter; name it in fp8.include to run it in FP8"
    return reasons


def _not_linear(linear: Collection[type[nn.Linear]], layers: Collection[nn.Linear]) -> list[str]:
    """Returns an error for each class in `linear` of a wrong type, unused, or not linear."""
    lines = []
    for cls in linear:
        if not (isinstance(cls, type) and issubclass(cls, nn.Linear)):
            lines.append(f"linear={cls!r}: expected a subclass of torch.nn.Linear")
            continue
        instances = [layer for layer in layers if isinstance(layer, cls)]
        if not instances:
            lines.append(f"linear={cls.__name__}: the model has no such layer")
        elif any(differs(layer) for layer in instances):
            lines.append(
                f"linear={cls.__name__}: its forward is not F.linear of input and weight, cast to"
                " some dtype, and FP8 would compute something else; leave it out"
            )
    return lines


def _irreplaceable_reason(
    linear: nn.Linear, parent: nn.Module | None, requested: Collection[type[nn.Linear]] = ()
) -> str:
    """Returns why `linear` cannot be replaced, or "".

    Args:
        linear: The layer.
        parent: Its parent, or None.
        requested: Subclasses of nn.Linear to convert on the user's request.
    """
    cls = type(linear)
    if "forward" in vars(linear):
        return f"{cls.__name__} {OWN_FORWARD}"
    if linear._compiled_call_impl is not None:
        return "it is compiled already; compile it after the conversion"
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies its weight itself"
    if isinstance(linear.weight, UninitializedParameter):
        return "it is not initialized"
    if {*linear._parameters, *linear._buffers, *linear._modules} != {"weight", "bias"}:
        return "it holds more than weight and bias, or others in their place"
    if not linear.weight.is_floating_point() or linear.weight.dtype.itemsize == 1:
        return f"its weight is {str(linear.weight.dtype).removeprefix('torch.')}"
    if cls.forward is nn.Linear.forward or issubclass(cls, tuple(requested)):
        return ""
    if casts_of(linear) is None:
        return f"{cls.__name__} {OWN_FORWARD}"
    return ""


def observed_gemms(model: nn.Module) -> tuple[list[PlannedLinear], list[PlannedAttention]]:
    """Returns the observed GEMMs of each linear layer and each converted attention of `model`."""
    records: Observed = {}
    for backend in registry.loaded_backends():
        records |= backend.observed(model)
    trained = has_trained(records)
    linears, attentions = [], []
    for name, module in model.named_modules():
        ran = records.get(name, {})
        layer = module
        layout = layout_of(module) if REASON in vars(module) else None
        if layout is not None:
            layer = as_linear(module, layout)
        # Layers of a library need not be nn.Linear, but their records have a fprop.
        if isinstance(layer, nn.Linear) or "fprop" in ran:
            gemms = tuple(ran.get(gemm) for gemm in GEMMS)
            linears.append(
                PlannedLinear(
                    name,
                    layer.in_features,
                    layer.out_features,
                    gemms,  # type: ignore[arg-type]
                    _observed_reason(module, ran),
                    multiplied(module),
                    left_out=products_left_out(ran, has_frozen_weight(module), trained),
                )
            )
        elif ran:
            gemms = tuple(ran.get(gemm) for gemm in ATTENTION_GEMMS)
            attentions.append(PlannedAttention(name, gemms))
    return linears, attentions


def has_frozen_weight(module: nn.Module) -> bool:
    """Whether the weight of a linear layer needs no gradient."""
    weight = module._parameters.get("weight")
    return weight is not None and not weight.requires_grad


def other_parameters(model: nn.Module) -> list[Unwatched]:
    """Returns the parameters of `model` outside of its linear layers."""
    watched = {module for module in model.modules() if REASON in vars(module)}
    for backend in registry.loaded_backends():
        watched.update(model.get_submodule(name) for name in backend.observed(model))
    return unwatched_parameters(model, watched)


def _observed_reason(module: nn.Module, ran: Mapping[str, object]) -> str:
    """Returns why a layer stayed in high precision, or "" if nothing is known."""
    reason = str(getattr(module, REASON, ""))
    if ran or reason:
        return reason
    if type(module) is nn.Linear:
        return "not converted"
    return f"{type(module).__name__} is not watched"
