"""FP8 parameters: weights stored in float8 only, quantized from a float32 master and read back as GEMM operands.

One float8 matrix serves fprop and dgrad where both read the same scales: one scale a tensor, or square tiles. Scales along
rows cannot be read along columns; then a second matrix is kept for dgrad, as Transformer Engine's MXFP8 tensors do, which
takes as many bytes as bfloat16 would. Scales are stored in their own size: E8M0 in a byte, nvfp4's E4M3 as float8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8cfg.numerics.amax import AmaxGroup, join_tiles, split_tiles
from fp8cfg.numerics.codecs import Codec
from fp8cfg.numerics.formats import cast, reciprocal
from fp8cfg.numerics.gemm import Operand, convert_dtype
from fp8cfg.numerics.quantize import quantize_tiles
from fp8cfg.numerics.scaling import WEIGHT, Scaling, compute_global_scale, encode_e8m0
from fp8cfg.schema.scalings import SCALINGS, Tile


class FP8Weight(NamedTuple):
    """A float8 weight [out, in] with its inverse scales, a second pair of data and inverse scales for dgrad where dgrad needs
    other scales, and nvfp4's scale of the whole tensor.
    """

    data: Tensor
    scale_inv: Tensor
    dgrad: Tensor | None = None
    dgrad_scale_inv: Tensor | None = None
    global_scale_inv: Tensor | None = None


WEIGHT_BUFFERS = (
    "fp8_weight_scale_inv",
    "fp8_weight_dgrad",
    "fp8_weight_dgrad_scale_inv",
    "fp8_weight_global_scale_inv",
)
"""A layer's buffers beside its float8 weight, in the order of the fields of `FP8Weight`."""


def store(
    master: Tensor,
    scaling: Scaling,
    scale: Tensor | None = None,
    record: Tensor | None = None,
    parts: AmaxGroup | None = None,
) -> FP8Weight:
    """Quantizes `master` [out, in]; `scale` is the scalar scale where one scale serves the whole tensor. Where there are more the
    amax is folded into the running maximum `record`, [], if there is one, and scales of what others have `parts` of are those of
    the whole."""
    fmt = scaling.forward
    if scale is not None:
        return FP8Weight(cast(master.float() * scale, fmt), reciprocal(scale))
    whole = (
        compute_global_scale(master, group=parts and parts.group_of(WEIGHT))
        if scaling.layout.two_levels
        else None
    )

    def along(axis: int) -> tuple[Tensor, Tensor]:
        tile = scaling.tile(WEIGHT, axis)
        assert tile is not None, "one scale for the tensor is given"
        group = parts and parts.group_of(WEIGHT, tile)
        q = quantize_tiles(master, tile, fmt, scaling, fmt.dtype, whole, record=record, group=group)
        assert q.scale_inv is not None
        return q.data, pack(q.scale_inv, scaling)

    data, scale_inv = along(1)
    dgrad, dgrad_scale_inv = along(0) if scaling.directional(WEIGHT) else (None, None)
    return FP8Weight(
        data, scale_inv, dgrad, dgrad_scale_inv, None if whole is None else reciprocal(whole)
    )


def stored_operand(
    stored: FP8Weight, axis: int, scaling: Scaling, carrier: torch.dtype | None
) -> Operand:
    """The weight [out, in] as the operand of a product that contracts its dimension `axis`. `carrier` None keeps float8."""
    fmt, tile = scaling.forward, scaling.tile(WEIGHT, axis)
    data, scale_inv = stored.data, stored.scale_inv
    if axis == 0 and stored.dgrad is not None and stored.dgrad_scale_inv is not None:
        data, scale_inv = stored.dgrad, stored.dgrad_scale_inv
    if tile is None:
        return Operand(data if carrier is None else data.to(carrier), scale_inv, fmt)
    decode = scale_inv if carrier is None and scale_inv.dtype == torch.uint8 else unpack(scale_inv)
    if carrier is None or not scaling.layout.block:
        return Operand(
            data if carrier is None else data.to(carrier),
            decode,
            fmt,
            tile,
            global_scale_inv=stored.global_scale_inv,
        )
    v = split_tiles(data.to(carrier), tile) * decode.to(carrier)[:, None, :, None]
    return Operand(join_tiles(v, data.shape), stored.global_scale_inv, fmt, tile)


def dequantize(stored: FP8Weight, dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out, in] in `dtype`, rounded once; float32 values are scaled in place."""
    decode, shape = unpack(stored.scale_inv), stored.data.shape
    if stored.global_scale_inv is not None:
        decode = decode * stored.global_scale_inv
    data = stored.data.float()
    if decode.dim() < 2:
        return data.mul_(decode).to(dtype)
    tiles = split_tiles(data.contiguous(), _tile(shape, decode.shape)).mul_(
        decode[:, None, :, None]
    )
    return join_tiles(tiles, shape).to(dtype)


def pack(decode: Tensor, scaling: Scaling) -> Tensor:
    """Float32 scales in the dtype in which the scaling stores them: E8M0 bytes, E4M3, or float32."""
    return _PACKED[scaling.layout.scale](decode)


_PACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda decode: decode,
    "e4m3": lambda decode: decode.to(torch.float8_e4m3fn),
    "e8m0": encode_e8m0,
}
_SIZES = sorted({1, *(scaling.block for scaling in SCALINGS.values() if scaling.block)})


def unpack(scale_inv: Tensor) -> Tensor:
    """The inverse of `pack`."""
    if scale_inv.dtype == torch.uint8 and not torch.compiler.is_compiling():
        return scale_inv.view(torch.float8_e8m0fnu).float()
    if scale_inv.dtype == torch.uint8:  # operations that a compiler makes part of another kernel
        powers = torch.where(scale_inv == 0, 2.0**-127, (scale_inv.int() << 23).view(torch.float32))
        return torch.where(scale_inv == 255, torch.nan, powers)
    return scale_inv.float()


def _tile(shape: torch.Size, scales: torch.Size) -> Tile:
    """The tile size for which a matrix of `shape` has as many tiles as `scales` has elements. No two sizes in use give the same
    number, unless that is one.
    """

    def size(n: int, count: int) -> int:
        return next((k for k in _SIZES if -(-n // k) == count), 0)

    return size(shape[0], scales[0]), size(shape[1], scales[1])


INSTEAD = (
    "fp8cfg.averaged(job) averages the masters, and fp8cfg.convert_back(model) gives plain weights"
)
_SUMS = (
    "add",
    "radd",
    "sub",
    "rsub",
    "subtract",
    "mul",
    "rmul",
    "multiply",
    "div",
    "rdiv",
    "truediv",
    "rtruediv",
    "true_divide",
    "divide",
    "lerp",
    "addcmul",
    "addcdiv",
    "sum",
    "mean",
    "norm",
    "vector_norm",
    "matmul",
    "mm",
    "linear",
    "float",
    "double",
    "half",
    "bfloat16",
)
_ARITHMETIC = frozenset(
    form.format(name)
    for name in _SUMS
    for form in ("{}", "{}_", "__{}__", "__i{}__", "_foreach_{}", "_foreach_{}_")
)
"""Names of torch's functions that read codes as numbers."""
_TENSOR: Any = Tensor  # to mypy its descriptors are what they give
_OF_PARAMETER = (
    *(
        function
        for attribute in (_TENSOR.grad, _TENSOR.requires_grad, _TENSOR.grad_dtype)
        for function in (attribute.__get__, attribute.__set__)
    ),
    _TENSOR._version.__get__,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
)
"""What a weight that is read answers as its Parameter does."""


class Codes(Tensor):
    """The stored values of a weight whose scale stands elsewhere: RuntimeError for arithmetic and casts, which would not
    see the scale. What is made of them by `detach`, `clone` and the like are codes too."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (
            func.__name__ in _ARITHMETIC
        ):  # by name: compiled code reads this too, and torch's operators swallow a TypeError
            raise RuntimeError(_refusal(func.__name__))
        made = super().__torch_function__(func, types, args, kwargs or {})
        if func.__name__ == "to" and made.dtype != args[0].dtype:
            raise RuntimeError(_refusal(f"to({made.dtype})"))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = made = _codes(
            plain(self).clone(), self.requires_grad, isinstance(self, nn.Parameter)
        )
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _codes, (plain(self), self.requires_grad, isinstance(self, nn.Parameter))


class DecodedWeight(Tensor):
    """A stored weight as it reads: the values in the dtype that they stand for. A write to it, or to a view of it, would be lost
    and is a RuntimeError; gradients, their hooks and `requires_grad` are those of its Parameter."""

    parameter: Tensor | None
    _is_param: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else (kwargs or {}).get("tensor")  # torch.nn.init gives it by name
        read = first if isinstance(first, cls) else None
        with torch._C.DisableTorchFunctionSubclass():
            if read is not None and read.parameter is not None and func in _OF_PARAMETER:
                made = func(read.parameter, *args[1:], **(kwargs or {}))
                return read if func is Tensor.requires_grad_ else made
            if _writes(func, first, kwargs or {}, cls):
                raise RuntimeError(
                    f"{func.__name__}: this weight is stored in FP8 or in a codec, and reads as a"
                    f" copy; a write to it would be lost: load_state_dict stores one, {INSTEAD}"
                )
            made = func(*args, **(kwargs or {}))
            return made if read is None else _aliases(made, read)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().as_subclass(Tensor).clone()


def _writes(func: Any, first: Any, kwargs: dict[str, Any], cls: type) -> bool:
    """Whether a call of `func` would write to a DecodedWeight."""
    name = func.__name__
    inplace = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    inplace = (
        inplace
        or name in ("__setitem__", "__set__")
        or (name.startswith("__i") and name in _ARITHMETIC)
    )
    targets = [kwargs.get("out"), first if inplace else None]
    return any(
        isinstance(t, cls)
        for target in targets
        for t in (target if isinstance(target, list | tuple) else [target])
    )


def _aliases(made: Any, read: DecodedWeight) -> Any:
    """`made` of `read`, marked like it where they share memory."""
    if isinstance(made, tuple | list) and type(made) in (tuple, list):
        return type(made)(_aliases(one, read) for one in made)
    if type(made) is not Tensor or made.device.type == "meta":
        return made
    if made.untyped_storage().data_ptr() != read.untyped_storage().data_ptr():
        return made
    return _marked(made, None)


def _marked(values: Tensor, parameter: Tensor | None) -> DecodedWeight:
    read = values.as_subclass(DecodedWeight)
    read.parameter = parameter
    if parameter is not None:
        # what torch asks for in `isinstance(weight, nn.Parameter)`, and get_parameter() with it
        read._is_param = True
    return read


class _Decode(torch.autograd.Function):
    """Codes to values; the gradient of the values goes to `receiver`."""

    @staticmethod
    def forward(ctx: Any, receiver: Tensor, *rest: Any) -> Tensor:
        *stored, codec, dtype = rest
        return convert_dtype(decoded(stored, codec, torch.float32 if codec else dtype), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None,) * 7


def decoded(stored: Sequence[Tensor | None], codec: Codec | None, dtype: torch.dtype) -> Tensor:
    """The values of `stored`, the fields of `fp8_weights.FP8Weight`: a float8 weight, or the first one or two in `codec`."""
    if codec is None:
        data, scale_inv, *others = stored
        assert data is not None and scale_inv is not None, "a float8 weight has a scale"
        return dequantize(FP8Weight(data, scale_inv, *others), dtype)
    return codec.decode(tuple(t for t in stored[:2] if t is not None)).to(dtype)


def decode(
    receiver: Tensor, stored: Sequence[Tensor | None], codec: Codec | None, dtype: torch.dtype
) -> Tensor:
    """As `decoded`, with a gradient for `receiver`."""
    return _Decode.apply(receiver, *stored, codec, dtype)  # type: ignore[no-any-return]


def as_read(values: Tensor, parameter: nn.Parameter) -> Tensor:
    """`values`, decoded from `parameter`, for code that is not ours. Compiled code gets them as they are. With a gradient they
    are no leaf, so that a module which would take them for its own Parameter refuses."""
    return values if torch.compiler.is_compiling() else _marked(values, parameter)


def is_arithmetic(name: str) -> bool:
    """Whether torch's function of that name reads codes as numbers."""
    return name in _ARITHMETIC


def as_saved(values: Tensor) -> Tensor:
    """`values`, decoded, for code that would write to them in vain: a write is a RuntimeError."""
    return _marked(values, None)


def codes(data: Tensor, requires_grad: bool) -> nn.Parameter:
    """A Parameter of codes whose scale stands elsewhere."""
    return nn.Parameter(data.as_subclass(Codes), requires_grad)


def _refusal(what: str) -> str:
    return (
        f"{what}: this weight is stored in FP8 or in a codec, its numbers mean nothing without"
        f" their scale; {INSTEAD}"
    )


def _codes(data: Tensor, requires_grad: bool, parameter: bool) -> Tensor:
    return codes(data, requires_grad) if parameter else data.as_subclass(Codes)


def plain(t: Tensor) -> Tensor:
    """`t` without gradient, as an ordinary tensor: codes as their own layer reads them."""
    with torch._C.DisableTorchFunctionSubclass():
        return t.detach()
