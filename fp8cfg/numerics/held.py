"""Layers of other libraries whose weight is held in a codec: they read `layer.weight`, and get it decoded.

The Parameter named `weight` is the stored tensor; its scale is the buffer `fp8_weight_scale_inv`. Reading the attribute decodes
it, and a gradient goes back to the Parameter. Names, hooks, `state_dict` and what the library's class does stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.numerics.codecs import Codec, Stored

SCALE = "fp8_weight_scale_inv"


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, scale_inv: Tensor | None, codec: Codec, dtype: torch.dtype) -> Tensor:
        return codec.decode((data,) if scale_inv is None else (data, scale_inv)).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


class HeldWeight(nn.Module):
    """What `hold` adds to the class of a layer."""

    codec: Codec
    _read_as: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], decoded anew."""
        return _Decode.apply(self._parameters["weight"], getattr(self, SCALE), self.codec, self._read_as)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def in_codec(self) -> Stored:
        """The tensors that hold the weight."""
        data, scale_inv = self._parameters["weight"], getattr(self, SCALE)
        assert data is not None, "made by hold"
        return (data.detach(),) if scale_inv is None else (data.detach(), scale_inv)

    def set_weight(self, master: Tensor) -> None:
        """Encode `master` [out, in], float32, into the weight."""
        self.codec.store(master, self.in_codec)

    def set_weight_grad_dtype(self, dtype: torch.dtype) -> None:
        """Accumulate the gradient in `dtype`."""
        data = self._parameters["weight"]
        if data is not None and data.requires_grad:
            data.grad_dtype = dtype

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        """Weights that are not in the codec are encoded."""
        weight, like = state.get(prefix + "weight"), self.in_codec
        if weight is not None and weight.shape == like[0].shape and (prefix + SCALE in state) != (len(like) == 2):
            state[prefix + "weight"], *scale = self.codec.encode(weight.float())
            if scale:
                state[prefix + SCALE] = scale[0]
        super()._load_from_state_dict(state, prefix, *rest)


def hold(layer: nn.Module, codec: Codec, dtype: torch.dtype) -> None:
    """Let `layer`, which reads its `weight` [out, in] as `dtype`, hold it in `codec`, in place."""
    old = layer.weight
    assert isinstance(old, nn.Parameter), "no layer twice"
    data, *scale = codec.encode(old.detach().float())
    layer._parameters["weight"] = nn.Parameter(data, requires_grad=old.requires_grad)
    layer.register_buffer(SCALE, scale[0] if scale else None)
    layer.__class__ = type(type(layer).__name__, (HeldWeight, type(layer)), {"codec": codec, "_read_as": dtype})
