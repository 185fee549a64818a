"""Quantized weight of a linear layer: stored in float8 as products read it, or in a codec of low-bit state; written from a float32
master, and read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fp8cfg.numerics.amax_group import AmaxGroup
from fp8cfg.numerics.codecs import Codec
from fp8cfg.numerics.codecs import Stored as InCodec
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, Stored
from fp8cfg.numerics.fused_store import store_recorded
from fp8cfg.numerics.host_copy import HostCopy
from fp8cfg.numerics.low_bit_weight import SCALE_INV, NarrowWeight
from fp8cfg.numerics.pass_records import amax_record
from fp8cfg.numerics.scaling import Scaling
from fp8cfg.numerics.weight_access import decode, decoded, plain


class QuantizedWeight(NarrowWeight):
    """Base class of a linear layer whose weight may be stored in float8, or in `codec`."""

    scaling: Scaling
    product: Literal["emulate", "scaled_mm"]
    codec: Codec | None
    fp8_scale: Tensor | None
    fp8_amax_history: Tensor | None
    fp8_amax: Tensor | None
    fp8_weight_scale_inv: Tensor | None

    amax_group: AmaxGroup | None = None
    scales_set: tuple[int, ...] = ()
    """The roles whose delayed scales are known to be set."""
    scales_read: HostCopy | None = None
    """The scales on their way to the host, where those of more roles may be set by now."""

    @property
    def parts(self) -> AmaxGroup | None:
        """The amax group of the tensors whose scales are made of their amaxes in each pass: under delayed scaling until they are
        known to be set."""
        return self.amax_group and self.amax_group.without(self.scales_set)

    def note_set(self, roles: tuple[int, ...]) -> None:
        """The delayed scales of these roles are set, of others they may not be."""
        if (
            roles != self.scales_set
        ):  # nothing that compiled code is guarded by is written for nothing
            self.scales_set = roles

    def forget_scales_set(self) -> None:
        """Delayed scales are other ones from now on, which may not be set."""
        self.scales_read = None
        self.note_set(())

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
            raise TypeError(
                "set_weight writes float8 weights; this layer has a high-precision one: assign"
                " to it"
            )
        held = self._held_tensors()
        for target, new in zip(held, self._stored(master, held), strict=True):
            if target is not None and new is not None and new is not target:
                target.copy_(new)

    def _stored(self, master: Tensor, held: Sequence[Tensor | None] = ()) -> Stored:
        """The weight in float8, in the tensors that are `held` where a kernel has written there."""
        into = Stored(*held) if held else None  # type: ignore[arg-type]
        return store_recorded(
            master, self.scaling, self.fp8_scale, amax_record(self), self.parts, into
        )

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

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in super().__getstate__().items() if name != "scales_read"
        }

    def decoded_weight(self) -> Tensor:
        receiver, data = self.receiver_and_stored()
        return decode(receiver, (data, *self._held_tensors()[1:]), self.codec, self.read_as)

    def dequantized_weight(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [out, in] in `dtype`."""
        return (
            decoded(self._held_tensors(), self.codec, dtype)
            if self.held
            else self.parameter.to(dtype)
        )

    def float32_weight(self) -> Tensor:
        return self.dequantized_weight(torch.float32)
