"""The weight of a layer, stored in FP8 or in a codec and read in a wider dtype.

    layer.parameter       the Parameter as stored, seen by optimizers and checkpoints
    layer.weight          its values [out, in] in `read_as`, decoded on each access
    layer.weight_storage  the form for GEMMs (fp8_weights.py), None for a plain Parameter
    layer.set_weight      writes a float32 master

`NarrowWeight` is the base class of FP8Linear. `store_in_codec` gives a layer of a library the same
properties. Both hand a wide gradient to the narrow Parameter, never cast stored tensors, and convert
state dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8cfg.numerics.fp8_weights import (
    INSTEAD,
    WEIGHT_BUFFERS,
    CodecWeight,
    FP8Weight,
    WeightStorage,
    codes,
    is_arithmetic,
    plain,
)
from fp8cfg.numerics.stored_state import in_stored_form, move_without_cast, persistent
from fp8cfg.schema.errors import ConfigError

if TYPE_CHECKING:
    from fp8cfg.numerics.codecs import Codec

SCALE_INV = WEIGHT_BUFFERS[0]
"""The buffer that multiplies stored values: of a float8 weight, or of a codec with a scale."""
_PARAMETRIZED = (
    "pruning, weight norm and other parametrizations cannot change a converted layer; apply them before"
    " the conversion, and the layer stays in high precision"
)


class StoredWeight(nn.Module):
    """Base class of a layer whose `state_dict()` has decoded weights.

    The state dict of a copy rejects writes. Averaging classes such as timm's ModelEma copy a model
    and write into the copy's `state_dict()`: nothing would change.
    """

    copied = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.copied = True

    def state_dict_entry(self, weight: Tensor) -> Tensor:
        """Returns the entry of `state_dict()` for a decoded weight."""
        if not self.copied:
            return weight
        return _mark(weight, None)


class NarrowWeight(StoredWeight):
    """Base class of a layer whose weight may be stored in FP8 or in a codec.

    Attributes:
        state_buffers: Buffers in the stored form of the layer's state. They are never cast.
        codec: The codec of the weight, None for FP8 and high precision.
        read_as: Dtype represented by the stored weight.
        weight_grad_dtype: Dtype in which the gradient of a stored weight accumulates.
    """

    state_buffers: ClassVar[tuple[str, ...]]
    codec: Codec | None = None
    read_as: torch.dtype
    weight_grad_dtype: torch.dtype
    _gradient_of_weight: Tensor
    _detached: Tensor

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as it is stored."""
        parameter = self._parameters.get("weight")
        if parameter is None:  # a parametrization of torch.nn.utils has replaced it
            raise ConfigError(f"{type(self).__name__}.weight: {_PARAMETRIZED}")
        return parameter

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Rejects the parameters of pruning, weight norm and spectral norm.

        Also rejects a weight that is not stored as the scale of the layer expects. The layer would
        multiply it by that scale.
        """
        if name.startswith("weight_"):
            raise ConfigError(f"{type(self).__name__}.{name}: {_PARAMETRIZED}")
        if name != "weight" or param is None:
            super().register_parameter(name, param)
            return
        if self.has_scale and param.dtype != self.parameter.dtype:
            raise ConfigError(
                f"{type(self).__name__}.weight: a {param.dtype} Parameter cannot replace this"
                " quantized weight; load it with load_state_dict, or tie layers before the"
                " conversion"
            )
        super().register_parameter(name, param)
        self._prepare_gradient()

    @property
    def is_encoded(self) -> bool:
        """Whether the weight is stored in FP8 or in a codec, and decoded before use."""
        return self.codec is not None or self.has_scale

    @property
    def has_scale(self) -> bool:
        """Whether the stored values are multiplied by a scale, and mean nothing without it."""
        return self._buffers.get(SCALE_INV) is not None

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] as other code reads it: decoded if it has a scale, and read-only."""
        if self._parameters.get("weight") is None:
            raise AttributeError(f"{type(self).__name__} has no weight yet")
        if not self.has_scale:
            return self.parameter
        with torch.enable_grad():  # with a gradient even under no_grad, see `as_read`
            return as_read(self.decoded_weight(), self.parameter)

    @property
    def weight_storage(self) -> WeightStorage | None:
        """The stored weight as GEMMs read it, without gradient; None in high precision."""
        if not self.is_encoded:
            return None
        return self._storage_of(plain(self.parameter))

    def _storage_of(self, data: Tensor) -> WeightStorage:
        scale_inv = self._buffers[SCALE_INV]
        if self.codec is not None:
            return CodecWeight(data, scale_inv, self.codec)
        assert scale_inv is not None, "a float8 weight has a scale"
        return FP8Weight(data, scale_inv, *(self._buffers[name] for name in WEIGHT_BUFFERS[1:]))

    @property
    def codec_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of a weight in a codec: data, and the scale if the codec has one."""
        storage = self.weight_storage
        assert isinstance(storage, CodecWeight)
        return storage.tensors

    def decoded_weight(self) -> Tensor:
        """Decodes to [out, in] in `read_as`, with a gradient for the Parameter."""
        receiver, storage = self.receiver_and_storage()
        return decode(receiver, storage, self.read_as)

    def dequantized_weight(self, dtype: torch.dtype) -> Tensor:
        """Decodes to [out, in] in `dtype`, without gradient if the weight is stored."""
        storage = self.weight_storage
        if storage is None:
            return self.parameter.to(dtype)
        return storage.values(dtype)

    def float32_weight(self) -> Tensor:
        """Decodes to [out, in] in float32."""
        return self.dequantized_weight(torch.float32)

    def set_weight(self, master: Tensor) -> None:
        """Encodes `master`, float32 [out, in], into the stored weight."""
        assert self.codec is not None
        self.codec.store(master, self.codec_tensors)

    def set_weight_grad_dtype(self, dtype: torch.dtype) -> None:
        """Sets the dtype in which the gradient of a stored weight is computed and accumulated.

        A high-precision weight has a gradient of its own dtype, accumulated in its `grad_dtype`.
        """
        if self.is_encoded:
            self.weight_grad_dtype = dtype
            self._prepare_gradient()

    def _encode_parameter(self, codec: Codec) -> None:
        """Stores a high-precision weight in `codec`.

        The Parameter stays the same if it has the codec's dtype already and needs no scale.
        """
        weight = self.parameter
        if codec.scaling == "none" and weight.dtype == codec.format.dtype:
            return
        data, *scales = codec.encode(weight.detach().float())
        if scales:
            self.register_buffer(SCALE_INV, scales[0], persistent=False)
        self._set_parameter(data, weight.requires_grad)

    def _set_parameter(self, data: Tensor, requires_grad: bool) -> None:
        """Makes `data` the stored weight. Its buffers are registered first."""
        if self.has_scale:
            self._parameters["weight"] = codes(data, requires_grad)
        else:
            self._parameters["weight"] = nn.Parameter(data, requires_grad)

    def receiver_and_storage(self) -> tuple[Tensor, WeightStorage]:
        """Returns the tensor to which autograd gives the gradient, and the stored weight."""
        weight = self.parameter
        if not torch.compiler.is_compiling() or not self._needs_receiver:
            return weight, self._storage_of(plain(weight))
        storage = self._storage_of(self._detached)
        if weight.requires_grad:
            return self._gradient_of_weight, storage
        receiver = self._detached.new_zeros((), dtype=self.weight_grad_dtype)
        return receiver.expand(weight.shape), storage

    @property
    def _needs_receiver(self) -> bool:
        """Whether compiled code must not see the Parameter.

        AOTAutograd (torch 2.13) casts a gradient to the dtype of its tensor and rejects the class
        of codes.
        """
        return self.has_scale or self.parameter.dtype.itemsize < self.weight_grad_dtype.itemsize

    def _prepare_gradient(self) -> None:
        """Lets a narrow Parameter have a wide gradient.

        Eager autograd needs only `grad_dtype`. Compiled code ignores it and rounds the gradient to
        the dtype of the weight (torch 2.13, until AOTAutograd respects the dtype). There a receiver of
        the weight's shape, with one element in memory, takes the gradient and hands it over.
        """
        if not self.is_encoded:
            return
        weight = self.parameter
        # Detached here: if compiled code detaches it, the Parameter gets an empty gradient, and
        # its hooks run.
        if self._needs_receiver:
            self._detached = plain(weight)
        if not weight.requires_grad:
            return
        if weight.grad_dtype != self.weight_grad_dtype:
            weight.grad_dtype = self.weight_grad_dtype
        if weight.dtype == self.weight_grad_dtype and not self.has_scale:
            return
        element = torch.zeros((), dtype=self.weight_grad_dtype, device=weight.device)
        receiver = element.expand(weight.shape).requires_grad_()

        def hand_over(receiver: Tensor) -> None:
            assert receiver.grad is not None, "the hook runs after accumulation"
            gradient = receiver.grad.to(weight.grad_dtype)
            receiver.grad = None
            if weight.grad is None:
                weight.grad = gradient
            else:
                weight.grad.add_(gradient)
            # Autograd would have called the hooks of the Parameter.
            for hook in (weight._post_accumulate_grad_hooks or {}).values():
                hook(weight)

        receiver.register_post_accumulate_grad_hook(hand_over)
        self._gradient_of_weight = receiver

    def _remember_grad_dtype(self) -> None:
        """Keeps the `grad_dtype` that a user has set on the Parameter, for the next Parameter."""
        if self.is_encoded and self.parameter.grad_dtype is not None:
            self.weight_grad_dtype = self.parameter.grad_dtype

    def __getstate__(self) -> dict[str, Any]:
        self._remember_grad_dtype()
        state = dict(self.__dict__)
        state.pop("_gradient_of_weight", None)
        state.pop("_detached", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare_gradient()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves stored tensors between devices, but never casts them."""
        self._remember_grad_dtype()
        # nn.Module passes the tensors only, without names.
        uncast = {id(buffer) for buffer in self._buffers.values()}
        if self.is_encoded:
            uncast |= {id(self.parameter), id(self.parameter.grad)}

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in uncast:
                return fn(tensor)
            return move_without_cast(fn, plain(tensor))

        super()._apply(move, recurse)
        self._prepare_gradient()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        with persistent(self, self.state_buffers, in_stored_form()):
            super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.has_scale:
            return
        weight: Tensor = self.parameter
        if not in_stored_form():
            weight = self.state_dict_entry(plain(self.decoded_weight()))
        elif not keep_vars:
            weight = plain(weight)
        destination[prefix + "weight"] = weight

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        self._remember_grad_dtype()
        with persistent(self, [name for name in self.state_buffers if prefix + name in state_dict]):
            super()._load_from_state_dict(state_dict, prefix, *rest)
        # load_state_dict(assign=True) replaces codes by an ordinary Parameter.
        if self.has_scale and type(self.parameter) is nn.Parameter:
            self._set_parameter(self.parameter.data, self.parameter.requires_grad)
        self._prepare_gradient()


class CodecLayer(NarrowWeight):
    """A layer of a library whose weight is in a codec, see `store_in_codec`."""

    state_buffers = (SCALE_INV,)
    is_encoded = True
    codec: Codec

    @property
    def weight(self) -> Tensor:
        """The decoded weight [out, in], read-only. While FSDP2 shards it, the Parameter.

        FSDP2 reads its parameters by this name.
        """
        if hasattr(self.parameter, "placements"):
            return self.parameter
        with torch.enable_grad():
            return as_read(self.decoded_weight(), self.parameter)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        """Encodes a weight that is not in the codec yet."""
        weight = state_dict.get(prefix + "weight")
        needs_scale = len(self.codec_tensors) == 2
        is_encoded = (prefix + SCALE_INV in state_dict) == needs_scale
        # nn.Module reports a missing weight and another shape.
        if weight is not None and weight.shape == self.parameter.shape and not is_encoded:
            state_dict[prefix + "weight"], *scales = self.codec.encode(weight.float())
            if scales:
                state_dict[prefix + SCALE_INV] = scales[0]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle does not find a class that is created at run time.
        return _empty_layer, (type(self).__bases__[1],), self.__getstate__()


def store_in_codec(layer: nn.Module, codec: Codec, dtype: torch.dtype) -> None:
    """Stores the weight of a library's layer in a codec, in place.

    Args:
        layer: A layer with a `weight` [out, in] that it reads in `dtype`.
        codec: The codec. The layer gets a new Parameter, unless the weight has the codec's dtype
            already and needs no scale.
        dtype: Dtype in which the layer reads its weight.
    """
    weight = layer.weight
    assert isinstance(weight, nn.Parameter), "the layer is not converted twice"
    layer.register_buffer(SCALE_INV, None, persistent=False)
    layer.__class__ = type(_empty_layer(type(layer)))
    assert isinstance(layer, CodecLayer)
    layer.codec = codec
    layer.read_as = dtype
    layer.weight_grad_dtype = weight.dtype
    layer._encode_parameter(codec)
    layer._prepare_gradient()


def remove_codec(layer: CodecLayer, weight: nn.Parameter) -> None:
    """Undoes `store_in_codec`, in place. `weight` becomes the Parameter of the layer."""
    for name in ("codec", "read_as", "weight_grad_dtype", "_gradient_of_weight", "_detached"):
        vars(layer).pop(name, None)
    del layer._buffers[SCALE_INV]
    layer._non_persistent_buffers_set.discard(SCALE_INV)
    layer.__class__ = type(layer).__bases__[1]
    layer._parameters["weight"] = weight


@cache
def _class_with_codec(base: type[nn.Module]) -> type[CodecLayer]:
    return type(base.__name__, (CodecLayer, base), {})


def _empty_layer(base: type[nn.Module]) -> CodecLayer:
    """Returns an empty layer of a subclass of `base`, for copies and unpickling."""
    cls = _class_with_codec(base)  # type: ignore[arg-type]  # mypy: Module has no hash of its class
    return cls.__new__(cls)


def scaled_codec_layers(model: nn.Module) -> dict[nn.Parameter, NarrowWeight]:
    """Returns the layer of each weight in a codec with a scale.

    `codec_tensors` of a layer has the stored tensors.
    """
    layers = {}
    for layer in codec_layers(model):
        if len(layer.codec_tensors) > 1:
            layers[layer.parameter] = layer
    return layers


def codec_layers(model: nn.Module) -> list[NarrowWeight]:
    """Returns the layers with a weight in a codec."""
    return [layer for layer in model.modules() if isinstance(layer, NarrowWeight) and layer.codec]


def operand(layer: nn.Module) -> Tensor:
    """Returns the weight [out, in] that a library's `layer` multiplies, decoded if necessary."""
    if isinstance(layer, CodecLayer):
        return layer.decoded_weight()
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight


def decode(receiver: Tensor, storage: WeightStorage, dtype: torch.dtype) -> Tensor:
    """Decodes a stored weight to [out, in] in `dtype`; `receiver` receives its gradient."""
    return _Decode.apply(receiver, storage, dtype)  # type: ignore[no-any-return]


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, receiver: Tensor, storage: WeightStorage, dtype: torch.dtype) -> Tensor:
        return storage.values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


def as_read(values: Tensor, parameter: nn.Parameter) -> Tensor:
    """Marks decoded `values` as the weight of `parameter`, for code outside this package.

    Compiled code gets plain tensors. With a gradient the values are not a leaf, so a module that
    would register them as its own Parameter raises an error.
    """
    if torch.compiler.is_compiling():
        return values
    return _mark(values, parameter)


_TENSOR: Any = Tensor  # for mypy, a descriptor of Tensor has the type of its value
_PARAMETER_FUNCTIONS = (
    _TENSOR.grad.__get__,
    _TENSOR.grad.__set__,
    _TENSOR.requires_grad.__get__,
    _TENSOR.requires_grad.__set__,
    _TENSOR.grad_dtype.__get__,
    _TENSOR.grad_dtype.__set__,
    _TENSOR._version.__get__,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
)
"""Functions that a decoded weight forwards to its Parameter."""


class DecodedWeight(Tensor):
    """The values of a stored weight, as other code reads them.

    A write to it or to a view of it raises RuntimeError: it would be lost. Gradients, their hooks
    and `requires_grad` belong to the Parameter.

    Attributes:
        parameter: The Parameter. None for views, and for entries of a state dict.
    """

    parameter: Tensor | None
    _is_param: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = kwargs.get("tensor")  # torch.nn.init passes the tensor by name
        if args:
            first = args[0]
        with torch._C.DisableTorchFunctionSubclass():
            parameter = None
            if isinstance(first, cls):
                parameter = first.parameter
            if parameter is not None and func in _PARAMETER_FUNCTIONS:
                result = func(parameter, *args[1:], **kwargs)
                if func is Tensor.requires_grad_:
                    return first  # it returns its tensor
                return result
            if _writes(func, first, kwargs):
                raise RuntimeError(
                    f"{func.__name__}: this weight is quantized, so a change of its copy would be"
                    f" lost; load_state_dict stores a weight, {INSTEAD}"
                )
            result = func(*args, **kwargs)
            if isinstance(first, cls):
                return _mark_views(result, first)
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().as_subclass(Tensor).clone()


def _mark(values: Tensor, parameter: Tensor | None) -> DecodedWeight:
    """Marks decoded `values` so that a write raises RuntimeError."""
    weight = values.as_subclass(DecodedWeight)
    weight.parameter = parameter
    if parameter is not None:
        # `isinstance(weight, nn.Parameter)` and get_parameter() look for this attribute.
        weight._is_param = True
    return weight


def _mark_views(result: Any, weight: DecodedWeight) -> Any:
    """Marks the tensors in `result` that share memory with `weight`."""
    if type(result) in (tuple, list):
        return type(result)(_mark_views(item, weight) for item in result)
    if type(result) is not Tensor or result.device.type == "meta":
        return result
    if result.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
        return result
    return _mark(result, None)


def _writes(func: Any, first: Any, kwargs: dict[str, Any]) -> bool:
    """Tells whether a call of `func` would write to a DecodedWeight."""
    name = func.__name__
    is_method = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    is_operator = name.startswith("__i") and is_arithmetic(name)
    targets = [kwargs.get("out")]
    if is_method or is_operator or name in ("__setitem__", "__set__"):
        targets.append(first)
    # A function may write to a list of tensors.
    return any(isinstance(target, DecodedWeight) for target in tree_leaves(targets))
