"""torchao backend: Float8Linear for current scaling, and the prototype MXFP8Linear for MXFP8."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, Self

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

from fp8cfg.backends.any_model.module_swap import linear_with, replace_module
from fp8cfg.backends.gemm_plan import GEMMS, HIGH_PRECISION, Kinds, PlannedLinear
from fp8cfg.backends.protocol import Observed, same
from fp8cfg.backends.stored_weights import shared_weights
from fp8cfg.backends.torchao.rules import blocks
from fp8cfg.numerics import Region
from fp8cfg.numerics.autocast import enter_regions
from fp8cfg.numerics.weight_storage import operand
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.fp8 import FP8, per_row, power_2_scales

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_KINDS: list[Kinds] = [
    None,
    HIGH_PRECISION,
    *((a, b) for a in FORMATS.values() for b in FORMATS.values()),
]
"""Operand kinds by their code in `WatchedLinear.gemms_ran`."""
_HIGH_PRECISION_CODE = _KINDS.index(HIGH_PRECISION)
_MX_BLOCK = 32  # elements per scale


def convert(
    model: nn.Module,
    fp8: FP8,
    plan: Sequence[PlannedLinear],
    region: Region,
    product: str,
    compute: torch.dtype = torch.bfloat16,
    fp8_gather: bool = False,
) -> None:
    """Replaces linear layers, as in `Backend.convert`.

    With `fp8_gather` FSDP2 gathers weights in FP8, except weights shared with another module. Their
    scales are computed after each step and after loading.
    """
    shared = shared_weights(model)
    make_layer = _layer_maker(fp8, product)
    make_gathered_layer = _layer_maker(fp8, product, fp8_gather)
    for planned in plan:
        if not planned.fp8:
            continue
        linear = model.get_submodule(planned.name)
        assert isinstance(linear, nn.Linear)
        make = make_layer if linear.weight in shared else make_gathered_layer
        layer = make(linear)
        layer.watch(region)
        replace_module(model, planned.name, layer)
    if fp8_gather:
        model.register_load_state_dict_post_hook(
            lambda *_: precompute_float8_dynamic_scale_for_fsdp(model)
        )


def _layer_maker(
    fp8: FP8, product: str, fp8_gather: bool = False
) -> Callable[[nn.Linear], WatchedLinear]:
    """Returns a function that creates the FP8 layer of an nn.Linear."""
    if blocks(fp8):
        return _mxfp8_layer_maker(fp8, product)
    from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen

    # torchao's own conversion does this too (0.18). It works around triton#11111.
    _patch_inductor_min_max_codegen()
    config = config_of(fp8, product, fp8_gather)

    def make_layer(linear: nn.Linear) -> WatchedLinear:
        layer: Any = TorchaoLinear.from_float(linear, config)
        # For FP8 gathers torchao wraps the weight in a tensor subclass.
        weight = layer.weight._tensor if fp8_gather else layer.weight
        expected = {
            "config": config,
            "weight": id(linear.weight),
            "bias": id(linear.bias),
            "emulate": {product == "emulate"},
        }
        built = {
            "config": layer.config,
            "weight": id(weight),
            "bias": id(layer.bias),
            "emulate": {mm.emulate for mm in layer.linear_mm_config},
        }
        same("Float8Linear", expected, built)
        assert isinstance(layer, WatchedLinear)
        return layer

    return make_layer


def _mxfp8_layer_maker(fp8: FP8, product: str) -> Callable[[nn.Linear], WatchedLinear]:
    """Returns a function that creates the MXFP8 layer of an nn.Linear and reads its fields back."""
    kernels = KernelPreference.EMULATED if product == "emulate" else KernelPreference.AUTO
    expected: dict[str, Any] = {
        "kernel_preference": kernels,
        "scale_calculation_mode": ScaleCalculationMode.RCEIL,
        "wgrad_with_hp": fp8.override_linear_precision.wgrad,
    }

    def make_layer(linear: nn.Linear) -> WatchedLinear:
        out_features, in_features = linear.weight.shape
        layer = TorchaoMXLinear(
            in_features, out_features, bias=linear.bias is not None, device="meta", **expected
        )
        layer.weight, layer.bias = linear.weight, linear.bias
        same("MXFP8Linear", expected, {name: getattr(layer, name) for name in expected})
        return layer

    return make_layer


def config_of(fp8: FP8, product: str, fp8_gather: bool = False) -> Float8LinearConfig:
    """Returns the configuration of torchao's Float8Linear and reads every field back.

    With scales per row and wgrad in high precision, this is torchao's recipe rowwise_with_gw_hp.
    Its dgrad reads the weight with one scale. As in torchao's recipes, fprop accumulates fast and
    the backward pass exactly.

    Args:
        fp8: FP8 settings.
        product: "emulate" or "scaled_mm".
        fp8_gather: Whether FSDP2 gathers weights in FP8.

    Raises:
        BackendError: A field differs.
    """
    per_row_scales = per_row(fp8)
    override = fp8.override_linear_precision
    gradient_dtype = torch.float8_e5m2 if fp8.format == "hybrid" else torch.float8_e4m3fn

    def cast(
        gemm: str, dtype: torch.dtype = torch.float8_e4m3fn, by_row: bool = per_row_scales
    ) -> CastConfig:
        if getattr(override, gemm):
            return CastConfig(ScalingType.DISABLED, target_dtype=dtype)
        granularity = ScalingGranularity.AXISWISE if by_row else ScalingGranularity.TENSORWISE
        return CastConfig(ScalingType.DYNAMIC, granularity, dtype)

    expected: dict[str, Any] = {
        "cast_config_input": cast("fprop"),
        "cast_config_input_for_grad_weight": cast("wgrad"),
        "cast_config_weight": cast("fprop"),
        "cast_config_weight_for_grad_input": cast(
            "dgrad", by_row=per_row_scales and not override.wgrad
        ),
        "cast_config_grad_output": cast("dgrad", gradient_dtype),
        "cast_config_grad_output_for_grad_weight": cast("wgrad", gradient_dtype),
        "gemm_config_output": Float8GemmConfig(use_fast_accum=True),
        "gemm_config_grad_input": Float8GemmConfig(),
        "gemm_config_grad_weight": Float8GemmConfig(),
        "enable_fsdp_float8_all_gather": fp8_gather,
        "pad_inner_dim": False,
        "emulate": product == "emulate",
        "force_recompute_fp8_weight_in_bwd": False,
        "round_scales_to_power_of_2": power_2_scales(fp8),
    }
    config = Float8LinearConfig(**expected)
    built = {field.name: getattr(config, field.name) for field in fields(config)}
    same("Float8LinearConfig", expected, built)
    return config


class WatchedLinear(nn.Linear):
    """First base class of a converted layer, before a layer of torchao.

    It runs in FP8 inside of its region, otherwise as nn.Linear. The input is [..., in_features],
    the output [..., out_features].

    Attributes:
        region: The autocast region.
        gemms_ran: int32 [3], codes of the operand kinds of the last fprop, dgrad and wgrad, see
            `decode`. High-precision evaluation does not change it.
    """

    region: Region
    gemms_ran: Tensor
    _parameters: dict[str, nn.Parameter]  # type: ignore[assignment]

    def watch(self, region: Region) -> None:
        """Sets the attributes that torchao's layers do not have."""
        self.region = region
        self._clear_record()

    def _clear_record(self) -> None:
        """Makes a new record on the weight's device. No GEMM has run yet."""
        device = self._parameters["weight"].device
        zeros = torch.zeros(len(GEMMS), dtype=torch.int32, device=device)
        self.register_buffer("gemms_ran", zeros, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.gemms_ran.is_meta
        super()._apply(fn, recurse)
        if was_meta:
            self._clear_record()  # to_empty() leaves garbage in buffers
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.gemms_ran.is_meta:
            self._clear_record()  # load_state_dict(assign=True) replaced only the parameters

    def forward(self, x: Tensor) -> Tensor:
        if not self.region.applies():
            self._record_high_precision(x)
            return F.linear(x, self.high_precision_weight, self.bias)
        device = x.device.type
        # torchao only follows autocast on CUDA, so the cast is here.
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            y = self.multiply(x)
            if self.bias is not None:
                y = y + self.bias.to(y.dtype)
            return y

    def _record_high_precision(self, x: Tensor) -> None:
        """Records the GEMMs of a training pass outside of the region."""
        if not (torch.is_grad_enabled() and self.training):
            return
        gemm_runs = (True, x.requires_grad, self._parameters["weight"].requires_grad)
        for slot, runs in enumerate(gemm_runs):
            if runs:
                self.gemms_ran[slot].fill_(_HIGH_PRECISION_CODE)

    @property
    def high_precision_weight(self) -> Tensor:
        """The weight [out_features, in_features] for passes outside of the region."""
        return operand(self)

    def multiply(self, x: Tensor) -> Tensor:
        """Computes x Wᵀ with torchao's function and records its GEMMs, without the bias."""
        raise NotImplementedError


class TorchaoLinear(WatchedLinear, Float8Linear):  # type: ignore[misc]
    """torchao's Float8Linear with an autocast region and a record of its GEMMs."""

    def multiply(self, x: Tensor) -> Tensor:
        y: Tensor = _matmul.apply(
            self.gemms_ran, x, operand(self).t(), self.linear_mm_config, self.config
        )
        return y

    @property
    def high_precision_weight(self) -> Tensor:
        """The weight, dequantized if FSDP2 gathered it in FP8."""
        weight: Tensor = operand(self)
        if isinstance(weight, Float8TrainingTensor):
            weight = weight.to_original_precision()
        return weight


class TorchaoMXLinear(WatchedLinear, MXFP8Linear):  # type: ignore[misc]
    """torchao's MXFP8Linear with an autocast region and a record of its GEMMs."""

    def multiply(self, x: Tensor) -> Tensor:
        tokens = x.shape[:-1].numel()
        # wgrad contracts tokens, and torchao does not pad them.
        if tokens % _MX_BLOCK and torch.is_grad_enabled() and not self.wgrad_with_hp:
            raise ConfigError(
                f"backend=torchao: a layer got {tokens} tokens, its MXFP8 needs a multiple of"
                f" {_MX_BLOCK}; set backend=native, or give the model another batch size or length"
            )
        # The arguments are those of torchao's _to_mxfp8_then_scaled_mm (0.18).
        y: Tensor = _mx_matmul.apply(
            self.gemms_ran,
            x,
            operand(self),
            torch.float8_e4m3fn,  # input
            torch.float8_e4m3fn,  # weight
            torch.float8_e4m3fn,  # grad_output
            _MX_BLOCK,
            self.kernel_preference,
            MXFP8Dim0CastKernelChoice.TRITON,
            MXFP8Dim1CastKernelChoice.CUDA,
            self.scale_calculation_mode,
            self.wgrad_with_hp,
        )
        return y


def watched(function: type[torch.autograd.Function]) -> Any:
    """Returns an autograd function of torchao with a record of its GEMMs.

    The forward pass runs fprop, the backward pass dgrad and then wgrad.

    Args:
        function: The autograd function.

    Returns:
        An autograd function with one more argument in front: the record, int32 [3].
    """

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gemms_ran: Tensor, *arguments: Any) -> Any:
            ctx.gemms_ran = gemms_ran
            with _GemmRecorder() as recorder:
                y = function.forward(ctx, *arguments)
            recorder.write(gemms_ran, first_slot=0)
            return y

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            unpacked = _UnpackedContext(ctx)
            with _GemmRecorder() as recorder:
                input_gradients = function.backward(unpacked, *gradients)
            recorder.write(ctx.gemms_ran, first_slot=1)
            return None, *input_gradients

    return torch._dynamo.allow_in_graph(Watched)


class _GemmRecorder(TorchFunctionMode):
    """Torch function mode that records the operands of each `torch.mm` in torchao's code."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[Kinds] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.mm:
            a, b = (FORMATS.get(_codes(tensor).dtype) for tensor in args)
            self.kinds.append((a, b) if a and b else HIGH_PRECISION)
        return func(*args, **(kwargs or {}))

    def write(self, gemms_ran: Tensor, first_slot: int) -> None:
        """Writes the operands to `gemms_ran`, int32 [3].

        The write is a tensor operation, so compiled graphs contain it.
        """
        for slot, kinds in enumerate(self.kinds, first_slot):
            gemms_ran[slot].fill_(_KINDS.index(kinds))


def _codes(tensor: Tensor) -> Tensor:
    """Returns the 8-bit tensor inside of a Float8TrainingTensor or MXTensor of torchao."""
    for name in ("_data", "qdata"):
        inner = getattr(tensor, name, None)
        if isinstance(inner, Tensor):
            return inner
    return tensor


class _UnpackedContext:
    """Autograd context with unpacked saved tensors.

    Under activation checkpointing unpacking repeats the forward pass. Its GEMMs must not be
    recorded as backward GEMMs, so it happens before the recorder starts.
    """

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.saved_tensors = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


_matmul = watched(matmul_with_hp_or_float8_args)
_mx_matmul = watched(mx_mm)


def decode(code: int) -> Kinds:
    """Returns the operand kinds for an entry of `WatchedLinear.gemms_ran`."""
    return _KINDS[code]


def _layers(model: nn.Module) -> Iterator[tuple[str, WatchedLinear]]:
    """Yields the converted layers and their names."""
    for name, module in model.named_modules():
        if isinstance(module, WatchedLinear):
            yield name, module


def autocast(model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """Returns the context of `Backend.autocast`."""
    return enter_regions((layer for _, layer in _layers(model)), enabled)


def observed(model: nn.Module) -> Observed:
    """Returns the operand kinds of each GEMM that ran, by layer."""
    records: Observed = {}
    for name, layer in _layers(model):
        codes = layer.gemms_ran
        if codes.is_meta:  # nothing can run there
            codes = torch.zeros_like(codes, device="cpu")
        kinds = [decode(code) for code in codes.tolist()]
        records[name] = dict(zip(GEMMS, kinds, strict=True))
    return records


def forget_observed(model: nn.Module) -> None:
    """Clears the record of GEMMs before the next observed step."""
    for _, layer in _layers(model):
        layer.gemms_ran.zero_()


def record(model: nn.Module) -> dict[str, Any]:
    """Returns no additional entries."""
    return {}


def optimizer(
    prepared: Any, precision: Any, optim: Any, clip_grad: float, loss_scaler: Any
) -> None:
    """Returns None: any optimizer can train the layers."""
    return None


def cache_weights(model: nn.Module, on: bool = True) -> None:
    """Does nothing: torchao quantizes weights in every pass."""


def writers(model: nn.Module) -> dict[nn.Parameter, Callable[[Tensor], None]]:
    """Returns nothing: weights are in high precision."""
    return {}


def after_step(
    model: nn.Module, group: dist.ProcessGroup | None, step: int, skip: Tensor | None = None
) -> None:
    """Computes the scales for FP8 gathers of the next step. The layers have no other state."""
    precompute_float8_dynamic_scale_for_fsdp(model)


def after_skip(model: nn.Module) -> None:
    """Does nothing: weights are unchanged."""


def plain(layer: nn.Module) -> nn.Linear | None:
    """Returns an nn.Linear with the same Parameters, or None for other modules."""
    if not isinstance(layer, WatchedLinear):
        return None
    return linear_with(layer._parameters["weight"], layer.bias)
