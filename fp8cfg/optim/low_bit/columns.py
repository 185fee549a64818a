"""Storage columns: the codecs of a parameter's weight, master, gradient and moments.

Also their shards under FSDP2 and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor, nn

from fp8cfg.numerics.codecs import FP32, Codec, Rounding, get_codec
from fp8cfg.numerics.formats import Start, StridedStart, element_numbers
from fp8cfg.numerics.fsdp_weights import first_row
from fp8cfg.numerics.stored_state import in_stored_form


class Columns(NamedTuple):
    """Codecs of one parameter, one for each storage column.

    Attributes:
        weight: Codec of the weight.
        master: Codec of the master, or None without one.
        grad: Codec of gradients that are stored outside of `.grad`, or None to keep them there.
        exp_avg: Codec of the first moment.
        exp_avg_sq: Codec of the second moment.
    """

    weight: Codec = Codec(FP32)
    master: Codec | None = None
    grad: Codec | None = None
    exp_avg: Codec = Codec(FP32)
    exp_avg_sq: Codec = Codec(FP32)

    @property
    def source(self) -> Codec:
        """Codec of the tensor that a step updates: the master, or the weight without one."""
        return self.master or self.weight

    @property
    def read(self) -> Codec:
        """Codec of the gradients that a step reads."""
        return self.grad or Codec(FP32)

    @property
    def written(self) -> tuple[Codec | None, ...]:
        """Codecs that a step writes, in the order of `Slot`.

        The weight is None if it is the source.
        """
        weight = None
        if self.master is not None:
            weight = self.weight
        return (self.source, weight, self.exp_avg, self.exp_avg_sq)

    @property
    def stochastic(self) -> bool:
        """Whether a step needs random numbers for stochastic rounding."""
        return any(codec is not None and codec.rounding == "stochastic" for codec in self.written)

    @property
    def needs_amax(self) -> tuple[bool, ...]:
        """Whether per-tensor scales need the amax of the weight and of each moment.

        Weight and master share an amax.
        """
        source, weight, *moments = (
            codec is not None and codec.per_tensor for codec in self.written
        )
        return (source or weight, *moments)

    @property
    def per_tensor(self) -> bool:
        """Whether a step computes a scale from the amax of a whole tensor."""
        return any(codec is not None and codec.per_tensor for codec in self.written)

    @property
    def blocks_written(self) -> bool:
        """Whether a step computes a scale from the amax of a block."""
        return any(codec is not None and codec.block for codec in self.written)

    @property
    def block(self) -> int:
        """Number of elements that must divide every piece except the last."""
        return max(codec.block or 1 for codec in (*self.written, self.read) if codec is not None)


def named_columns(
    weight: str = "fp32",
    master_weight: str = "none",
    weight_grad: str = "fp32",
    exp_avg: str = "fp32",
    exp_avg_sq: str = "fp32",
    rounding: Rounding = "nearest",
) -> Columns:
    """Creates columns from the names of storage keys.

    Args:
        weight: Codec of the weight.
        master_weight: Codec of the master, or "none".
        weight_grad: Codec of gradients. They stay in `.grad` if it has no scale.
        exp_avg: Codec of the first moment.
        exp_avg_sq: Codec of the second moment.
        rounding: Rounding of weights and masters.

    Raises:
        ValueError: A name is unknown.
    """

    def updated(name: str) -> Codec:
        if name == "fp32":  # is not rounded, so it needs no random numbers
            return get_codec(name, "nearest")
        return get_codec(name, rounding)

    master = None
    if master_weight != "none":
        master = updated(master_weight)
    grad = get_codec(weight_grad)
    return Columns(
        updated(weight),
        master,
        None if grad.scaling == "none" else grad,
        get_codec(exp_avg),
        get_codec(exp_avg_sq, second_moment=True),
    )


FLOAT32 = Columns()
"""All columns in float32."""


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's plain tensor of `tensor`, which may be a DTensor."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    inner: Tensor = getattr(tensor, "_tensor", tensor)  # FP8-gathered shards wrap a tensor
    return inner


def first_element(parameter: Tensor, start: StridedStart | None) -> Start:
    """Returns the flat position of this rank's first element in the full tensor.

    Args:
        parameter: The parameter, possibly sharded by FSDP2.
        start: Position in the tensor that tensor parallelism splits, or None.
    """
    first = 0
    if hasattr(parameter, "placements"):
        _, ranks, rank = _shard_position(parameter)
        rows = parameter.shape[0]
        first = first_row(rows, ranks, rank) * (parameter.numel() // max(1, rows))
    if start is None:
        return first
    return start._replace(start=first)


def has_whole_blocks(shape: Size | tuple[int, ...], ranks: int, block: int) -> bool:
    """Returns whether each of `ranks` shards has whole blocks and equal size. True for one rank.

    Args:
        shape: Shape of the full tensor. FSDP2 splits dimension 0.
        ranks: Number of shards.
        block: Flat elements that share a scale.
    """
    if ranks == 1:
        return True
    rows = shape[0]
    row_size = prod(shape[1:])
    return rows % ranks == 0 and (rows // ranks * row_size) % block == 0


def columns_of_shard(columns: Columns, parameter: Tensor, start: StridedStart | None) -> Columns:
    """Returns the columns for the state of this rank's shard.

    Blockwise moments and gradients become float32 if a cut would split a block. A shard of FSDP2 is
    its own float32 master.

    Args:
        columns: Columns of the full tensor.
        parameter: The parameter.
        start: Position in the tensor that tensor parallelism splits, or None.
    """
    is_fsdp_shard = hasattr(parameter, "placements")
    if is_fsdp_shard:
        columns = columns._replace(weight=FLOAT32.weight, master=None)

    def splits_blocks(codec: Codec) -> bool:
        """Returns whether this layout would split a block of `codec`."""
        if not codec.block:
            return False
        if start and start.run % codec.block:
            return True
        if not is_fsdp_shard:
            return False
        _, ranks, _ = _shard_position(parameter)
        return not has_whole_blocks(parameter.shape, ranks, codec.block)

    if columns.grad is not None and splits_blocks(columns.grad):
        columns = columns._replace(grad=None)
    if splits_blocks(columns.exp_avg):
        columns = columns._replace(exp_avg=FLOAT32.exp_avg)
    if splits_blocks(columns.exp_avg_sq):
        columns = columns._replace(exp_avg_sq=FLOAT32.exp_avg_sq)
    return columns


def to_sharded(tensor: Tensor, parameter: Tensor, is_data: bool) -> Tensor:
    """Returns this rank's state tensor as a DTensor if FSDP2 shards its parameter.

    Args:
        tensor: This rank's tensor.
        parameter: The parameter.
        is_data: Whether it has the shape of the parameter. Otherwise it has the scales of its
            blocks.
    """
    if not hasattr(parameter, "placements") or not tensor.dim():
        return tensor
    from torch.distributed.tensor import DTensor

    mesh, ranks, _ = _shard_position(parameter)
    shape = parameter.shape
    if not is_data:
        shape = torch.Size((tensor.shape[0] * ranks, *tensor.shape[1:]))
    # from_local needs the stride of the full tensor. A meta tensor allocates nothing.
    full = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return DTensor.from_local(
        tensor, mesh, parameter.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def decode_shard(codec: Codec, data: Tensor, scales: Tensor, first: Start) -> Tensor:
    """Decodes a shard of a blockwise tensor to float32.

    Args:
        codec: The codec.
        data: Elements of the shard.
        scales: Scales of all blocks of the full tensor.
        first: Position of the first element in the full tensor.
    """
    # The shard may start inside a block, so each element looks up its own scale.
    positions = element_numbers(first, data.numel(), data.device, torch.int64)
    element_scales = scales[positions // codec.block]
    return replace(codec, block=1).decode((data.reshape(-1), element_scales)).view(data.shape)


def _shard_position(parameter: Any) -> tuple[Any, int, int]:
    """Returns the mesh, the number of shards and this rank's index of a DTensor."""
    mesh = parameter.device_mesh
    # With replicated groups the mesh has two axes. The last one shards.
    axis = mesh.ndim - 1
    return mesh, mesh.size(axis), mesh.get_local_rank(axis)


MASTER = ".master"
"""Suffix of the names of masters in plain optimizer state."""


def to_plain_state(
    tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str], masters: Container[str]
) -> dict[str, Tensor]:
    """Returns the optimizer state as plain tensors, no copies.

    Args:
        tensors: State by name.
        names: Names of the parameters.
        masters: Names of parameters to include as masters.
    """
    plain = {name: local(tensor) for name, tensor in tensors.items()}
    for parameter, name in names.items():
        if name in masters:
            plain[name + MASTER] = local(parameter.detach())
    return plain


def from_plain_state(
    tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]
) -> tuple[dict[str, Tensor], dict[nn.Parameter, Tensor]]:
    """Inverts `to_plain_state`. Returns the state, and the values of parameters."""
    parameters = {name: parameter for parameter, name in names.items()}
    state: dict[str, Tensor] = {}
    masters: dict[nn.Parameter, Tensor] = {}
    for key, tensor in tensors.items():
        name, _, column = key.rpartition(".")
        parameter = parameters.get(name)
        if parameter is None:  # the scales of a moment, which are not sharded
            state[key] = tensor
        elif f".{column}" == MASTER:
            masters[parameter] = tensor
        else:
            state[key] = to_sharded(tensor.to(parameter.device), parameter, is_data=False)
    return state, masters


@torch.no_grad()
def write_parameters(values: Mapping[nn.Parameter, Tensor]) -> None:
    """Writes values into their parameters."""
    for parameter, value in values.items():
        local(parameter.detach()).copy_(value)


def state_dict_of_one(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """State-dict hook: returns plain tensors, except in the stored form.

    In the stored form checkpoints need the DTensors, because each rank writes its part.
    """
    if in_stored_form():
        return
    for name, tensor in state_dict.items():
        if isinstance(tensor, Tensor):
            state_dict[name] = local(tensor)


def load_into_one(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any
) -> None:
    """Load hook: converts plain tensors to shards."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor = state_dict.get(f"{prefix}{name}")
        if tensor is None or not hasattr(parameter, "placements"):
            continue
        if not hasattr(tensor, "placements"):
            plain = tensor.to(parameter.device, torch.float32)
            state_dict[f"{prefix}{name}"] = to_sharded(plain, parameter, is_data=False)
