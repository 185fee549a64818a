"""Quantized weight of a linear layer: stored in float8 as products read it, or in a codec of low-bit state; written from a float32
master, and read back."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fp8cfg.numerics.amax_group import AmaxGroup
from fp8cfg.numerics.codecs import Codec
from fp8cfg.numerics.codecs import Stored as InCodec
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, Stored, store
from fp8cfg.numerics.fused_quantize import store_recorded
from fp8cfg.numerics.low_bit_weight import SCALE_INV, NarrowWeight
from fp8cfg.numerics.scaling import WEIGHT, Scaling
from fp8cfg.numerics.weight_access import decode, decoded, plain


class QuantizedWeight(NarrowWeight):
    """Base class of a linear layer whose weight may be stored in float8, or in `codec`."""

    scaling: Scaling
    product: Literal["emulate", "scaled_mm"]
    codec: Codec | None
    fp8_scale: Tensor | None
    fp8_amax_history: Tensor | None
    fp8_weight_scale_inv: Tensor | None

    amax_group: AmaxGroup | None = None
    scales_set = False

    @property
    def parts(self) -> AmaxGroup | None:
        """The amax group, where scales are made of amaxes in each pass: under delayed scaling until all have been set."""
        return None if self.scales_set else self.amax_group

    def hold(self, codec: Codec, read_as: torch.dtype) -> None:
        """Hold the weight in `codec` from now on, for one in `read_as`: a new Parameter, unless it is in that dtype and needs no
        scale."""
        self.codec, self.read_as, old = codec, read_as, self.parameter
        if codec.scaling != "none" or old.dtype != codec.format.dtype:
            data, *scale_inv = codec.encode(old.detach().float())
            for buffer in scale_inv:
                self.register_buffer(SCALE_INV, buffer, persistent=False)
            self._store(data, old.requires_grad)
        self._prepare_gradient()

    @torch.no_grad()
    def set_weight(self, master: Tensor) -> None:
        """Quantizes `master` [out, in], float32, into the float8 weight: under delayed scaling with the scale of this moment,
        recording the amax. Call it after `update_scales`; then steps equal those of a layer that quantizes its
        high-precision weight in each forward pass, bit for bit. A weight in a codec is encoded. Raises TypeError where it is
        neither."""
        if self.codec:
            self.codec.store(master, self.in_codec)
            return
        if not self.fp8_params:
            raise TypeError("set_weight writes float8 weights; this layer has a high-precision one: assign to it")
        for target, new in zip(self._held_tensors(), self._stored(master), strict=True):
            if target is not None and new is not None:
                target.copy_(new)

    def _stored(self, master: Tensor) -> Stored:
        if self.scaling.tile(WEIGHT, 1) is not None:
            return store(master, self.scaling)
        state = self.fp8_scale, self.fp8_amax_history
        return store_recorded(master, self.scaling, *state, self.product == "scaled_mm", self.parts)

    @property
    def fp8_params(self) -> bool:
        """Whether the weight is stored in float8 only, in the form in which products read it."""
        return self.codec is None and self.fp8_weight_scale_inv is not None

    @property
    def held(self) -> bool:
        """Whether the weight is stored in float8 or in a codec, and has to be decoded before it is multiplied."""
        return self.codec is not None or self.fp8_params

    @property
    def in_codec(self) -> InCodec:
        """The tensors that store a weight in a codec."""
        scale_inv = self.fp8_weight_scale_inv
        data = plain(self.parameter)
        return (data,) if scale_inv is None else (data, scale_inv)

    def _held_tensors(self) -> list[Tensor | None]:
        """The fields of `Stored`; a weight in a codec has the first two at most."""
        return [plain(self.parameter), *(getattr(self, name) for name in WEIGHT_BUFFERS)]

    def decoded_weight(self) -> Tensor:
        receiver, data = self.receiver_and_stored()
        return decode(receiver, (data, *self._held_tensors()[1:]), self.codec, self.read_as)

    def dequantized_weight(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [out, in] in `dtype`."""
        return decoded(self._held_tensors(), self.codec, dtype) if self.held else self.parameter.to(dtype)

    def float32_weight(self) -> Tensor:
        return self.dequantized_weight(torch.float32)
