"""FP8 all-gather of weights: a float32 shard that FSDP2 gathers quantized, and the weight that products read once it is gathered.

    after a step    the amax of each weight, a MAX over its shards, in one collective for all layers; scales as of a float8 weight
    pre-gather      this rank's rows are quantized, once a step, and sent as bytes, padded where ranks have uneven shards
    post-gather     the bytes are the weight [out, in], with its scale

The numbers are those of a layer that holds its weight in float8 (fp8_weights.py): one scale for the whole weight, or for each
square of 128 rows and columns, none of which is split. Scalings that need another matrix for dgrad are not gathered so.

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` (torch/distributed/fsdp/_fully_shard/_fsdp_param.py); torchao's
WeightWithDynamicFloat8CastTensor is the like of it for its own layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fp8cfg.numerics.fp8_weights import Stored, dequantize, store
from fp8cfg.numerics.scaling import WEIGHT, Scaling, amax_of, scale_now

_aten = torch.ops.aten
_KEEP = {_aten.detach.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.slice.Tensor, _aten.copy_.default,
         _aten.view.default, _aten.as_strided.default, _aten._to_copy.default, _aten._pin_memory.default, _aten.split.Tensor,
         _aten.clone.default}  # fmt: skip
"""What FSDP2 does to a shard as it pads, moves and copies it; the result is a shard as well."""
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view.default}


def gathers(scaling: Scaling, rows: int, ranks: int) -> bool:
    """Whether a weight of that many rows, split over `ranks`, is gathered in FP8: not where dgrad needs another matrix, nor where
    a shard would have parts of squares."""
    tile = scaling.tile(WEIGHT, 1)
    return not scaling.directional(WEIGHT) and not scaling.layout.two_levels and (tile is None or rows % (tile[0] * ranks) == 0)


class WeightShard(Tensor):
    """A float32 shard [rows, in] of a layer's weight, which is its own master."""

    _tensor: Tensor

    @staticmethod
    def __new__(cls, tensor: Tensor) -> WeightShard:
        return torch.Tensor._make_wrapper_subclass(
            cls, tensor.size(), strides=tensor.stride(), storage_offset=tensor.storage_offset(), dtype=tensor.dtype,
            layout=tensor.layout, device=tensor.device, requires_grad=tensor.requires_grad)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightShard({self._tensor})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: None, size: Any, stride: Any) -> WeightShard:
        return WeightShard(inner["_tensor"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made = func(*tree_map_only(WeightShard, lambda t: t._tensor, args),
                    **tree_map_only(WeightShard, lambda t: t._tensor, kwargs or {}))
        if func is _aten.copy_.default:
            return args[0]
        return tree_map_only(Tensor, WeightShard, made) if func in _KEEP else made

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        stored: Stored = module.quantized_shard(self._tensor)
        data, missing = stored.data.view(torch.uint8), -(-outer_size[0] // mesh.size()) - len(self._tensor)
        scales = [stored.scale_inv] if stored.scale_inv.dim() else []
        return (F.pad(data, (0, 0, 0, missing)) if missing else data, *scales), (stored, outer_size)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        stored, shape = metadata
        scale_inv = outputs[1] if len(outputs) > 1 else stored.scale_inv
        if out is not None:
            out._scale_inv = scale_inv
            return None
        return GatheredWeight(outputs[0].view(stored.data.dtype)[: shape[0]], scale_inv, param_dtype), outputs


class GatheredWeight(Tensor):
    """A weight [out, in] that was gathered in float8, with its inverse scale. To other code it is its values in the compute dtype,
    in which its gradient is too."""

    _data: Tensor
    _scale_inv: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> GatheredWeight:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=dtype, layout=data.layout, device=data.device)

    def __init__(self, data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> None:
        self._data, self._scale_inv = data, scale_inv

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({self._data}, {self._scale_inv})"

    @property
    def stored(self) -> Stored:
        """The float8 weight as products read it."""
        return Stored(self._data, self._scale_inv)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["_data", "_scale_inv"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["_data"], inner["_scale_inv"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ALIASES:
            return cls(args[0]._data, args[0]._scale_inv, args[0].dtype)
        wide = tree_map_only(GatheredWeight, lambda t: dequantize(t.stored, t.dtype), (args, kwargs or {}))
        return func(*wide[0], **wide[1])


def quantized(shard: Tensor, scaling: Scaling, scale: Tensor | None) -> Stored:
    """The shard [rows, in] in float8; `scale` is that of the whole weight where it has one."""
    if len(shard):
        return store(shard, scaling, scale)
    inverse = shard.new_zeros(0, 0) if scale is None else scale.reciprocal()
    return Stored(shard.to(scaling.forward.dtype), inverse)


@torch.no_grad()
def refresh_shards(layers: Iterable[Any]) -> None:
    """New scales of all weights of `layers`, FP8Linears, that are gathered in FP8, from their amaxes over all shards: one
    all-reduce for all. Every rank calls it after a step, once `update_scales` has moved delayed scales, and after a load."""
    those = [layer for layer in layers if layer.sharded]
    if not those:
        return
    weights: list[Any] = [layer.parameter for layer in those]
    amaxes = torch.stack([amax_of(weight.to_local()._tensor) for weight in weights])
    mesh = weights[0].device_mesh  # of its axes the last has the shards
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
    if those[0].amax_group:  # tensor parallelism splits all of them
        amaxes = those[0].amax_group.amax(amaxes, WEIGHT)
    for layer, amax in zip(those, amaxes, strict=True):
        state = layer.fp8_scale, layer.fp8_amax_history
        one = layer.scaling.tile(WEIGHT, 1) is None
        layer.shard_scale = scale_now(amax, WEIGHT, layer.scaling, *state, record=True).clone() if one else None
        layer.shard_quantized = None


def shard_parameter(weight: nn.Parameter) -> nn.Parameter:
    """`weight` as a Parameter that FSDP2 gathers in FP8."""
    return nn.Parameter(WeightShard(weight.detach()), requires_grad=weight.requires_grad)
