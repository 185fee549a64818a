"""What multiplies: a genuine Transformer Engine module around Parameters that the model's layers hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.backends.planning import Kinds
from fp8cfg.backends.te_layers import TELinear

Parameters = Mapping[str, tuple[nn.Module, str]]
"""The name of a Parameter in a Transformer Engine module -> the layer of the model that holds it, and its name there."""


class Engine:
    """A Transformer Engine module, whose Parameters are those of the model's layers.

    `linears` are the layers whose products `module` multiplies, in its order."""

    def __init__(self, module: Any, recipe: Any, linears: Sequence[TELinear], parameters: Parameters) -> None:
        self.module, self.recipe, self.linears, self.parameters = module, recipe, tuple(linears), dict(parameters)
        self.caches, self.weights_moved = False, True
        for n, linear in enumerate(self.linears):
            linear.place = (self, n)
        self.share()

    def share(self, decoded: bool = False) -> None:
        """Give `module` the Parameters that the model has now, as they are stored, or the values of those that are held in a
        codec, `decoded` anew."""
        for name, (owner, attribute) in self.parameters.items():
            parameter = getattr(owner, attribute) if decoded else owner._parameters[attribute]
            if parameter is not getattr(self.module, name):
                self.module._parameters[name] = parameter  # setattr would refuse what is decoded

    def __call__(self, x: Tensor) -> Tensor:
        self.share(decoded=True)
        y: Tensor = self.module(x, is_first_microbatch=self._first_microbatch())
        self.share()  # of what was decoded, only what the backward pass needs stays
        self._record(x, y)
        return y

    def _first_microbatch(self) -> bool | None:
        """Whether weights have to be quantized, or those of the last pass are still good; None keeps nothing."""
        if not self.caches or not torch.is_grad_enabled():
            return None
        moved, self.weights_moved = self.weights_moved, False
        return moved

    def _record(self, x: Tensor, y: Tensor) -> None:
        """Note what this pass multiplied: what Transformer Engine itself says of it, `module.fp8` and its quantizers. Nothing
        is known of a backward pass before the gradient of `y` is there."""
        ran = self.module.fp8
        forward, backward = (self.module.quantizers[f"scaling_{side}"] for side in ("fwd", "bwd"))
        for n, linear in enumerate(self.linears):
            weight = _kind(forward[3 * n + 1]) if ran else ""
            linear.ran["fprop"] = (_kind(forward[3 * n]), weight) if ran else None
            kinds: Kinds = None
            if ran and getattr(self.recipe, "backward_override", None) is None:
                kinds = _kind(backward[2 * n]), weight
            if y.requires_grad:
                products = {"dgrad": kinds} if x.requires_grad or n else {}
                products |= {"wgrad": kinds} if linear.parameter.requires_grad else {}
                y.register_hook(partial(_note, linear.ran, products))  # type: ignore[no-untyped-call]


def _note(ran: dict[str, Kinds], products: dict[str, Kinds], gradient: Tensor) -> None:
    ran.update(products)


def _kind(quantizer: Any) -> str:
    """The format that `quantizer` makes: DType.kFloat8E4M3 is e4m3."""
    return str(quantizer.dtype.name)[-4:].lower()


class Maker:
    """Makes the engines of one conversion. Weights are held quantized where `fp8_params`, those of `shared` excepted."""

    def __init__(self, te: Any, recipe: Any, fp8_params: bool, shared: set[nn.Parameter]) -> None:
        self.te, self.recipe, self.fp8_params, self.shared = te, recipe, fp8_params, shared

    def __call__(self, kind: str, linears: Sequence[TELinear], sizes: tuple[int, int], parameters: Parameters, bias: bool = False,
                 **options: Any) -> None:  # fmt: skip
        """The engine of `linears`, of the Transformer Engine class `kind`."""
        quantized = self.fp8_params and not any(linear.weight in self.shared for linear in linears)
        # TE wants weights and inputs of one dtype; a quantized weight stands for a bf16 one (te_rules refuses others).
        dtype = torch.bfloat16 if quantized else linears[0].weight.dtype
        # What it was called before 2.9.
        model_init = getattr(self.te, "quantized_model_init", None) or self.te.fp8_model_init
        with model_init(enabled=quantized, recipe=self.recipe):
            module = getattr(self.te, kind)(*sizes, bias=bias, params_dtype=dtype, device="meta", **options)
            if self.recipe.delayed() and not quantized:  # made now, so that a state dict always has scales and histories
                module.fp8_meta |= {"recipe": self.recipe, "num_gemms": len(linears)}
                module.init_fp8_meta_tensors(self.recipe)
        for n, linear in enumerate(linears):
            if quantized:
                linear.weight = _quantized(linear.weight, module.quantizers["scaling_fwd"][3 * n + 1], dtype)
        Engine(module, self.recipe, linears, parameters)


def _quantized(weight: nn.Parameter, quantizer: Any, dtype: torch.dtype) -> nn.Parameter:
    """`weight` as Transformer Engine's quantized Parameter, made as its `reset_parameters` does, with the values of `weight`
    rounded once."""
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = False
    made = nn.Parameter(quantizer(weight.detach().to(dtype)), requires_grad=weight.requires_grad)
    if (recorded := getattr(quantizer, "amax", None)) is not None:
        recorded.zero_()  # of values that were rounded twice
    made.quantize_(weight.detach())  # type: ignore[attr-defined]
    return made


def entered(te: Any, enabled: bool, recipe: Any) -> Any:
    """Transformer Engine's context: `autocast`, or what it was called before 2.9."""
    reduces = getattr(recipe, "reduce_amax", False) and dist.is_available() and dist.is_initialized()
    group = dist.group.WORLD if reduces else None
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=group)
