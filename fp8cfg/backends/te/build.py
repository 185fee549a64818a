"""Construction of genuine Transformer Engine modules for layers of the model, every field read back."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8cfg.backends.protocol import same
from fp8cfg.backends.te.average_refusal import refuse_averages
from fp8cfg.backends.te.engine import Engine, Parameters
from fp8cfg.backends.te.layers import TELinear

_LACKS = object()


class Maker:
    """Builder of the engines of one conversion. Weights are stored quantized where `fp8_params`, except those of `shared`, and
    stand for weights in `dtype`. `kept` are the norms that stay as they are.
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
        self.te, self.recipe, self.fp8_params, self.shared, self.dtype, self.kept = (
            te,
            recipe,
            fp8_params,
            shared,
            dtype,
            kept,
        )

    def __call__(
        self,
        kind: str,
        linears: Sequence[TELinear],
        sizes: tuple[int, int],
        parameters: Parameters,
        bias: bool = False,
        **options: Any,
    ) -> None:
        """The engine of `linears`, of the Transformer Engine class `kind`."""
        module = self.built(kind, linears, sizes, bias=bias, **options)
        self.engine(module, linears, parameters, options, bias)

    def built(
        self, kind: str, linears: Sequence[TELinear], sizes: tuple[int, ...], **options: Any
    ) -> Any:
        """A module of the Transformer Engine class `kind` that fits the weights of `linears`; it allocates no memory of its own."""
        dtype = self.dtype if self._quantizes(linears) else linears[0].weight.dtype
        with self._init(linears):
            return getattr(self.te, kind)(*sizes, params_dtype=dtype, device="meta", **options)

    def engine(
        self,
        module: Any,
        linears: Sequence[TELinear],
        parameters: Parameters,
        options: Mapping[str, Any],
        bias: bool = False,
    ) -> None:
        """The engine of `linears` that `module` is, whose state is made now. Raises BackendError where it has other Parameters or
        other `options` than those asked for."""
        shapes = {
            name: tuple(getattr(owner, attribute).shape)
            for name, (owner, attribute) in parameters.items()
        }
        theirs = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        same(type(module).__name__, shapes, theirs)
        check(
            module,
            {"use_bias": bias, "parallel_mode": None, "zero_centered_gamma": False, **options},
            optional=("parallel_mode", "zero_centered_gamma"),
        )
        quantized = self._quantizes(linears)
        if (
            self.recipe.delayed() and not quantized
        ):  # made now, so that a state dict always has scales and histories
            with self._init(linears):
                module.fp8_meta |= {"recipe": self.recipe, "num_gemms": len(linears)}
                module.init_fp8_meta_tensors(self.recipe)
        for n, linear in enumerate(linears):
            if quantized:
                linear.weight = _quantized(
                    linear.weight, module.quantizers["scaling_fwd"][3 * n + 1], self.dtype
                )
                refuse_averages(linear)
        Engine(module, self.recipe, linears, parameters)

    def _quantizes(self, linears: Sequence[TELinear]) -> bool:
        return self.fp8_params and not any(linear.weight in self.shared for linear in linears)

    def _init(self, linears: Sequence[TELinear]) -> Any:
        """The context in which modules of `linears` are made, or what it was called before 2.9."""
        model_init = getattr(self.te, "quantized_model_init", None) or self.te.fp8_model_init
        return model_init(enabled=self._quantizes(linears), recipe=self.recipe)


def check(module: Any, wanted: Mapping[str, Any], optional: Collection[str] = ()) -> None:
    """Raise BackendError where a field of `module`, such as "self_attention.qkv_format", is not as `wanted`. It may lack one that
    is `optional`."""
    found = {
        name: functools.reduce(lambda at, part: getattr(at, part, _LACKS), name.split("."), module)
        for name in wanted
    }
    same(
        type(module).__name__,
        {n: v for n, v in wanted.items() if n not in optional or found[n] is not _LACKS},
        {n: v for n, v in found.items() if v is not _LACKS},
    )


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
