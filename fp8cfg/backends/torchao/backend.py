"""torchao backend: Float8Linear, configured from the recipe field by field, and MXFP8Linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchao.float8.config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
)
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp

from fp8cfg.backends.gemm_plan import GEMMS, PlannedLinear
from fp8cfg.backends.module_swap import linear_with, replaced
from fp8cfg.backends.protocol import Observed, same
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.backends.torchao.recording import WatchedLinear, decode, watched
from fp8cfg.backends.torchao.rules import blocks
from fp8cfg.config.fp8 import FP8, per_row, power_2_scales
from fp8cfg.numerics import Region
from fp8cfg.numerics.decoded_weight import operand

_matmul = watched(matmul_with_hp_or_float8_args)


class TorchaoLinear(WatchedLinear, Float8Linear):  # type: ignore[misc]
    """torchao's Float8Linear with an autocast region and a record of its products."""

    def multiply(self, x: Tensor) -> Tensor:
        y: Tensor = _matmul.apply(
            self.gemms_ran, x, operand(self).t(), self.linear_mm_config, self.config
        )
        return y

    @property
    def high_precision_weight(self) -> Tensor:
        """The weight in high precision, dequantized where it was gathered in FP8."""
        weight: Tensor = operand(self)
        return (
            weight.to_original_precision() if isinstance(weight, Float8TrainingTensor) else weight
        )


def config_of(fp8: FP8, product: str, fp8_gather: bool = False) -> Float8LinearConfig:
    """The configuration of torchao's Float8Linear for the `fp8` node, every field read back. Raises BackendError where one
    differs.

    With rows and wgrad in high precision it is torchao's recipe rowwise_with_gw_hp, whose dgrad reads the weight with one
    scale. Accumulation is fast forward and exact backward, as in torchao's own recipes."""
    rows = per_row(fp8)
    high = fp8.override_linear_precision
    gradient = torch.float8_e5m2 if fp8.format == "hybrid" else torch.float8_e4m3fn

    def cast(
        gemm: str, dtype: torch.dtype = torch.float8_e4m3fn, by_row: bool = rows
    ) -> CastConfig:
        if getattr(high, gemm):
            return CastConfig(ScalingType.DISABLED, target_dtype=dtype)
        granularity = ScalingGranularity.AXISWISE if by_row else ScalingGranularity.TENSORWISE
        return CastConfig(ScalingType.DYNAMIC, granularity, dtype)

    wanted: dict[str, Any] = {
        "cast_config_input": cast("fprop"),
        "cast_config_input_for_grad_weight": cast("wgrad"),
        "cast_config_weight": cast("fprop"),
        "cast_config_weight_for_grad_input": cast("dgrad", by_row=rows and not high.wgrad),
        "cast_config_grad_output": cast("dgrad", gradient),
        "cast_config_grad_output_for_grad_weight": cast("wgrad", gradient),
        "gemm_config_output": Float8GemmConfig(use_fast_accum=True),
        "gemm_config_grad_input": Float8GemmConfig(),
        "gemm_config_grad_weight": Float8GemmConfig(),
        "enable_fsdp_float8_all_gather": fp8_gather,
        "pad_inner_dim": False,
        "emulate": product == "emulate",
        "force_recompute_fp8_weight_in_bwd": False,
        "round_scales_to_power_of_2": power_2_scales(fp8),
    }
    config = Float8LinearConfig(**wanted)
    same("Float8LinearConfig", wanted, {f.name: getattr(config, f.name) for f in fields(config)})
    return config


def convert(
    model: nn.Module,
    fp8: FP8,
    plan: Sequence[PlannedLinear],
    region: Region,
    product: str,
    compute: torch.dtype = torch.bfloat16,
    fp8_gather: bool = False,
) -> None:
    """See `protocol.Backend`. With `fp8_gather` FSDP2 gathers weights in FP8, except one that a layer outside FP8 shares; their
    scales are those of the weights after a step, or after new ones are loaded.
    """
    new, gathered = _maker(fp8, product), _maker(fp8, product, fp8_gather)
    shared = shared_weights(model)
    for planned in plan:
        if planned.fp8:
            linear = model.get_submodule(planned.name)
            assert isinstance(linear, nn.Linear)
            layer = (new if linear.weight in shared else gathered)(linear)
            layer.watch(region)
            replaced(model, planned.name, layer)
    if fp8_gather:
        model.register_load_state_dict_post_hook(
            lambda *_: precompute_float8_dynamic_scale_for_fsdp(model)
        )


def _maker(
    fp8: FP8, product: str, fp8_gather: bool = False
) -> Callable[[nn.Linear], WatchedLinear]:
    if blocks(fp8):
        from fp8cfg.backends.torchao.mxfp8 import maker

        return maker(fp8, product)
    from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen

    # as torchao 0.18's own conversion does, till triton#11111 is mended
    _patch_inductor_min_max_codegen()
    config = config_of(fp8, product, fp8_gather)

    def make(linear: nn.Linear) -> WatchedLinear:
        layer: Any = TorchaoLinear.from_float(linear, config)
        weight = (
            layer.weight._tensor if fp8_gather else layer.weight
        )  # wrapped, in a Parameter of its own
        wanted = {
            "config": config,
            "weight": id(linear.weight),
            "bias": id(linear.bias),
            "emulate": {product == "emulate"},
        }
        same(
            "Float8Linear",
            wanted,
            {
                "config": layer.config,
                "weight": id(weight),
                "bias": id(layer.bias),
                "emulate": {mm.emulate for mm in layer.linear_mm_config},
            },
        )
        assert isinstance(layer, WatchedLinear)
        return layer

    return make


def _layers(model: nn.Module) -> Iterator[tuple[str, WatchedLinear]]:
    return (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, WatchedLinear)
    )


def autocast(model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    _, layer = next(_layers(model), (None, None))
    return layer.region.entered(enabled) if layer else nullcontext()


def observed(model: nn.Module) -> Observed:
    return {
        name: dict(zip(GEMMS, map(decode, layer.gemms_ran.tolist()), strict=True))
        for name, layer in _layers(model)
    }


def forget_observed(model: nn.Module) -> None:
    for _, layer in _layers(model):
        layer.gemms_ran.zero_()


def record(model: nn.Module) -> dict[str, Any]:
    return {}


def optimizer(
    prepared: Any, precision: Any, optim: Any, clip_grad: float, loss_scaler: Any
) -> None:
    return None


def cache_weights(model: nn.Module, on: bool = True) -> None:
    """Does nothing: torchao quantizes weights in every pass."""


def writers(model: nn.Module) -> dict[nn.Parameter, Callable[[Tensor], None]]:
    return {}


def after_step(
    model: nn.Module, group: dist.ProcessGroup | None, step: int, skip: Tensor | None = None
) -> None:
    """Recompute the scales for gathering weights in FP8, where they are; current and MXFP8 scaling have no other state."""
    precompute_float8_dynamic_scale_for_fsdp(model)


def after_skip(model: nn.Module) -> None:
    """Does nothing: weights are unchanged."""


def plain(layer: nn.Module) -> nn.Linear | None:
    return (
        linear_with(layer._parameters["weight"], layer.bias)
        if isinstance(layer, WatchedLinear)
        else None
    )
