"""Transformer Engine module (engine) around Parameters that the model's layers hold: it computes their products."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.backends.flops import count
from fp8cfg.backends.gemm_plan import HIGH_PRECISION, Kinds
from fp8cfg.backends.te.layers import TELinear
from fp8cfg.backends.te.state import is_quantized
from fp8cfg.numerics.decoded_weight import operand

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
