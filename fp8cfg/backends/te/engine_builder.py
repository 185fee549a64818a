"""Builds Transformer Engine modules for the layers of a model and checks their fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8cfg.backends.protocol import same
from fp8cfg.backends.te.layers import Engine, Parameters, TELinear
from fp8cfg.backends.te.state import refuse_averages

_MISSING = object()


class EngineBuilder:
    """Builds the engines of one conversion.

    Args:
        te: The package transformer_engine.pytorch.
        recipe: The recipe object of Transformer Engine.
        fp8_params: Whether weights are stored in FP8, except `shared` ones.
        shared: Weights of more than one module. They stay in high precision.
        dtype: Dtype represented by FP8 weights.
        kept: Norms that stay as they are.
    """

    def __init__(
        self,
        te: Any,
        recipe: Any,
        fp8_params: bool,
        shared: set[nn.Parameter],
        dtype: torch.dtype,
        kept: Collection[nn.Module] = (),
    ) -> None:
        self.te = te
        self.recipe = recipe
        self.fp8_params = fp8_params
        self.shared = shared
        self.dtype = dtype
        self.kept = kept

    def build_engine(
        self,
        kind: str,
        linears: Sequence[TELinear],
        sizes: tuple[int, int],
        parameters: Parameters,
        bias: bool = False,
        **options: Any,
    ) -> None:
        """Builds a Transformer Engine module and makes it the engine of `linears`.

        Args:
            kind: Class of Transformer Engine, such as "LayerNormLinear".
            linears: Layers whose GEMMs the module computes, in its order.
            sizes: The first two arguments of the class, such as in_features and out_features.
            parameters: Layer and attribute for each Parameter of the module.
            bias: Whether the layers have biases.
            options: Other arguments of the class, which are read back.

        Raises:
            BackendError: The module has other Parameters or other fields.
        """
        module = self.build_module(kind, linears, sizes, bias=bias, **options)
        self.attach_engine(module, linears, parameters, options, bias)

    def build_module(
        self, kind: str, linears: Sequence[TELinear], sizes: tuple[int, ...], **options: Any
    ) -> Any:
        """Builds a Transformer Engine module for `linears`, on the meta device.

        The module allocates no memory, because it gets the Parameters of the layers.
        """
        dtype = linears[0].weight.dtype
        if self._stores_fp8(linears):
            dtype = self.dtype
        with self._model_init(linears):
            return getattr(self.te, kind)(*sizes, params_dtype=dtype, device="meta", **options)

    def attach_engine(
        self,
        module: Any,
        linears: Sequence[TELinear],
        parameters: Parameters,
        options: Mapping[str, Any],
        bias: bool = False,
    ) -> None:
        """Makes `module` the engine of `linears`. See `build_engine` for the arguments.

        Raises:
            BackendError: The module has other Parameters or other fields.
        """
        shapes = {}
        for name, (layer, attribute) in parameters.items():
            shapes[name] = tuple(getattr(layer, attribute).shape)
        module_shapes = {
            name: tuple(parameter.shape) for name, parameter in module.named_parameters()
        }
        same(type(module).__name__, shapes, module_shapes)
        expected = {
            "use_bias": bias,
            "parallel_mode": None,
            "zero_centered_gamma": False,
            **options,
        }
        # te.Linear has no norm, and te.LayerNormMLP no parallel_mode.
        check_fields(module, expected, optional=("parallel_mode", "zero_centered_gamma"))
        stores_fp8 = self._stores_fp8(linears)
        if self.recipe.delayed() and not stores_fp8:
            # Transformer Engine creates scales and histories in the first pass. A state dict must
            # have them before.
            with self._model_init(linears):
                module.fp8_meta |= {"recipe": self.recipe, "num_gemms": len(linears)}
                module.init_fp8_meta_tensors(self.recipe)
        if stores_fp8:
            for index, linear in enumerate(linears):
                # Three quantizers per GEMM: input, weight, output.
                weight_quantizer = module.quantizers["scaling_fwd"][3 * index + 1]
                linear.weight = _quantized(linear.weight, weight_quantizer, self.dtype)
                refuse_averages(linear)
        Engine(module, self.recipe, linears, parameters)

    def _stores_fp8(self, linears: Sequence[TELinear]) -> bool:
        """Whether the weights of `linears` are stored in FP8."""
        return self.fp8_params and not any(linear.weight in self.shared for linear in linears)

    def _model_init(self, linears: Sequence[TELinear]) -> Any:
        """Returns Transformer Engine's context for creating modules of `linears`."""
        # fp8_model_init is the name before 2.9.
        model_init = getattr(self.te, "quantized_model_init", None) or self.te.fp8_model_init
        return model_init(enabled=self._stores_fp8(linears), recipe=self.recipe)


def check_fields(module: Any, expected: Mapping[str, Any], optional: Collection[str] = ()) -> None:
    """Compares fields of a Transformer Engine module with the values they must have.

    Args:
        module: The module.
        expected: Values by field. A field may be nested, such as "self_attention.qkv_format".
        optional: Fields that the module may lack.

    Raises:
        BackendError: With every field that differs or is missing.
    """
    values = {}
    for name in expected:
        value = module
        for attribute in name.split("."):
            value = getattr(value, attribute, _MISSING)
        if value is not _MISSING:
            values[name] = value
    required = {}
    for name, value in expected.items():
        if name in values or name not in optional:
            required[name] = value
    same(type(module).__name__, required, values)


def _quantized(weight: nn.Parameter, quantizer: Any, dtype: torch.dtype) -> nn.Parameter:
    """Returns a weight as a quantized Parameter of Transformer Engine, rounded once.

    Args:
        weight: [out, in] in high precision.
        quantizer: Quantizer of the weight.
        dtype: Dtype represented by the new Parameter.
    """
    # As in reset_parameters of Transformer Engine's modules.
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = False
    parameter = nn.Parameter(
        quantizer(weight.detach().to(dtype)), requires_grad=weight.requires_grad
    )
    # The cast to `dtype` rounded values a first time. They are quantized again from `weight`, and
    # the amax of the first time is dropped.
    amax = getattr(quantizer, "amax", None)
    if amax is not None:
        amax.zero_()
    parameter.quantize_(weight.detach())  # type: ignore[attr-defined]
    return parameter
