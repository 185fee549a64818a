"""torchao backend: Float8Linear, configured from the recipe field by field, and MXFP8Linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from fp8cfg.backends.any_model.module_swap import linear_with, replaced
from fp8cfg.backends.gemm_plan import GEMMS, HIGH_PRECISION, Kinds, PlannedLinear
from fp8cfg.backends.protocol import Observed, same
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.backends.torchao.rules import blocks
from fp8cfg.numerics import Region
from fp8cfg.numerics.autocast import enter_regions
from fp8cfg.numerics.weight_storage import operand
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.fp8 import FP8, per_row, power_2_scales

KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_PAIRS: list[Kinds] = [
    None,
    HIGH_PRECISION,
    *((a, b) for a in KINDS.values() for b in KINDS.values()),
]


def decode(code: int) -> Kinds:
    """The kinds of one entry of `WatchedLinear.gemms_ran`."""
    return _PAIRS[code]


class _Products(TorchFunctionMode):
    """Torch function mode that records the operands of each `torch.mm` in the library's code."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Kinds] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.mm:
            a, b = (KINDS.get(_data(t).dtype) for t in args)
            self.seen.append((a, b) if a and b else HIGH_PRECISION)
        return func(*args, **(kwargs or {}))

    def record(self, ran: Tensor, first: int) -> None:
        """Write the operands seen to `ran`, from slot `first` on: an operation on a tensor, so that a compiled graph has it."""
        for slot, kinds in enumerate(self.seen, first):
            ran[slot].fill_(_PAIRS.index(kinds))


def _data(t: Tensor) -> Tensor:
    """The eight-bit tensor inside of torchao's Float8TrainingTensor and MXTensor."""
    for name in ("_data", "qdata"):
        if isinstance(inner := getattr(t, name, None), Tensor):
            return inner
    return t


class _Unpacked:
    """The context of a backward pass, its saved tensors unpacked: that may run a forward pass again, which is not to be seen."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def watched(function: type[torch.autograd.Function]) -> Any:
    """`function`, of the library, with the record of a layer for one more argument before its own. Its forward pass makes fprop,
    its backward pass dgrad and then wgrad."""

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, ran: Tensor, *arguments: Any) -> Any:
            ctx.ran = ran
            with _Products() as products:
                y = function.forward(ctx, *arguments)
            products.record(ran, 0)
            return y

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            unpacked = _Unpacked(ctx)
            with _Products() as products:
                inputs = function.backward(unpacked, *gradients)
            products.record(ctx.ran, 1)
            return None, *inputs

    return torch._dynamo.allow_in_graph(Watched)


class WatchedLinear(nn.Linear):
    """Base class of a torchao layer: in FP8 while its region is active, an nn.Linear otherwise. `gemms_ran`, int32 [3], holds the
    operand kinds of the last fprop, dgrad and wgrad, evaluations in high precision apart: see `decode`.
    """

    region: Region
    gemms_ran: Tensor
    _parameters: dict[str, nn.Parameter]  # type: ignore[assignment]

    def watch(self, region: Region) -> None:
        """Attach the region and the record to the layer."""
        self.region = region
        self.register_buffer(
            "gemms_ran",
            torch.zeros(3, dtype=torch.int32, device=self.weight.device),
            persistent=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.region.applies():
            if torch.is_grad_enabled() and self.training:
                for slot, runs in enumerate(
                    (True, x.requires_grad, self._parameters["weight"].requires_grad)
                ):
                    if runs:
                        self.gemms_ran[slot].fill_(_PAIRS.index(HIGH_PRECISION))
            return F.linear(x, self.high_precision_weight, self.bias)
        device = x.device.type
        if torch.is_autocast_enabled(device):  # torchao asks about CUDA alone
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            y = self.multiply(x)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def high_precision_weight(self) -> Tensor:
        """The weight that is used outside of the region."""
        return operand(self)

    def multiply(self, x: Tensor) -> Tensor:
        """The library's product x [..., in] Wᵀ, recorded."""
        raise NotImplementedError


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
    return enter_regions((layer for _, layer in _layers(model)), enabled)


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


_mm = watched(mx_mm)
_E4M3 = torch.float8_e4m3fn
_BLOCK = 32


class TorchaoMXLinear(WatchedLinear, MXFP8Linear):  # type: ignore[misc]
    """torchao's MXFP8Linear with an autocast region and a record; its arguments are those of torchao's `_to_mxfp8_then_scaled_mm`."""

    def multiply(self, x: Tensor) -> Tensor:
        tokens = x.shape[:-1].numel()
        if tokens % _BLOCK and torch.is_grad_enabled() and not self.wgrad_with_hp:
            raise ConfigError(
                f"backend=torchao: a layer got {tokens} tokens, its MXFP8 needs a multiple of"
                f" {_BLOCK}; set backend=native, or give the model another batch size or length"
            )
        y: Tensor = _mm.apply(
            self.gemms_ran,
            x,
            operand(self),
            _E4M3,
            _E4M3,
            _E4M3,
            _BLOCK,
            self.kernel_preference,
            MXFP8Dim0CastKernelChoice.TRITON,
            MXFP8Dim1CastKernelChoice.CUDA,
            self.scale_calculation_mode,
            self.wgrad_with_hp,
        )
        return y


def maker(fp8: FP8, product: str) -> Callable[[nn.Linear], WatchedLinear]:
    """The function that builds the MXFP8 layer of an nn.Linear, all fields read back. Raises BackendError where one differs."""
    wanted: dict[str, Any] = {
        "kernel_preference": (
            KernelPreference.EMULATED if product == "emulate" else KernelPreference.AUTO
        ),
        "scale_calculation_mode": ScaleCalculationMode.RCEIL,
        "wgrad_with_hp": fp8.override_linear_precision.wgrad,
    }

    def make(linear: nn.Linear) -> WatchedLinear:
        n, k = linear.weight.shape
        layer = TorchaoMXLinear(k, n, bias=linear.bias is not None, device="meta", **wanted)
        layer.weight, layer.bias = linear.weight, linear.bias
        same("MXFP8Linear", wanted, {name: getattr(layer, name) for name in wanted})
        return layer

    return make
