"""MXFP8Linear of torchao, a prototype: blocks of 32 with E8M0 scales, rounded as in TE (RCEIL)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from fp8cfg.backends.protocol import same
from fp8cfg.backends.torchao.recording import WatchedLinear, watched
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.fp8 import FP8
from fp8cfg.numerics.decoded_weight import operand

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
                f" {_BLOCK}; write backend=native, or give the model another batch size or length"
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
