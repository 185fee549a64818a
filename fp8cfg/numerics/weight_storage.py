"""Quantized weight of a linear layer: stored in float8 as products read it, or in a codec of low-bit state; written from a float32
master, and read back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fp8cfg.numerics.amax import AmaxGroup
from fp8cfg.numerics.async_copies import HostCopy
from fp8cfg.numerics.codecs import Codec, EncodedTensor
from fp8cfg.numerics.fp8_weights import (
    WEIGHT_BUFFERS,
    FP8Weight,
    as_read,
    codes,
    decode,
    decoded,
    plain,
)
from fp8cfg.numerics.kernels.store import store_and_record
from fp8cfg.numerics.scaling import Scaling
from fp8cfg.numerics.stored_state import StoredWeight, amax_record, in_stored_form, persistent
from fp8cfg.schema.errors import ConfigError

SCALE_INV = "fp8_weight_scale_inv"
"""The buffer of a layer's weight that is stored in float8, or in a codec with a scale: what its codes are multiplied by."""

_RECOMPUTED = (
    "pruning, weight norm and other parametrizations cannot change a converted layer; apply them before"
    " the conversion, and the layer stays in high precision"
)


class NarrowWeight(StoredWeight):
    """Base class of a layer whose weight, while `held`, is stored in float8 or in a codec and stands for one in `read_as`. `kept`
    names the buffers that the stored form of its state has; no buffer is ever cast.
    """

    kept: ClassVar[tuple[str, ...]]
    read_as: torch.dtype
    weight_grad_dtype: torch.dtype
    _gradient_of_weight: Tensor
    _detached: Tensor

    @property
    def held(self) -> bool:
        """Whether the weight has to be decoded before it is multiplied."""
        raise NotImplementedError

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as it is stored."""
        parameter = self._parameters.get("weight")
        if parameter is None:  # a parametrization of torch.nn.utils has taken it
            raise ConfigError(f"{type(self).__name__}.weight: {_RECOMPUTED}")
        return parameter

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Rejects the parameters that pruning, weight norm and spectral norm compute a weight from."""
        if name.startswith("weight_"):
            raise ConfigError(f"{type(self).__name__}.{name}: {_RECOMPUTED}")
        super().register_parameter(name, param)

    @property
    def scaled(self) -> bool:
        """Whether what is stored means nothing without a scale."""
        return self._buffers.get(SCALE_INV) is not None

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] as it reads; decoded anew, and not to be written to, where it is `scaled`."""
        if self._parameters.get("weight") is None:
            raise AttributeError(f"{type(self).__name__} has no weight yet")
        if not self.scaled:
            return self.parameter
        with torch.enable_grad():
            return as_read(self.decoded_weight(), self.parameter)

    def decoded_weight(self) -> Tensor:
        """The weight [out, in] in `read_as`, with a gradient for its Parameter."""
        raise NotImplementedError

    def float32_weight(self) -> Tensor:
        """The weight [out, in] as it is stored, decoded, without gradient."""
        raise NotImplementedError

    def _store(self, data: Tensor, requires_grad: bool) -> None:
        """Make `data` the stored weight; buffers are registered before."""
        self._parameters["weight"] = (
            codes(data, requires_grad) if self.scaled else nn.Parameter(data, requires_grad)
        )

    def set_weight_grad_dtype(self, dtype: torch.dtype) -> None:
        """Compute and accumulate the gradient of a weight that is held in float8 or in a codec in `dtype`. That of any other
        weight is computed in the weight's own dtype, and accumulates in its `grad_dtype`."""
        if self.held:
            self.weight_grad_dtype = dtype
            self._prepare_gradient()

    def receiver_and_stored(self) -> tuple[Tensor, Tensor]:
        """The tensor that receives the gradient of a low-bit weight from autograd, and the stored values without gradient."""
        weight = self.parameter
        if torch.compiler.is_compiling() and self._stands_in:
            if weight.requires_grad:
                return self._gradient_of_weight, self._detached
            return (
                self._detached.new_zeros((), dtype=self.weight_grad_dtype).expand(weight.shape),
                self._detached,
            )
        return weight, plain(weight)

    @property
    def _stands_in(self) -> bool:
        """Whether compiled code gets other tensors in the place of the Parameter: of a dtype that is not its gradient's, or codes,
        whose class AOTAutograd does not take."""
        return self.scaled or self.parameter.dtype.itemsize < self.weight_grad_dtype.itemsize

    def _prepare_gradient(self) -> None:
        """Lets a weight that is stored in fewer bits have a wide gradient. Eager autograd only has to be told the dtype. Compiled
        code ignores it and rounds the gradient to the dtype of the weight in between, so there a stand-in of the same shape, of
        one element, receives the gradient and hands it over. Seen with torch 2.13; can go with the first torch whose AOTAutograd
        respects the dtype.
        """
        if not self.held:
            return
        weight = self.parameter
        # made here: what compiled code detaches itself gets a gradient of nothing, and hooks run
        if self._stands_in:
            self._detached = plain(weight)
        if not weight.requires_grad:
            return
        if weight.grad_dtype != self.weight_grad_dtype:
            weight.grad_dtype = self.weight_grad_dtype
        if weight.dtype == self.weight_grad_dtype and not self.scaled:
            return
        receiver = (
            torch.zeros((), dtype=self.weight_grad_dtype, device=weight.device)
            .expand(weight.shape)
            .requires_grad_()
        )

        def hand_over(receiver: Tensor) -> None:
            assert receiver.grad is not None, "the hook runs after accumulation"
            new, receiver.grad = receiver.grad.to(weight.grad_dtype), None
            weight.grad = new if weight.grad is None else weight.grad.add_(new)
            for hook in (
                weight._post_accumulate_grad_hooks or {}
            ).values():  # which autograd would have called
                hook(weight)

        receiver.register_post_accumulate_grad_hook(hand_over)
        self._gradient_of_weight = receiver

    def _remember_grad_dtype(self) -> None:
        if self.held and self.parameter.grad_dtype is not None:
            self.weight_grad_dtype = self.parameter.grad_dtype

    def __getstate__(self) -> dict[str, Any]:
        self._remember_grad_dtype()
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_gradient_of_weight", "_detached")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare_gradient()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the stored tensors between devices and never casts them."""
        self._remember_grad_dtype()
        fixed = set(map(id, self._buffers.values()))
        if self.held:
            fixed |= {id(self.parameter), id(self.parameter.grad)}

        def move(t: Tensor) -> Tensor:
            if id(t) not in fixed:
                return fn(t)
            new = fn(plain(t))
            return new if new.dtype == t.dtype else plain(t).to(new.device)

        super()._apply(move, recurse)
        self._prepare_gradient()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        with persistent(self, self.kept, in_stored_form()):
            super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scaled and in_stored_form():
            destination[prefix + "weight"] = self.parameter if keep_vars else plain(self.parameter)
        elif self.scaled:
            destination[prefix + "weight"] = self.saved(plain(self.decoded_weight()))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        self._remember_grad_dtype()
        with persistent(self, [name for name in self.kept if prefix + name in state_dict]):
            super()._load_from_state_dict(state_dict, prefix, *rest)
        if (
            self.scaled and type(self.parameter) is nn.Parameter
        ):  # load_state_dict(assign=True) brings a new Parameter
            self._store(self.parameter.data, self.parameter.requires_grad)
        self._prepare_gradient()


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
    def in_codec(self) -> EncodedTensor:
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
        return self.amax_group and self.amax_group.exclude(self.scales_set)

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

    def _stored(self, master: Tensor, held: Sequence[Tensor | None] = ()) -> FP8Weight:
        """The weight in float8, in the tensors that are `held` where a kernel has written there."""
        into = FP8Weight(*held) if held else None  # type: ignore[arg-type]
        return store_and_record(
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
    def in_codec(self) -> EncodedTensor:
        """The tensors that store a weight in a codec."""
        scale_inv = self.fp8_weight_scale_inv
        data = plain(self.parameter)
        return (data,) if scale_inv is None else (data, scale_inv)

    def _held_tensors(self) -> list[Tensor | None]:
        """The fields of `FP8Weight`; a weight in a codec has the first two at most."""
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
