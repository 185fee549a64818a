"""Layers that hold the Parameters of the model while a genuine Transformer Engine module computes their products.

The module is kept outside of the module tree: names of Parameters do not change, a Parameter that two layers share stays one, and
Transformer Engine's pickled extra state never reaches a state dict.
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
                destination[prefix + "weight"] = self.state_dict_entry(
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


Parameters = Mapping[str, tuple[nn.Module, str]]
"""The name of a Parameter in a Transformer Engine module -> the layer of the model that holds it, and its name there."""


class Engine:
    """A Transformer Engine module of any class that computes with the Parameters of the model's layers.

    `linears` are the layers whose products `module` multiplies, in its order; `ranges` is the overflow.RangeWatch that has them.
    """

    ranges: Any = None

    def __init__(
        self, module: Any, recipe: Any, linears: Sequence[TELinear], parameters: Parameters
    ) -> None:
        self.module, self.recipe, self.linears, self.parameters = (
            module,
            recipe,
            tuple(linears),
            dict(parameters),
        )
        self.caches, self.weights_moved = False, True
        for n, linear in enumerate(self.linears):
            linear.place = (self, n)
        self.share()
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(
            self._after, always_call=True
        )  # recomputation stops by an exception

    def share(self, decoded: bool = False) -> None:
        """Give `module` the Parameters that the model has now, as they are stored, or of weights what a pass multiplies, `decoded`
        anew."""
        for name, (owner, attribute) in self.parameters.items():
            parameter = (
                _multiplied(owner)
                if decoded and attribute == "weight"
                else owner._parameters[attribute]
            )
            if parameter is not getattr(self.module, name):
                self.module._parameters[name] = parameter  # setattr would refuse what is decoded

    def __call__(self, x: Tensor) -> Tensor:
        return _output(self.module(x))

    def _before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.share(decoded=True)
        return args, kwargs | {"is_first_microbatch": self._first_microbatch()}

    def _after(self, module: Any, args: tuple[Any, ...], made: Any) -> None:
        self.share()  # of what was decoded, only what the backward pass needs stays
        if made is None:
            return
        if module.fp8 and torch.is_grad_enabled():  # a pass in high precision quantizes no weight
            self.weights_moved = False
        self._record(args[0], _output(made))

    def _first_microbatch(self) -> bool | None:
        """Whether weights have to be quantized, or those of the last pass are still good; None keeps nothing."""
        return self.weights_moved if self.caches and torch.is_grad_enabled() else None

    def _record(self, x: Tensor, y: Tensor) -> None:
        """Note what this pass multiplied: what Transformer Engine itself says of it, `module.fp8` and its quantizers. Nothing
        is known of a backward pass before the gradient of `y` is there."""
        ran, trains = self.module.fp8, torch.is_grad_enabled() and self.module.training
        forward, backward = (self.module.quantizers[f"scaling_{side}"] for side in ("fwd", "bwd"))
        for n, linear in enumerate(self.linears):
            weight = kind(forward[3 * n + 1]) if ran else ""
            count(linear, x)
            if ran or trains:
                linear.ran["fprop"] = (kind(forward[3 * n]), weight) if ran else HIGH_PRECISION
            kinds: Kinds = HIGH_PRECISION
            if ran and getattr(self.recipe, "backward_override", None) is None:
                kinds = kind(backward[2 * n]), weight
            if y.requires_grad:
                products = {"dgrad": kinds} if x.requires_grad or n else {}
                products |= {"wgrad": kinds} if linear.parameter.requires_grad else {}
                y.register_hook(partial(_note, linear.ran, products))


def _multiplied(owner: nn.Module) -> Tensor:
    """The weight of `owner` that a pass multiplies: the value of one in a codec, and in high precision of one that is quantized.
    Transformer Engine's LayerNormMLP dequantizes weights of one scale alone, others end in its product (2.20,
    module/layernorm_mlp.py)."""
    weight = operand(owner)
    return (
        weight.dequantize() if is_quantized(weight) and not manager().is_fp8_enabled() else weight
    )


def manager() -> Any:
    """The class that holds Transformer Engine's state of FP8, in the module where it always was."""
    return importlib.import_module("transformer_engine.pytorch.module.base").FP8GlobalStateManager


def _output(made: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output of a module, without the empty bias that those inside of te.TransformerLayer return with it."""
    return made[0] if isinstance(made, tuple) else made


def listened(module: nn.Module) -> bool:
    """Whether the inputs and outputs of `module` are observed, which fusion would skip: hooks, or a replaced `forward`."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or own_forward(module)


def own_forward(module: nn.Module) -> bool:
    """Whether a call of `module` runs something else than the `forward` of its class, such as what its `compile` made of it."""
    return "forward" in vars(module) or module._compiled_call_impl is not None


def _note(ran: dict[str, Kinds], products: dict[str, Kinds], gradient: Tensor) -> None:
    ran.update(products)


def kind(quantizer: Any) -> str:
    """The format that `quantizer` makes: DType.kFloat8E4M3 is e4m3."""
    return str(quantizer.dtype.name)[-4:].lower()


def entered(te: Any, enabled: bool, recipe: Any) -> Any:
    """Transformer Engine's context: `autocast`, or what it was called before 2.9."""
    reduces = (
        getattr(recipe, "reduce_amax", False) and dist.is_available() and dist.is_initialized()
    )
    group = dist.group.WORLD if reduces else None
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=group)
