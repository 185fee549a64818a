"""Layers that hold the Parameters of the model while a genuine Transformer Engine module computes their products.

The module is kept outside of the module tree: names of Parameters do not change, a Parameter that two layers share stays one, and
Transformer Engine's pickled extra state never reaches a state dict.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fp8cfg.backends.gemm_plan import GEMMS, Kinds
from fp8cfg.backends.te.average_refusal import refuse_averages
from fp8cfg.backends.te.state import (
    HISTORY,
    Columns,
    column_tensors,
    columns_of,
    is_quantized,
    load_columns,
    load_quantized,
    quantized_tensors,
)
from fp8cfg.numerics.stored_form import ANEW, StoredWeight, in_stored_form

if TYPE_CHECKING:
    from fp8cfg.backends.te.engine import Engine


class TELinear(StoredWeight):
    """Linear layer computed by Transformer Engine: y = x wᵀ + b, x [..., in] in the dtype of the weight.

    `place` is its engine and its number there; where that computes a whole MLP, or is part of a te.TransformerLayer, `forward` is
    not called. `obstacle` says what kept te.TransformerLayer from taking the decoder layer that it is in. `ran` holds the kinds of
    the operands of each product that ran, as `planning.Kinds` has them. A weight that is held quantized is one of Transformer
    Engine's tensors, and `set_weight` writes to it: where `skip`, float32 [1] on its device, is 1 when it is called next, nothing.
    `range_used`, [3], is what input, weight and grad_output used of their delayed scales' range in the last step.
    """

    place: tuple[Engine, int]
    weight: nn.Parameter
    bias: nn.Parameter | None
    skip: Tensor | None = None
    range_used: Tensor | None = None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = cast("nn.Parameter", linear.weight), linear.bias
        self.ran: dict[str, Kinds] = dict.fromkeys(GEMMS)
        self.obstacle = ""
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.place[0](x)

    @property
    def fp8_params(self) -> bool:
        """Whether the weight is stored in FP8 only."""
        return is_quantized(self.parameter)

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as it is stored; in a codec, `weight` is that decoded."""
        parameter = self._parameters["weight"]
        assert parameter is not None
        return parameter

    @torch.no_grad()
    def set_weight(self, master: Tensor) -> None:
        """Quantizes `master` [out, in], float32, into the weight. Raises TypeError where that is in high precision."""
        if not self.fp8_params:
            raise TypeError(
                "set_weight writes quantized weights; this layer has a high-precision one: assign"
                " to it"
            )
        weight: Any = self.weight
        skip, self.skip = self.skip, None
        if skip is None:
            weight.quantize_(master)
            return
        stale = weight._transpose_invalid
        weight.quantize_(master, noop_flag=skip)
        # a kernel that does nothing leaves it as it was, and it is marked as made (2.20,
        # csrc/quantizer.cpp)
        if stale:
            weight._transpose_invalid = True

    def dequantized_weight(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [out, in] in `dtype`."""
        if self.fp8_params:
            return self.weight.dequantize(dtype=dtype)  # type: ignore[call-arg]
        return self.weight.to(dtype)

    @property
    def recipe(self) -> Any:
        """Transformer Engine's recipe."""
        return self.place[0].recipe

    def forward_histories(self) -> list[Tensor]:
        """The amax histories that a forward pass writes to."""
        return [self._columns()[0][0].amax_history] if self.recipe.delayed() else []

    def extra_repr(self) -> str:
        module = type(self.place[0].module).__name__
        said = f"{self.in_features}, {self.out_features}, te.{module}, {type(self.recipe).__name__}"
        return f"{said}; not te.TransformerLayer: {self.obstacle}" if self.obstacle else said

    def __deepcopy__(self, memo: dict[int, Any]) -> TELinear:
        """Without gradients, as torch copies its own Parameters: of one of Transformer Engine's it copies them, but not the dtype
        that they may have (seen with torch 2.13)."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        weights = {
            layer.parameter: layer.parameter.grad for layer in self.place[0].linears
        }  # its engine's, which is copied along
        try:
            for weight in weights:
                weight.grad = None
            made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        finally:
            for weight, gradient in weights.items():
                weight.grad = gradient
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.skip = self.range_used = None  # of steps of the layer that this is a copy of
        if self.fp8_params:
            refuse_averages(self)

    def _columns(self) -> Columns:
        return columns_of(self.place[0].module, self.place[1]) if self.recipe.delayed() else []

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not in_stored_form():
            if self.fp8_params:
                destination[prefix + "weight"] = self.saved(
                    self.dequantized_weight(self.weight.dtype).detach()
                )
            return
        state = quantized_tensors(self.weight) if self.fp8_params else {}
        if columns := self._columns():
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
        self.place[0].weights_moved = True
        theirs = [
            name
            for name in state_dict
            if name.startswith(prefix + "fp8_") and name[len(prefix) :] not in self._buffers
        ]
        saved = {name[len(prefix) :]: state_dict.pop(name) for name in theirs}
        vars(self)[ANEW] = bool(self._columns()) and HISTORY not in saved
        try:
            load_columns(self._columns(), saved)
            if self.fp8_params and prefix + "weight" in state_dict:
                beside = {name: t for name, t in saved.items() if name.startswith("fp8_weight")}
                load_quantized(self.weight, {"weight": state_dict.pop(prefix + "weight"), **beside})
                # What is in the weight already stands in for what was loaded.
                held = self._parameters.pop("weight")
                super()._load_from_state_dict(
                    state_dict, prefix, metadata, strict, missing, unexpected, errors
                )
                self._parameters = {"weight": held, **self._parameters}
                return
        except ValueError as e:
            errors.append(f"{prefix[:-1]}: {e}")
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, missing, unexpected, errors
        )


class TENorm(nn.Module):
    """A norm computed by Transformer Engine, by itself or, with `module` None, fused with the product that follows: then it only
    holds the weight, and passes its input on. `plain` is the module that it replaced.
    """

    def __init__(self, plain: Any, module: Any | None) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = getattr(plain, "bias", None)
        self._beside = (plain, module)
        self.train(plain.training)

    def forward(self, x: Tensor) -> Tensor:
        module = self._beside[1]
        if module is None:
            return x
        for name in ("weight", "bias"):
            if (parameter := getattr(self, name)) is not None and getattr(
                module, name
            ) is not parameter:
                setattr(module, name, parameter)
        y: Tensor = module(x)
        return y.to(
            x.dtype
        )  # Transformer Engine's has the dtype of its weight, which may be stored in a wider one

    @property
    def read_by_product(self) -> bool:
        """Whether the product that follows reads the weight of this norm, and needs it in the dtype of the product."""
        return self._beside[1] is None

    @property
    def plain(self) -> nn.Module:
        """The original norm, with the Parameters that this one has now."""
        plain: nn.Module = self._beside[0]
        for name, parameter in self._parameters.items():
            setattr(plain, name, parameter)
        return plain

    def extra_repr(self) -> str:
        module = self._beside[1]
        where = (
            "in front of the product that follows"
            if module is None
            else f"te.{type(module).__name__}"
        )
        return f"{len(self.weight)}, {where}"


class TEMLP(nn.Module):
    """A gated MLP computed by one Transformer Engine module, preceding norm included; the two layers hold its weights."""

    def __init__(self, plain: Any, linear_fc1: TELinear, linear_fc2: TELinear) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = linear_fc1, linear_fc2
        self._beside = (plain,)
        self.train(plain.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc1.place[0](x)

    @property
    def plain(self) -> nn.Module:
        """The original MLP; it has the same two layers."""
        plain: nn.Module = self._beside[0]
        return plain
