"""Native backend: replaces linear layers and attention by layers of `numerics`, on CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.backends.any_model.module_swap import linear_with, replace_module
from fp8cfg.backends.gemm_plan import (
    ATTENTION_GEMMS,
    GEMMS,
    HIGH_PRECISION,
    Kinds,
    PlannedLinear,
    plan_attention,
)
from fp8cfg.backends.protocol import Observed
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.numerics import (
    FP8Linear,
    Region,
    Scaling,
    decode_gemm_record,
    fp8_linears,
)
from fp8cfg.numerics.amax_update import FP8Layer, discard_amax, fp8_layers, update_scales
from fp8cfg.numerics.autocast import enter_regions
from fp8cfg.numerics.fp8_attention import FP8Attention
from fp8cfg.numerics.fsdp_weights import refresh_shards, shard_in_fp8
from fp8cfg.numerics.scaling_settings import scaling_of
from fp8cfg.numerics.stored_state import say_scales_anew
from fp8cfg.schema.fp8 import FP8


def convert(
    model: nn.Module,
    fp8: FP8,
    plan: Sequence[PlannedLinear],
    region: Region,
    product: str,
    compute: torch.dtype = torch.bfloat16,
    fp8_gather: bool = False,
) -> None:
    """Replaces linear layers and attention by FP8 layers, as in `Backend.convert`.

    Weights keep their Parameters. Under fp8.params they become float8 Parameters, except weights
    that a high-precision module shares.
    """
    # A tied embedding reads its weight in high precision.
    shared = shared_weights(model)
    scaling = scaling_of(fp8)
    for planned in plan:
        if not planned.fp8:
            continue
        linear = model.get_submodule(planned.name)
        assert isinstance(linear, nn.Linear)
        fprop, dgrad, wgrad = planned.gemms
        layer = FP8Linear.from_linear(
            linear,
            scaling,
            region,
            high_precision=(fprop is None, dgrad is None, wgrad is None),
            product=product,  # type: ignore[arg-type]
            fp8_params=fp8.params and linear.weight not in shared,
            read_as=compute if fp8.params else None,
        )
        layer.keeps_transpose = fp8.keep_transpose_cache
        replace_module(model, planned.name, layer)
        if fp8_gather and linear.weight not in shared:
            shard_in_fp8(layer)
    # Loading replaces float32 shards. Their FP8 copies must follow before the next gather.
    if fp8_gather:
        model.register_load_state_dict_post_hook(lambda *_: refresh_shards(fp8_linears(model)))
    if fp8.dot_product_attention:
        _convert_attention(model, fp8, scaling, region)


def _convert_attention(model: nn.Module, fp8: FP8, scaling: Scaling, region: Region) -> None:
    """Replaces the attention of each Transformer layer that the plan has in FP8."""
    device = next(model.parameters()).device
    names = {name for name, _ in model.named_modules()}
    # A pipeline stage has some of the layers, with the numbers of the whole model.
    num_layers: int = model.config.num_layers  # type: ignore[assignment, union-attr]
    for planned in plan_attention(fp8, num_layers):
        if any(planned.gemms) and planned.name in names:
            parent, _, leaf = planned.name.rpartition(".")
            plain = model.get_submodule(planned.name)
            setattr(model.get_submodule(parent), leaf, FP8Attention(scaling, region, device, plain))


def autocast(model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """Returns the context of `Backend.autocast`."""
    return enter_regions(fp8_layers(model), enabled)


def observed(model: nn.Module) -> Observed:
    """Returns the operand kinds of each GEMM that ran, by FP8 layer."""
    kinds_by_layer: Observed = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, FP8Layer):
            continue
        gemms = GEMMS if isinstance(layer, FP8Linear) else ATTENTION_GEMMS
        codes = layer.gemms_ran
        if codes.is_meta:  # nothing can run there
            codes = torch.zeros_like(codes, device="cpu")
        kinds = [_operand_kinds(code) for code in codes.tolist()]
        kinds_by_layer[name] = dict(zip(gemms, kinds, strict=True))
    return kinds_by_layer


def _operand_kinds(code: int) -> Kinds:
    """Returns the operand kinds for an entry of `gemms_ran`."""
    gemm_record = decode_gemm_record(code)
    if gemm_record is None:
        return None
    if gemm_record.execution == "high_precision":
        return HIGH_PRECISION
    return gemm_record.a, gemm_record.b


def forget_observed(model: nn.Module) -> None:
    """Clears the record of GEMMs before the next observed step."""
    for layer in fp8_layers(model):
        layer.clear_gemms_ran()


def record(model: nn.Module) -> dict[str, Any]:
    """Returns no additional entries."""
    return {}


def optimizer(
    prepared: Any, precision: Any, optim: Any, clip_grad: float, loss_scaler: Any
) -> None:
    """Returns None: any optimizer can train the layers."""
    return None


def cache_weights(model: nn.Module, on: bool = True) -> None:
    """Does nothing. FP8 layers cache quantized weights themselves (numerics/linear_operands.py)."""


def float8_weights(model: nn.Module) -> dict[nn.Parameter, FP8Linear]:
    """Returns the layer of each weight that is stored only in float8."""
    return {layer.parameter: layer for layer in fp8_linears(model) if layer.fp8_params}


def writers(model: nn.Module) -> dict[nn.Parameter, Callable[[Tensor], None]]:
    """Returns the functions that quantize masters into trained float8 weights."""
    return {
        weight: layer.set_weight
        for weight, layer in float8_weights(model).items()
        if weight.requires_grad
    }


def after_step(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    step: int,
    skip: Tensor | None = None,
) -> None:
    """Updates scales as in `Backend.after_step`, then the FP8 copies of FSDP2 shards."""
    say_scales_anew(fp8_layers(model))
    update_scales(fp8_layers(model), group=group, step=step, skip=skip)
    # Frozen weights did not change, so their FP8 shards are still valid.
    refresh_shards(layer for layer in fp8_linears(model) if layer.parameter.requires_grad)


def after_skip(model: nn.Module) -> None:
    """Drops the amaxes of a skipped step."""
    discard_amax(fp8_layers(model))


def plain(layer: nn.Module) -> nn.Linear | None:
    """Returns an nn.Linear for an FP8 layer, or None for other modules."""
    if not isinstance(layer, FP8Linear):
        return None
    # The stored codes are not usable without their scale, so the weight is a new Parameter.
    if layer.is_encoded:
        weight = layer.dequantized_weight(torch.float32)
        return linear_with(
            nn.Parameter(weight, requires_grad=layer.parameter.requires_grad), layer.bias
        )
    return linear_with(layer.parameter, layer.bias)
