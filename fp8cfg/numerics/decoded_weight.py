"""Weight decoded on access: layers of other libraries multiply `decoded_weight()` of what they store in a codec.

The Parameter named `weight` is the stored tensor; its scale is the buffer `fp8_weight_scale_inv`. The gradient of what is decoded,
in `weight_grad_dtype`, goes back to the Parameter. Names, hooks, `state_dict` and what the library's class does stay as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.numerics.codecs import Codec, Stored
from fp8cfg.numerics.low_bit_weight import SCALE_INV, NarrowWeight
from fp8cfg.numerics.weight_access import as_read, decode, plain


class HeldWeight(NarrowWeight):
    """The properties and methods that `hold` adds to a layer's class."""

    kept = (SCALE_INV,)
    held = True
    codec: Codec

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] in the dtype of products, decoded anew and not to be written to; while it is split by FSDP2, which
        asks for it by this name, the Parameter."""
        if hasattr(self.parameter, "placements"):
            return self.parameter
        with torch.enable_grad():
            return as_read(self.decoded_weight(), self.parameter)

    def decoded_weight(self) -> Tensor:
        receiver, data = self.receiver_and_stored()
        return decode(
            receiver, (data, getattr(self, SCALE_INV), None, None, None), self.codec, self.read_as
        )

    def float32_weight(self) -> Tensor:
        return self.codec.decode(self.in_codec)

    @property
    def in_codec(self) -> Stored:
        """The tensors that hold the weight."""
        data, scale_inv = plain(self.parameter), getattr(self, SCALE_INV)
        return (data,) if scale_inv is None else (data, scale_inv)

    def set_weight(self, master: Tensor) -> None:
        """Encode `master` [out, in], float32, into the weight."""
        self.codec.store(master, self.in_codec)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        """Weights that are not in the codec are encoded."""
        weight, like = state.get(prefix + "weight"), self.in_codec
        if (
            weight is not None
            and weight.shape == like[0].shape
            and (prefix + SCALE_INV in state) != (len(like) == 2)
        ):
            state[prefix + "weight"], *scale = self.codec.encode(weight.float())
            if scale:
                state[prefix + SCALE_INV] = scale[0]
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
    old = layer.weight
    assert isinstance(old, nn.Parameter), "no layer twice"
    layer.register_buffer(SCALE_INV, None, persistent=False)
    layer.__class__ = type(_blank(type(layer)))
    assert isinstance(layer, HeldWeight)
    layer.codec, layer.read_as, layer.weight_grad_dtype = codec, dtype, old.dtype
    if codec.scaling != "none" or old.dtype != codec.format.dtype:
        data, *scale = codec.encode(old.detach().float())
        layer._buffers[SCALE_INV] = scale[0] if scale else None
        layer._store(data, old.requires_grad)
    layer._prepare_gradient()


def unhold(layer: HeldWeight, weight: nn.Parameter) -> None:
    """Let `layer` be what it was before `hold`, in place, with that Parameter for its weight."""
    for name in ("codec", "read_as", "weight_grad_dtype", "_gradient_of_weight", "_detached"):
        vars(layer).pop(name, None)
    del layer._buffers[SCALE_INV]
    layer._non_persistent_buffers_set.discard(SCALE_INV)
    layer.__class__ = type(layer).__bases__[1]
    layer._parameters["weight"] = weight


def operand(layer: nn.Module) -> Tensor:
    """The weight [out, in] that a library's `layer` multiplies: decoded where it is stored in a codec."""
    if isinstance(layer, HeldWeight):
        return layer.decoded_weight()
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight
