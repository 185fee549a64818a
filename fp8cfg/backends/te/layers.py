"""Layers with the model's Parameters around Transformer Engine modules, which compute the GEMMs.

The model has a `TELinear`, `TENorm` or `TEMLP` in its module tree. The Transformer Engine module
itself is outside of the tree, in an `Engine`. It borrows the Parameters of the layers:

    TELinear.forward -> Engine -> te.Linear, te.LayerNormLinear or te.LayerNormMLP

So the names of Parameters do not change, tied Parameters stay tied, and Transformer Engine's
pickled extra state does not appear in a state dict.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.backends.any_model.conversion_state import count
from fp8cfg.backends.gemm_plan import GEMMS, HIGH_PRECISION, Kinds
from fp8cfg.backends.te.state import (
    HISTORY,
    Columns,
    column_tensors,
    columns_of,
    is_quantized,
    load_columns,
    load_quantized,
    quantized_tensors,
    refuse_averages,
)
from fp8cfg.numerics.stored_state import ANEW, in_stored_form
from fp8cfg.numerics.weight_storage import StoredWeight, operand


class TELinear(StoredWeight):
    """Linear layer computed by Transformer Engine: y = x wᵀ + b.

    The input is [..., in_features] in the dtype of the weight, the output [..., out_features]. If
    the engine computes a whole MLP or decoder layer, `forward` is not called.

    Attributes:
        engine: The Transformer Engine module that computes this layer.
        gemm: Index of this layer among the layers of `engine`. For fc2 of an MLP it is 1.
        weight: [out_features, in_features]. With fp8.params it is one of Transformer Engine's
            quantized tensors, and `set_weight` writes it.
        bias: [out_features], or None.
        gemm_kinds: Operand formats of the GEMMs that ran, by name. None means not yet.
        obstacle: Why te.TransformerLayer does not compute the decoder layer of this layer, or "".
        skip: float32 [1] on the device of the weight. 1 makes the next `set_weight` do nothing.
        range_used: float32 [3], the largest amaxes of input, weight and grad_output in the last
            step, relative to the range of their delayed scales.
    """

    engine: Engine
    gemm: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    skip: Tensor | None = None
    range_used: Tensor | None = None

    def __init__(self, linear: nn.Linear) -> None:
        """Takes the Parameters of `linear`. An `Engine` must be created before use."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = cast("nn.Parameter", linear.weight)
        self.bias = linear.bias
        self.gemm_kinds: dict[str, Kinds] = dict.fromkeys(GEMMS)
        self.obstacle = ""
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.engine(x)

    @property
    def fp8_params(self) -> bool:
        """Whether the weight is stored in FP8 only."""
        return is_quantized(self.parameter)

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as it is stored. `weight` is its decoded value if it is stored in a codec."""
        parameter = self._parameters["weight"]
        assert parameter is not None
        return parameter

    @torch.no_grad()
    def set_weight(self, master: Tensor) -> None:
        """Quantizes a master weight into the FP8 weight.

        Args:
            master: float32 [out_features, in_features].

        Raises:
            TypeError: The weight is in high precision.
        """
        if not self.fp8_params:
            raise TypeError(
                "set_weight writes quantized weights; this layer has a high-precision one: assign"
                " to it"
            )
        weight: Any = self.weight
        skip = self.skip
        self.skip = None
        if skip is None:
            weight.quantize_(master)
            return
        # With noop_flag=1 the kernel writes nothing, but Transformer Engine marks the transpose as
        # valid anyway (2.20, csrc/quantizer.cpp). A stale transpose must stay marked as stale.
        transpose_is_stale = weight._transpose_invalid
        weight.quantize_(master, noop_flag=skip)
        if transpose_is_stale:
            weight._transpose_invalid = True

    def dequantized_weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [out_features, in_features] in `dtype`, dequantized from FP8."""
        if self.fp8_params:
            return self.weight.dequantize(dtype=dtype)  # type: ignore[call-arg]
        return self.weight.to(dtype)

    @property
    def recipe(self) -> Any:
        """The recipe object of Transformer Engine."""
        return self.engine.recipe

    def forward_histories(self) -> list[Tensor]:
        """Returns the amax histories [length, columns] that a forward pass changes."""
        if not self.recipe.delayed():
            return []
        forward_state, _ = self._columns()[0]
        return [forward_state.amax_history]

    def extra_repr(self) -> str:
        module_name = type(self.engine.module).__name__
        recipe_name = type(self.recipe).__name__
        text = f"{self.in_features}, {self.out_features}, te.{module_name}, {recipe_name}"
        if self.obstacle:
            text += f"; not te.TransformerLayer: {self.obstacle}"
        return text

    def __deepcopy__(self, memo: dict[int, Any]) -> TELinear:
        """Copies the layer and its engine, without gradients.

        torch drops the gradients of plain Parameters too. For Transformer Engine's Parameters it
        would copy them but lose `grad_dtype` (torch 2.13).
        """
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        # The copy includes the engine, and with it the other layers of the engine.
        gradients = {layer.parameter: layer.parameter.grad for layer in self.engine.linears}
        try:
            for weight in gradients:
                weight.grad = None
            duplicate.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        finally:
            for weight, gradient in gradients.items():
                weight.grad = gradient
        return duplicate

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Both belong to a step of the original layer.
        self.skip = None
        self.range_used = None
        if self.fp8_params:
            refuse_averages(self)

    def _columns(self) -> Columns:
        """Returns the columns of delayed scaling for input, weight and grad_output."""
        if not self.recipe.delayed():
            return []
        return columns_of(self.engine.module, self.gemm)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not in_stored_form():
            if self.fp8_params:
                weight = self.dequantized_weight(self.weight.dtype).detach()
                destination[prefix + "weight"] = self.state_dict_entry(weight)
            return
        state: dict[str, Tensor] = {}
        if self.fp8_params:
            state |= quantized_tensors(self.weight)
        columns = self._columns()
        if columns:
            state |= column_tensors(columns)
        destination.update({prefix + name: tensor for name, tensor in state.items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        self.engine.weights_changed = True
        # Buffers named fp8_ belong to a codec. torch loads them itself.
        fp8_names = [
            name
            for name in state_dict
            if name.startswith(prefix + "fp8_") and name[len(prefix) :] not in self._buffers
        ]
        saved = {name[len(prefix) :]: state_dict.pop(name) for name in fp8_names}
        columns = self._columns()
        vars(self)[ANEW] = bool(columns) and HISTORY not in saved
        is_weight_loaded = False
        try:
            load_columns(columns, saved)
            if self.fp8_params and prefix + "weight" in state_dict:
                tensors = {"weight": state_dict.pop(prefix + "weight")}
                for name, tensor in saved.items():
                    if name.startswith("fp8_weight"):
                        tensors[name] = tensor
                load_quantized(self.weight, tensors)
                is_weight_loaded = True
        except ValueError as e:
            errors.append(f"{prefix[:-1]}: {e}")
        # torch would report a loaded weight as missing, so the layer has none during its call.
        weight = self._parameters.pop("weight") if is_weight_loaded else None
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, missing, unexpected, errors
        )
        if is_weight_loaded:
            self._parameters = {"weight": weight, **self._parameters}


class TENorm(nn.Module):
    """Norm computed by Transformer Engine: x [..., features], and the output has the dtype of x.

    A norm that is fused with the next GEMM has no module. It returns its input, and the fused
    module reads its weight.

    Args:
        plain: The replaced norm.
        module: te.RMSNorm or te.LayerNorm, or None for a fused norm.
    """

    def __init__(self, plain: Any, module: Any | None) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = getattr(plain, "bias", None)
        # In a tuple, because torch would register the modules themselves as submodules.
        self._unregistered = (plain, module)
        self.train(plain.training)

    @property
    def te_module(self) -> Any | None:
        """te.RMSNorm or te.LayerNorm, or None if the norm is fused."""
        return self._unregistered[1]

    def forward(self, x: Tensor) -> Tensor:
        module = self.te_module
        if module is None:
            return x
        # Loading or casting a model may replace Parameters.
        for name in ("weight", "bias"):
            parameter = getattr(self, name)
            if parameter is not None and getattr(module, name) is not parameter:
                setattr(module, name, parameter)
        y: Tensor = module(x)
        # Transformer Engine returns the dtype of the weight, which may be stored in a wider one.
        return y.to(x.dtype)

    @property
    def read_by_product(self) -> bool:
        """Whether the next GEMM reads the weight of this norm, and needs it in the GEMM's dtype."""
        return self.te_module is None

    @property
    def plain(self) -> nn.Module:
        """The replaced norm, with the current Parameters."""
        plain: nn.Module = self._unregistered[0]
        for name, parameter in self._parameters.items():
            setattr(plain, name, parameter)
        return plain

    def extra_repr(self) -> str:
        module = self.te_module
        if module is None:
            return f"{len(self.weight)}, fused with the next layer"
        return f"{len(self.weight)}, te.{type(module).__name__}"


class TEMLP(nn.Module):
    """Gated MLP computed by te.LayerNormMLP, with the norm before it.

    Args:
        plain: The replaced MLP.
        linear_fc1: Its first layer. The two layers have the weights.
        linear_fc2: Its second layer, with the same engine.
    """

    def __init__(self, plain: Any, linear_fc1: TELinear, linear_fc2: TELinear) -> None:
        super().__init__()
        self.linear_fc1 = linear_fc1
        self.linear_fc2 = linear_fc2
        self._unregistered = (plain,)
        self.train(plain.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc1.engine(x)

    @property
    def plain(self) -> nn.Module:
        """The replaced MLP. It has the same two layers."""
        plain: nn.Module = self._unregistered[0]
        return plain


Parameters = Mapping[str, tuple[nn.Module, str]]
"""Maps a Parameter name of a Transformer Engine module to a layer of the model and an attribute.
For example fc1_weight -> (mlp.linear_fc1, "weight")."""


class Engine:
    """A Transformer Engine module that computes with the Parameters of the model's layers.

    Before each pass the module gets the decoded weights, and after it the stored ones. Forward
    hooks do this, so it also works inside te.TransformerLayer.

    Attributes:
        module: A Transformer Engine module of any class.
        recipe: The recipe object of Transformer Engine.
        linears: Layers whose GEMMs `module` computes, in the module's order.
        parameters: Layers and names of the module's Parameters.
        ranges: The RangeWatch of these layers, or None.
        caches_weights: Whether the module quantizes weights only in the first microbatch of a step.
        weights_changed: Whether cached weights are stale.
    """

    ranges: Any = None

    def __init__(
        self, module: Any, recipe: Any, linears: Sequence[TELinear], parameters: Parameters
    ) -> None:
        self.module = module
        self.recipe = recipe
        self.linears = tuple(linears)
        self.parameters = dict(parameters)
        self.caches_weights = False
        self.weights_changed = True
        for index, linear in enumerate(self.linears):
            linear.engine = self
            linear.gemm = index
        self._share_parameters(decoded=False)
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        # always_call: activation checkpointing ends a recomputation early with an exception.
        module.register_forward_hook(self._after_forward, always_call=True)

    def _share_parameters(self, decoded: bool) -> None:
        """Gives the module the current Parameters of the layers.

        Args:
            decoded: Whether weights are decoded for a GEMM, instead of passed as stored.
        """
        for name, (layer, attribute) in self.parameters.items():
            parameter: Tensor | None = layer._parameters[attribute]
            if decoded and attribute == "weight":
                parameter = _gemm_weight(layer)
            if parameter is not getattr(self.module, name):
                # setattr rejects a decoded weight, because it is no Parameter.
                self.module._parameters[name] = parameter

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the module: x [..., in_features] of the first layer to [..., out_features]."""
        return _without_bias(self.module(x))

    def _before_forward(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._share_parameters(decoded=True)
        return args, kwargs | {"is_first_microbatch": self._is_first_microbatch()}

    def _after_forward(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        # Frees decoded weights, except what autograd saved for the backward pass.
        self._share_parameters(decoded=False)
        if output is None:  # the pass ended with an exception
            return
        # A pass in high precision quantizes no weight, so cached weights stay stale.
        if module.fp8 and torch.is_grad_enabled():
            self.weights_changed = False
        self._record_gemms(args[0], _without_bias(output))

    def _is_first_microbatch(self) -> bool | None:
        """Returns the argument is_first_microbatch of Transformer Engine.

        True quantizes weights and keeps them, False uses the kept ones, None keeps nothing.
        """
        if self.caches_weights and torch.is_grad_enabled():
            return self.weights_changed
        return None

    def _record_gemms(self, x: Tensor, y: Tensor) -> None:
        """Records the GEMMs of a forward pass, from Transformer Engine's own state.

        `module.fp8` tells whether the pass ran in FP8, and quantizers have the formats. Backward
        GEMMs are recorded when the gradient of `y` exists.
        """
        is_fp8 = self.module.fp8
        is_training = torch.is_grad_enabled() and self.module.training
        has_fp8_backward = is_fp8 and getattr(self.recipe, "backward_override", None) is None
        # Three per GEMM: input, weight, output.
        forward_quantizers = self.module.quantizers["scaling_fwd"]
        # Two per GEMM: grad_output, grad_input.
        backward_quantizers = self.module.quantizers["scaling_bwd"]
        for index, linear in enumerate(self.linears):
            count(linear, x)
            fprop_kinds: Kinds = HIGH_PRECISION
            backward_kinds: Kinds = HIGH_PRECISION
            if is_fp8:
                input_format = format_of(forward_quantizers[3 * index])
                weight_format = format_of(forward_quantizers[3 * index + 1])
                fprop_kinds = input_format, weight_format
                if has_fp8_backward:
                    backward_kinds = format_of(backward_quantizers[2 * index]), weight_format
            # High-precision evaluation shows nothing about training.
            if is_fp8 or is_training:
                linear.gemm_kinds["fprop"] = fprop_kinds
            if not y.requires_grad:
                continue
            backward_gemms = {}
            # The input of a later layer is an activation, which always needs a gradient.
            if x.requires_grad or index > 0:
                backward_gemms["dgrad"] = backward_kinds
            if linear.parameter.requires_grad:
                backward_gemms["wgrad"] = backward_kinds
            y.register_hook(partial(_record_backward, linear.gemm_kinds, backward_gemms))


def _record_backward(
    gemm_kinds: dict[str, Kinds], backward_gemms: dict[str, Kinds], gradient: Tensor
) -> None:
    """Gradient hook: records the backward GEMMs of a layer."""
    gemm_kinds.update(backward_gemms)


def _gemm_weight(layer: nn.Module) -> Tensor:
    """Returns the weight of a layer for a GEMM, decoded from a codec.

    A quantized weight is dequantized for a pass in high precision. te.LayerNormMLP dequantizes only
    weights with one scale, others fail in its GEMM (2.20, module/layernorm_mlp.py).
    """
    weight = operand(layer)
    if is_quantized(weight) and not fp8_state_manager().is_fp8_enabled():
        return weight.dequantize()
    return weight


def fp8_state_manager() -> Any:
    """Returns Transformer Engine's class with the global FP8 state.

    Newer versions define it in another module, and this one still exports it.
    """
    return importlib.import_module("transformer_engine.pytorch.module.base").FP8GlobalStateManager


def _without_bias(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Returns the output tensor of a module.

    Modules inside of te.TransformerLayer return it with an empty bias.
    """
    if isinstance(output, tuple):
        return output[0]
    return output


def is_observed(module: nn.Module) -> bool:
    """Whether hooks or a replaced `forward` see inputs and outputs of a module.

    Fusion would skip them.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or has_custom_forward(module)


def has_custom_forward(module: nn.Module) -> bool:
    """Whether a call does not run the `forward` of the class: it was replaced or compiled."""
    return "forward" in vars(module) or module._compiled_call_impl is not None


def format_of(quantizer: Any) -> str:
    """Returns the format of a quantizer of Transformer Engine, such as "e4m3"."""
    return str(quantizer.dtype.name)[-4:].lower()  # from DType.kFloat8E4M3


def te_autocast(te: Any, enabled: bool, recipe: Any) -> Any:
    """Returns Transformer Engine's autocast context.

    Args:
        te: The package transformer_engine.pytorch.
        enabled: Whether modules run in FP8.
        recipe: The recipe object. With `reduce_amax` amaxes are reduced over all ranks.
    """
    group = None
    if getattr(recipe, "reduce_amax", False) and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
    # Before 2.9.
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=group)
