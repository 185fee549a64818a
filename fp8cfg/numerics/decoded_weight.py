"""Weight decoded on access: layers of other libraries read `layer.weight`, which is stored in a codec, as a high-precision tensor.

The Parameter named `weight` is the stored tensor; its scale is the buffer `fp8_weight_scale_inv`. Reading the attribute decodes
it, and its gradient, in `weight_grad_dtype`, goes back to the Parameter. Names, hooks, `state_dict` and what the library's class
does stay as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.numerics.codecs import Codec, Stored
from fp8cfg.numerics.gemm_operand import in_dtype
from fp8cfg.numerics.low_bit_weight import NarrowWeight

SCALE = "fp8_weight_scale_inv"


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, receiver: Tensor, data: Tensor, scale_inv: Tensor | None, codec: Codec, dtype: torch.dtype) -> Tensor:
        return in_dtype(codec.decode((data,) if scale_inv is None else (data, scale_inv)), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


class HeldWeight(NarrowWeight):
    """The properties and methods that `hold` adds to a layer's class."""

    kept = (SCALE,)
    held = True
    codec: Codec
    _read_as: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], decoded anew."""
        return _Decode.apply(*self.receiver_and_stored(), getattr(self, SCALE), self.codec, self._read_as)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def in_codec(self) -> Stored:
        """The tensors that hold the weight."""
        data, scale_inv = self.parameter.detach(), getattr(self, SCALE)
        return (data,) if scale_inv is None else (data, scale_inv)

    def set_weight(self, master: Tensor) -> None:
        """Encode `master` [out, in], float32, into the weight."""
        self.codec.store(master, self.in_codec)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        """Weights that are not in the codec are encoded."""
        weight, like = state.get(prefix + "weight"), self.in_codec
        if weight is not None and weight.shape == like[0].shape and (prefix + SCALE in state) != (len(like) == 2):
            state[prefix + "weight"], *scale = self.codec.encode(weight.float())
            if scale:
                state[prefix + SCALE] = scale[0]
        super()._load_from_state_dict(state, prefix, *rest)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (type(self).__bases__[1],), self.__getstate__()


@cache
def _class(base: type[nn.Module]) -> type[HeldWeight]:
    return type(base.__name__, (HeldWeight, base), {})


def _blank(base: type[nn.Module]) -> HeldWeight:
    """An empty layer of that class, for copying and unpickling."""
    cls = _class(base)  # type: ignore[arg-type]  # mypy: Module has no hash of its class
    return cls.__new__(cls)


def hold(layer: nn.Module, codec: Codec, dtype: torch.dtype) -> None:
    """Let `layer`, which reads its `weight` [out, in] as `dtype`, hold it in `codec`, in place: a new Parameter, unless it is in
    that dtype and needs no scale."""
    old, scale = layer.weight, None
    assert isinstance(old, nn.Parameter), "no layer twice"
    if codec.scaling != "none" or old.dtype != codec.format.dtype:
        data, *beside = codec.encode(old.detach().float())
        layer._parameters["weight"], scale = nn.Parameter(data, requires_grad=old.requires_grad), beside[0] if beside else None
    layer.register_buffer(SCALE, scale)
    layer.__class__ = type(_blank(type(layer)))
    assert isinstance(layer, HeldWeight)
    layer.codec, layer._read_as, layer.weight_grad_dtype = codec, dtype, old.dtype
    layer._prepare_gradient()


def unhold(layer: HeldWeight, weight: nn.Parameter) -> None:
    """Let `layer` be what it was before `hold`, in place, with that Parameter for its weight."""
    for name in ("codec", "_read_as", "weight_grad_dtype", "_gradient_of_weight", "_detached"):
        vars(layer).pop(name, None)
    del layer._buffers[SCALE]
    layer.__class__ = type(layer).__bases__[1]
    layer._parameters["weight"] = weight
