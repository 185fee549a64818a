"""Weight storage in a low-bit codec (`storage.weight`), with any backend.

Each pass decodes its weights. A decoded weight exists from the forward pass of its layer to the
GEMM. In a layer of a library it exists until the backward pass. Only stored bytes persist between
steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.backends.any_model.module_swap import linear_with, replace_module
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.numerics import FP8Linear, Region, Scaling, fp8_linears, weight_storage
from fp8cfg.numerics.codecs import get_codec
from fp8cfg.numerics.formats import DTYPES
from fp8cfg.numerics.fsdp_weights import refresh_shards, shard_in_fp8
from fp8cfg.numerics.weight_storage import CodecLayer, NarrowWeight
from fp8cfg.schema.storage import SCALED, Columns, StateDtypes


def parameter_columns(
    model: nn.Module, state: StateDtypes, plan: Sequence[PlannedLinear]
) -> dict[str, Columns]:
    """Returns the storage columns of every parameter, by name.

    A weight shared with another module counts as a parameter outside of linear layers.
    """
    shared = shared_weights(model)
    runs_fp8 = {f"{planned.name}.weight": planned.fp8 for planned in plan}
    columns = {}
    for name, p in model.named_parameters():
        is_linear_weight = name in runs_fp8 and p not in shared
        columns[name] = state.of_parameter(is_linear_weight, runs_fp8.get(name, False))
    return columns


def narrow_parameters(model: nn.Module, state: StateDtypes, plan: Sequence[PlannedLinear]) -> None:
    """Changes float32 parameters on the meta device to the dtype of their weights after loading.

    This is the storage dtype, or the compute dtype for weights in a codec or in FP8. Loading then
    needs no float32 copy.
    """
    compute_dtype = DTYPES[state.precision.compute]
    for name, columns in parameter_columns(model, state, plan).items():
        p = model.get_parameter(name)
        p.data = p.data.to(DTYPES.get(columns["weight"], compute_dtype))


def store_weights(
    model: nn.Module,
    state: StateDtypes,
    plan: Sequence[PlannedLinear],
    columns: Mapping[str, Columns],
    region: Region,
) -> None:
    """Makes linear layers store their weights in the dtypes of `columns`, in place.

    Layers with float8 weights or with weights in the compute dtype do not change. Other
    high-precision layers become an FP8Linear without FP8 GEMMs, to decode the weight or cast the
    bias.

    Args:
        model: The model.
        state: Storage dtypes of the recipe.
        plan: Plan of the linear layers.
        columns: Storage columns by parameter name.
        region: The autocast region.
    """
    compute = state.precision.compute
    for planned in plan:
        layer = model.get_submodule(planned.name)
        # A tied weight has another name.
        layer_columns = columns.get(f"{planned.name}.weight", state.other)
        weight_storage_dtype = layer_columns["weight"]
        bias_dtype: str = compute
        if type(layer) is nn.Linear:
            bias_dtype = columns.get(f"{planned.name}.bias", layer_columns)["weight"]
        if weight_storage_dtype == bias_dtype == compute or getattr(layer, "fp8_params", False):
            continue
        if type(layer) is nn.Linear:
            layer = _replace_by_high_precision(model, planned.name, layer, region)
        codec = get_codec(weight_storage_dtype)
        if isinstance(layer, FP8Linear):
            layer.store_in_codec(codec, DTYPES[compute])
        else:
            weight_storage.store_in_codec(layer, codec, DTYPES[compute])
    # Some libraries fuse norms into the following GEMM, which needs their weight in the compute
    # dtype.
    if state.other["weight"] != compute:
        for module in list(model.modules()):
            if getattr(module, "read_by_product", False):
                weight_storage.store_in_codec(module, get_codec("fp32"), DTYPES[compute])


def _replace_by_high_precision(
    model: nn.Module, name: str, linear: nn.Linear, region: Region
) -> FP8Linear:
    """Replaces an nn.Linear by an FP8Linear without FP8 GEMMs, which can store its weight."""
    layer = FP8Linear.from_linear(
        linear, Scaling(kind="current"), region, high_precision=(True, True, True)
    )
    replace_module(model, name, layer)
    return layer


def shard_in_codec(
    model: nn.Module,
    state: StateDtypes,
    plan: Sequence[PlannedLinear],
    columns: Mapping[str, Columns],
    region: Region,
) -> None:
    """Makes FSDP2 gather the weights of linear layers in their codecs, in place."""
    for planned in plan:
        # A tied weight has another name.
        layer_columns = columns.get(f"{planned.name}.weight", state.other)
        if layer_columns["weight"] == state.other["weight"]:
            continue
        layer = model.get_submodule(planned.name)
        if not isinstance(layer, FP8Linear):
            assert type(layer) is nn.Linear
            layer = _replace_by_high_precision(model, planned.name, layer, region)
        shard_in_fp8(layer, get_codec(layer_columns["weight"]))
    # Loading replaces float32 shards. Their encoded copies must follow before the next gather.
    model.register_load_state_dict_post_hook(lambda *_: refresh_shards(fp8_linears(model)))


def restore_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Undoes `store_weights` and `cast_embeddings` in place. Weights come back decoded, in `dtype`.

    If a codec has no scale, the weight stays the same Parameter, so tied weights stay tied.
    """
    for name, layer in list(model.named_modules()):
        if isinstance(layer, CodecLayer):
            weight_storage.remove_codec(layer, _decoded(layer, dtype))
        elif isinstance(layer, FP8Linear) and layer.codec:
            replace_module(model, name, linear_with(_decoded(layer, dtype), layer.bias))
        for key, hook in list(layer._forward_hooks.items()):
            if isinstance(hook, partial) and hook.func is _cast_output:
                del layer._forward_hooks[key]


def _decoded(layer: FP8Linear | CodecLayer, dtype: torch.dtype) -> nn.Parameter:
    """Returns the decoded weight of a layer as a Parameter of dtype `dtype`."""
    assert layer.codec, "the layer has a codec"
    if layer.codec.scaling != "none":
        return nn.Parameter(
            layer.codec.decode(layer.codec_tensors).to(dtype),
            requires_grad=layer.parameter.requires_grad,
        )
    if layer.parameter.dtype != dtype:
        layer.parameter.grad = None  # it has the old dtype
        layer.parameter.grad_dtype = None
        layer.parameter.data = layer.parameter.data.to(dtype)
    return layer.parameter


def cast_embeddings(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes embeddings with float32 storage output `dtype`, the dtype of activations.

    The cast may happen before tensor-parallel ranks sum their outputs: all but one are 0.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # First, so that a hook that sums over tensor-parallel ranks sends the narrow dtype.
            module.register_forward_hook(partial(_cast_output, dtype), prepend=True)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Forward hook: casts the output."""
    return out.to(dtype)


def cast_parameters(model: nn.Module, columns: Mapping[str, Columns]) -> None:
    """Casts parameters without a codec, and sets `grad_dtype` of all parameters."""
    layers = {
        layer.parameter: layer
        for layer in model.modules()
        if isinstance(layer, NarrowWeight) and layer.is_encoded
    }
    for name, p in model.named_parameters():
        storage_dtype = columns[name]["weight_grad"]
        # Gradients with a scale are float32 until the optimizer quantizes them.
        if storage_dtype in SCALED:
            storage_dtype = "fp32"
        grad_dtype = DTYPES[storage_dtype]
        if p in layers:
            layers[p].set_weight_grad_dtype(grad_dtype)
            continue
        if p.dtype == torch.float32:
            p.data = p.data.to(DTYPES[columns[name]["weight"]])
        if p.dtype != grad_dtype:
            p.grad_dtype = grad_dtype


def shared_weights(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters of more than one module, such as tied output layers."""
    seen: set[nn.Parameter] = set()
    shared: set[nn.Parameter] = set()
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p in seen:
                shared.add(p)
            seen.add(p)
    return shared
