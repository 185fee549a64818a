"""Weight storage in a low-bit codec (`storage.weight`), with any backend: each pass decodes the weights that it reads.

A decoded weight lives from the forward pass of its layer to the product, or until the backward pass where the layer belongs to a
library. Only the stored bytes persist from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.backends.any_model.module_swap import linear_with, replaced
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.numerics import FP8Linear, Region, Scaling, fp8_linears, weight_storage
from fp8cfg.numerics.codecs import get_codec
from fp8cfg.numerics.fsdp_weights import refresh_shards, shard_in_fp8
from fp8cfg.numerics.weight_storage import HeldWeight, NarrowWeight
from fp8cfg.schema.storage import SCALED, Columns, StateDtypes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parameter_columns(
    model: nn.Module, state: StateDtypes, plan: Sequence[PlannedLinear]
) -> dict[str, Columns]:
    """The storage columns of every parameter by name. A weight that a linear layer shares with another module gets the columns of
    a parameter outside of linear layers.
    """
    shared = shared_weights(model)
    runs_fp8 = {f"{planned.name}.weight": planned.fp8 for planned in plan}
    return {
        name: state.of_parameter(name in runs_fp8 and p not in shared, runs_fp8.get(name, False))
        for name, p in model.named_parameters()
    }


def narrow(model: nn.Module, state: StateDtypes, plan: Sequence[PlannedLinear]) -> None:
    """Let each parameter of `model`, float32 on the meta device, have the dtype in which it is held, or the compute dtype where a
    codec or FP8 layers hold it: one that is loaded next needs no float32 original."""
    for name, columns in parameter_columns(model, state, plan).items():
        p = model.get_parameter(name)
        p.data = p.data.to(DTYPES.get(columns["weight"], DTYPES[state.precision.compute]))


def hold(
    model: nn.Module,
    state: StateDtypes,
    plan: Sequence[PlannedLinear],
    columns: Mapping[str, Columns],
    region: Region,
) -> None:
    """Let the linear layers of `plan` hold their weights as `columns` say, in place; those whose weights are float8 operands, or
    in the compute dtype, stay as they are. A layer in high precision that decodes its weight, or casts its bias, is an FP8Linear
    with no product in FP8."""
    compute = state.precision.compute
    for planned in plan:
        layer = model.get_submodule(planned.name)
        named = columns.get(f"{planned.name}.weight", state.other)  # a tied weight has another name
        bias = (
            columns.get(f"{planned.name}.bias", named)["weight"]
            if type(layer) is nn.Linear
            else compute
        )
        if named["weight"] == bias == compute or getattr(layer, "fp8_params", False):
            continue
        if type(layer) is nn.Linear:
            high = FP8Linear.from_linear(
                layer, Scaling(kind="current"), region, high_precision=(True, True, True)
            )
            replaced(model, planned.name, high)
            layer = high
        if isinstance(layer, FP8Linear):
            layer.hold(get_codec(named["weight"]), DTYPES[compute])
        else:
            weight_storage.hold(layer, get_codec(named["weight"]), DTYPES[compute])
    if state.other["weight"] != compute:
        for norm in [
            module for module in model.modules() if getattr(module, "read_by_product", False)
        ]:
            weight_storage.hold(norm, get_codec("fp32"), DTYPES[compute])


def shard_in_codec(
    model: nn.Module,
    state: StateDtypes,
    plan: Sequence[PlannedLinear],
    columns: Mapping[str, Columns],
    region: Region,
) -> None:
    """Let FSDP2 gather the weights of the linear layers of `plan`, FP8Linears or plain ones, in their codecs, in place."""
    for planned in plan:
        named = columns.get(f"{planned.name}.weight", state.other)  # a tied weight has another name
        if named["weight"] != state.other["weight"]:
            layer = model.get_submodule(planned.name)
            if not isinstance(layer, FP8Linear):
                assert type(layer) is nn.Linear
                layer = FP8Linear.from_linear(
                    layer, Scaling(kind="current"), region, high_precision=(True, True, True)
                )
                replaced(model, planned.name, layer)
            shard_in_fp8(layer, get_codec(named["weight"]))
    model.register_load_state_dict_post_hook(lambda *_: refresh_shards(fp8_linears(model)))


def unhold(model: nn.Module, dtype: torch.dtype) -> None:
    """Undo, in place, `hold` and `embed_in`: weights in a codec come back decoded, in `dtype`. A weight whose codec has no scale
    stays the same Parameter, so that tied weights stay tied.
    """
    for name, layer in list(model.named_modules()):
        if isinstance(layer, HeldWeight):
            weight_storage.unhold(layer, _decoded(layer, dtype))
        elif isinstance(layer, FP8Linear) and layer.codec:
            replaced(model, name, linear_with(_decoded(layer, dtype), layer.bias))
        for key, hook in list(layer._forward_hooks.items()):
            if isinstance(hook, partial) and hook.func is _cast_output:
                del layer._forward_hooks[key]


def _decoded(layer: FP8Linear | HeldWeight, dtype: torch.dtype) -> nn.Parameter:
    assert layer.codec, "held in it"
    if layer.codec.scaling != "none":
        return nn.Parameter(
            layer.codec.decode(layer.in_codec).to(dtype),
            requires_grad=layer.parameter.requires_grad,
        )
    if layer.parameter.dtype != dtype:
        layer.parameter.grad = None  # it has the dtype of before
        layer.parameter.grad_dtype = None
        layer.parameter.data = layer.parameter.data.to(dtype)
    return layer.parameter


def embed_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let embeddings that are stored in float32 output `dtype`, the dtype of all activations, also where the outputs of
    tensor-parallel ranks are then added up: all but one of these are 0."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(partial(_cast_output, dtype), prepend=True)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out.to(dtype)


def cast_parameters(model: nn.Module, columns: Mapping[str, Columns]) -> None:
    """Cast parameters that no layer holds in a codec to the dtype of their weight column, and set the `grad_dtype` of each to that
    of its gradient column.
    """
    layers = {
        layer.parameter: layer
        for layer in model.modules()
        if isinstance(layer, NarrowWeight) and layer.held
    }
    for name, p in model.named_parameters():
        gradient = DTYPES[
            "fp32" if columns[name]["weight_grad"] in SCALED else columns[name]["weight_grad"]
        ]
        if p in layers:
            layers[p].set_weight_grad_dtype(gradient)
            continue
        if p.dtype == torch.float32:
            p.data = p.data.to(DTYPES[columns[name]["weight"]])
        if p.dtype != gradient:
            p.grad_dtype = gradient


def held(model: nn.Module) -> dict[nn.Parameter, FP8Linear | HeldWeight]:
    """For each weight in a codec with a scale, the layer that holds it; `in_codec` has the tensors."""
    return {layer.parameter: layer for layer in in_codec(model) if len(layer.in_codec) > 1}


def in_codec(model: nn.Module) -> list[FP8Linear | HeldWeight]:
    """The layers that store their weight in a codec."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, (FP8Linear, HeldWeight)) and layer.codec
    ]


def shared_weights(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that more than one module holds, as a tied output layer and embedding do."""
    seen: set[nn.Parameter] = set()
    return {
        p
        for m in model.modules()
        for p in m.parameters(recurse=False)
        if p in seen or seen.add(p)  # type: ignore[func-returns-value]
    }
