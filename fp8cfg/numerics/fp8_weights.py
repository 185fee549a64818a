"""FP8 weights: the forms in which a layer stores its weight.

`FP8Weight` and `CodecWeight` are the two storage forms besides a high-precision Parameter. Both have
`values(dtype)`. GEMMs read an FP8 weight as it is stored.

One float8 matrix serves fprop and dgrad if both read the same scales: one scale per tensor, or square
tiles. If scales lie along rows, dgrad cannot read them along columns. Such a scaling stores a second
matrix for dgrad, as Transformer Engine's MXFP8 tensors do: as many bytes as bfloat16.

Two tensor subclasses let a stored weight be a Parameter. `Codes` rejects arithmetic, because its numbers
mean nothing without their scale. `GatheredWeight` is the result of an FP8 all-gather by FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fp8cfg.numerics.amax import AmaxGroup, join_tiles, sharing_group, split_tiles
from fp8cfg.numerics.formats import cast, reciprocal
from fp8cfg.numerics.gemm import Operand, convert_dtype
from fp8cfg.numerics.quantize import quantize_tiles
from fp8cfg.numerics.scaling import WEIGHT, Scaling, compute_global_scale, encode_e8m0
from fp8cfg.schema.scalings import SCALINGS, Tile

if TYPE_CHECKING:
    # A codec is passed in; FP8 layers run without this module.
    from fp8cfg.numerics.codecs import Codec

WEIGHT_BUFFERS = (
    "fp8_weight_scale_inv",
    "fp8_weight_dgrad",
    "fp8_weight_dgrad_scale_inv",
    "fp8_weight_global_scale_inv",
)
"""A layer's buffers for an FP8 weight, in the order of the fields of `FP8Weight` after `data`."""


class FP8Weight(NamedTuple):
    """A float8 weight with its inverse scales: weight = data * scale_inv.

    Attributes:
        data: float8 [out, in], the operand of fprop.
        scale_inv: Inverse scales: float32 [] or one per tile, packed by `pack`.
        dgrad: float8 [out, in], the operand of dgrad if it needs other scales.
        dgrad_scale_inv: Inverse scales of `dgrad`.
        global_scale_inv: float32 [], NVFP4's scale of the whole tensor.
    """

    data: Tensor
    scale_inv: Tensor
    dgrad: Tensor | None = None
    dgrad_scale_inv: Tensor | None = None
    global_scale_inv: Tensor | None = None

    def operand(self, dim: int, scaling: Scaling, carrier: torch.dtype | None) -> Operand:
        """Returns the operand of a GEMM that contracts dimension `dim`, as [out, in].

        Args:
            dim: 1 for fprop, 0 for dgrad.
            scaling: The scaling that quantized the weight.
            carrier: Dtype of the values for an emulated GEMM, None for a float8 GEMM.
        """
        tile = scaling.tile(WEIGHT, dim)
        data, scale_inv = self.data, self.scale_inv
        if dim == 0 and self.dgrad is not None and self.dgrad_scale_inv is not None:
            data, scale_inv = self.dgrad, self.dgrad_scale_inv
        if tile is None:
            if carrier is not None:
                data = data.to(carrier)
            return Operand(data, scale_inv, scaling.forward)
        if carrier is None:
            # The hardware reads E8M0 scales as bytes.
            if scale_inv.dtype != torch.uint8:
                scale_inv = unpack(scale_inv)
            return Operand(
                data, scale_inv, scaling.forward, tile, global_scale_inv=self.global_scale_inv
            )
        scale_inv = unpack(scale_inv)
        if not scaling.layout.block:
            data = data.to(carrier)
            return Operand(
                data, scale_inv, scaling.forward, tile, global_scale_inv=self.global_scale_inv
            )
        # Scales that vary along the contracted dimension are multiplied into the values.
        tiles = split_tiles(data.to(carrier), tile) * scale_inv.to(carrier)[:, None, :, None]
        return Operand(join_tiles(tiles, data.shape), self.global_scale_inv, scaling.forward, tile)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantizes to [out, in] in `dtype`. Rounds once; float32 is scaled in place."""
        scale_inv = unpack(self.scale_inv)
        if self.global_scale_inv is not None:
            scale_inv = scale_inv * self.global_scale_inv
        data = self.data.float()
        if scale_inv.dim() < 2:
            return data.mul_(scale_inv).to(dtype)
        tile = _tile(data.shape, scale_inv.shape)
        tiles = split_tiles(data.contiguous(), tile).mul_(scale_inv[:, None, :, None])
        return join_tiles(tiles, data.shape).to(dtype)


class CodecWeight(NamedTuple):
    """A weight [out, in] in a storage codec. GEMMs read it decoded, and quantize it for FP8.

    Attributes:
        data: The stored values, [out, in].
        scale_inv: float32 [], what `data` is multiplied by. None for a codec without a scale.
        codec: The codec.
    """

    data: Tensor
    scale_inv: Tensor | None
    codec: Codec

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors as the codec takes them."""
        if self.scale_inv is None:
            return (self.data,)
        return self.data, self.scale_inv

    def values(self, dtype: torch.dtype) -> Tensor:
        """Decodes to [out, in] in `dtype`."""
        return convert_dtype(self.codec.decode(self.tensors), dtype)


WeightStorage = FP8Weight | CodecWeight
"""The form of a weight that is not a high-precision Parameter."""


def weight_storage(tensors: Sequence[Tensor | None], codec: Codec | None) -> WeightStorage:
    """Returns the storage form of a weight and its scales.

    Args:
        tensors: The fields of `FP8Weight`, or the weight and the scale, if any, of a codec.
        codec: The codec, None for a float8 weight.
    """
    data, *scales = tensors
    assert data is not None
    if codec is not None:
        codec_scale = None
        if scales:
            codec_scale = scales[0]
        return CodecWeight(data, codec_scale, codec)
    scale_inv, *dgrad_tensors = scales
    assert scale_inv is not None, "a float8 weight has a scale"
    return FP8Weight(data, scale_inv, *dgrad_tensors)


def store(
    master: Tensor,
    scaling: Scaling,
    scale: Tensor | None = None,
    record: Tensor | None = None,
    amax_group: AmaxGroup | None = None,
) -> FP8Weight:
    """Quantizes a high-precision weight to the FP8 weight that GEMMs read.

    Args:
        master: Weight [out, in] of any float dtype.
        scaling: The scaling.
        scale: float32 [], the scale of a scaling with one scale per tensor. None for tiles.
        record: float32 [], a running maximum that receives the amax of tiles, if any.
        amax_group: Ranks with the other shards of the weight. They share the scales.
    """
    fmt = scaling.forward
    if scale is not None:
        return FP8Weight(cast(master.float() * scale, fmt), reciprocal(scale))
    global_scale, global_scale_inv = None, None
    if scaling.layout.two_levels:
        global_scale = compute_global_scale(master, sharing_group(amax_group, WEIGHT))
        global_scale_inv = reciprocal(global_scale)

    def quantize_along(dim: int) -> tuple[Tensor, Tensor]:
        tile = scaling.tile(WEIGHT, dim)
        assert tile is not None, "a scaling with one scale per tensor passes it"
        group = sharing_group(amax_group, WEIGHT, tile)
        operand = quantize_tiles(
            master, tile, fmt, scaling, fmt.dtype, global_scale, record=record, group=group
        )
        assert operand.scale_inv is not None
        return operand.data, pack(operand.scale_inv, scaling)

    data, scale_inv = quantize_along(1)
    dgrad, dgrad_scale_inv = None, None
    if scaling.directional(WEIGHT):
        dgrad, dgrad_scale_inv = quantize_along(0)
    return FP8Weight(data, scale_inv, dgrad, dgrad_scale_inv, global_scale_inv)


def quantized_dims(scaling: Scaling) -> tuple[int, ...]:
    """Returns the contracted dimensions for which a weight is quantized, the one of fprop first."""
    if scaling.directional(WEIGHT):
        return 1, 0
    return (1,)


def pack(scale_inv: Tensor, scaling: Scaling) -> Tensor:
    """Casts float32 inverse scales to their stored dtype: E8M0 as bytes, E4M3, or float32."""
    if scaling.layout.scale == "e8m0":
        return encode_e8m0(scale_inv)
    if scaling.layout.scale == "e4m3":
        return scale_inv.to(torch.float8_e4m3fn)
    return scale_inv


def unpack(scale_inv: Tensor) -> Tensor:
    """Casts packed inverse scales to float32."""
    if scale_inv.dtype != torch.uint8:
        return scale_inv.float()
    if not torch.compiler.is_compiling():
        return scale_inv.view(torch.float8_e8m0fnu).float()
    # Written out, so that a compiler fuses it with the kernel that uses the scales.
    powers = torch.where(scale_inv == 0, 2.0**-127, (scale_inv.int() << 23).view(torch.float32))
    return torch.where(scale_inv == 255, torch.nan, powers)


_TILE_SIZES = sorted({1, *(scaling.block for scaling in SCALINGS.values() if scaling.block)})


def _tile(shape: torch.Size, grid: torch.Size) -> Tile:
    """Returns the tile of a matrix of `shape` with `grid` scales.

    No two tile sizes in use give the same number of tiles, unless that number is 1.
    """
    return _tile_size(shape[0], grid[0]), _tile_size(shape[1], grid[1])


def _tile_size(length: int, count: int) -> int:
    for size in _TILE_SIZES:
        if -(-length // size) == count:
            return size
    return 0


INSTEAD = "fp8cfg.averaged(job) averages the masters, and fp8cfg.convert_back(model) returns plain weights"
"""What to do instead of arithmetic on stored weights, for error messages."""
_OPERATIONS = (
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
_FORMS = ("{}", "{}_", "__{}__", "__i{}__", "_foreach_{}", "_foreach_{}_")
_FUSED_OPTIMIZERS = ("_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_")
_ARITHMETIC = frozenset(
    [*_FUSED_OPTIMIZERS, *(form.format(name) for name in _OPERATIONS for form in _FORMS)]
)
"""Names of torch's functions that would read codes as numbers."""


class Codes(Tensor):
    """The stored values of a weight whose scale is in another tensor.

    Arithmetic and casts raise RuntimeError, because they would ignore the scale. Results of
    `detach`, `clone` and the like are codes too.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # By name, because compiled code reads this too. Not a TypeError: torch's operators
        # swallow it.
        if func.__name__ in _ARITHMETIC or _copies_and_casts(func, args):
            raise RuntimeError(_scale_ignored(func.__name__))
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func.__name__ == "to" and result.dtype != args[0].dtype:
            raise RuntimeError(_scale_ignored(f"to({result.dtype})"))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        is_parameter = isinstance(self, nn.Parameter)
        copied = _as_codes(plain(self).clone(), self.requires_grad, is_parameter)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_codes, (plain(self), self.requires_grad, isinstance(self, nn.Parameter))


def _copies_and_casts(func: Any, args: Sequence[Any]) -> bool:
    """Tells whether `func` copies numbers to codes, or codes to numbers of another dtype."""
    if func.__name__ != "copy_" or len(args) < 2:
        return False
    target, source = args[:2]
    return bool(target.dtype != source.dtype)


def codes(data: Tensor, requires_grad: bool) -> nn.Parameter:
    """Returns a Parameter of codes whose scale is in another tensor."""
    return nn.Parameter(data.as_subclass(Codes), requires_grad)


def plain(tensor: Tensor) -> Tensor:
    """Detaches `tensor` and returns an ordinary Tensor: codes as their layer reads them."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def is_arithmetic(name: str) -> bool:
    """Tells whether torch's function `name` reads codes as numbers."""
    return name in _ARITHMETIC


def _as_codes(data: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    if is_parameter:
        return codes(data, requires_grad)
    return data.as_subclass(Codes)


def _scale_ignored(operation: str) -> str:
    return (
        f"{operation}: this weight is quantized, its numbers mean nothing without their scale;"
        f" {INSTEAD}"
    )


_ALIASES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.view.default,
}
"""Operations of FSDP2 and autograd. If shape and strides stay, the result is a GatheredWeight."""


class GatheredWeight(Tensor):
    """A weight [out, in] after an all-gather by FSDP2 in FP8 or in a codec (fsdp_weights.py).

    Other code reads its values, in the dtype of its gradient: compiled code casts a gradient to the
    dtype of its tensor (torch 2.13).
    """

    _data: Tensor
    _scale_inv: Tensor
    _dgrad: Tensor | None
    _dgrad_scale_inv: Tensor | None
    _global_scale_inv: Tensor | None

    @staticmethod
    def __new__(
        cls, stored: FP8Weight, dtype: torch.dtype, codec: Codec | None = None
    ) -> GatheredWeight:
        data = stored.data
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            dtype=dtype,
            layout=data.layout,
            device=data.device,
        )

    def __init__(self, stored: FP8Weight, dtype: torch.dtype, codec: Codec | None = None) -> None:
        self.codec = codec
        self.set_tensors(stored)

    def set_tensors(self, stored: FP8Weight) -> None:
        """Replaces the tensors. FSDP2 reuses the object in its next all-gather."""
        self._data = stored.data
        self._scale_inv = stored.scale_inv
        self._dgrad = stored.dgrad
        self._dgrad_scale_inv = stored.dgrad_scale_inv
        self._global_scale_inv = stored.global_scale_inv

    @property
    def tensors(self) -> FP8Weight:
        """The gathered tensors. Under a codec only the first two are used."""
        return FP8Weight(
            self._data, self._scale_inv, self._dgrad, self._dgrad_scale_inv, self._global_scale_inv
        )

    def weight_storage(self, codec: Codec | None) -> WeightStorage:
        """Returns the weight as GEMMs read it; `codec` is the codec of the layer's shards."""
        # The layer passes the codec: Dynamo reads only tensors from a tensor subclass.
        if codec is None:
            return self.tensors
        return CodecWeight(self._data, self._scale_inv, codec)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({self._data}, {self._scale_inv})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, Codec | None]]:
        fields = self.tensors._asdict()
        names = [f"_{name}" for name, tensor in fields.items() if tensor is not None]
        return names, (self.dtype, self.codec)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], metadata: Any, size: Any, stride: Any
    ) -> GatheredWeight:
        fields = {name.removeprefix("_"): tensor for name, tensor in inner.items()}
        return GatheredWeight(FP8Weight(**fields), *metadata)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES and _keeps_layout(*args):
            return cls(args[0].tensors, args[0].dtype, args[0].codec)

        def decode_weight(weight: GatheredWeight) -> Tensor:
            return weight.weight_storage(weight.codec).values(weight.dtype)

        args, kwargs = tree_map_only(GatheredWeight, decode_weight, (args, kwargs or {}))
        return func(*args, **kwargs)


def _keeps_layout(
    weight: Tensor,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    *_: Any,
) -> bool:
    """Tells whether the arguments of an operation in _ALIASES keep the shape and the strides."""
    keeps_shape = shape is None or list(shape) == list(weight.shape)
    keeps_strides = strides is None or list(strides) == list(weight.stride())
    return keeps_shape and keeps_strides
