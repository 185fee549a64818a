"""Storage columns: the codecs of a parameter's weight, master, gradient and moments.

Also their shards under FSDP2 and tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
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
        return (
            self.source,
            None if self.master is None else self.weight,
            self.exp_avg,
            self.exp_avg_sq,
        )

    @property
    def stochastic(self) -> bool:
        """Whether a step needs random numbers for stochastic rounding."""
        return any(codec is not None and codec.rounding == "stochastic" for codec in self.written)

    @property
    def amaxes(self) -> tuple[bool, ...]:
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
        # Float32 is not rounded, so it needs no random numbers.
        return get_codec(name, "nearest" if name == "fp32" else rounding)

    grad = get_codec(weight_grad)
    return Columns(
        updated(weight),
        None if master_weight == "none" else updated(master_weight),
        None if grad.scaling == "none" else grad,
        get_codec(exp_avg),
        get_codec(exp_avg_sq, second_moment=True),
    )


FLOAT32 = Columns()
"""All columns in float32."""


def local(t: Tensor) -> Tensor:
    """Returns this rank's plain tensor of `t`, which may be a DTensor."""
    here: Any = t.to_local() if hasattr(t, "to_local") else t
    inner: Tensor = getattr(here, "_tensor", here)  # FP8-gathered shards wrap a tensor
    return inner


def first_element(p: Tensor, part: StridedStart | None) -> Start:
    """Returns the flat position of this rank's first element in the full tensor.

    Args:
        p: The parameter, possibly sharded by FSDP2.
        part: Position in the tensor that tensor parallelism splits, or None.
    """
    first = 0
    if hasattr(p, "placements"):
        _, ranks, rank = _split(p)
        first = first_row(p.shape[0], ranks, rank) * (p.numel() // max(1, p.shape[0]))
    return first if part is None else part._replace(start=first)


def fits(shape: Size | tuple[int, ...], ranks: int, block: int) -> bool:
    """Whether each of `ranks` shards has whole blocks and equal size. Always true on one rank.

    Args:
        shape: Shape of the full tensor. FSDP2 splits dimension 0.
        ranks: Number of shards.
        block: Flat elements that share a scale.
    """
    if ranks == 1:
        return True
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0] % ranks == 0 and (shape[0] // ranks * columns) % block == 0


def columns_of_shard(columns: Columns, p: Tensor, part: StridedStart | None) -> Columns:
    """Returns the columns for the state of this rank's shard.

    Blockwise moments and gradients become float32 if a cut would split a block. A shard of FSDP2 is
    its own float32 master.

    Args:
        columns: Columns of the full tensor.
        p: The parameter.
        part: Position in the tensor that tensor parallelism splits, or None.
    """
    if by_rows := hasattr(p, "placements"):
        columns = columns._replace(weight=FLOAT32.weight, master=None)

    def cut(block: int) -> bool:
        """Whether a shard would split a block of `block` elements."""
        return bool(part and part.run % block) or (
            by_rows and not fits(p.shape, _split(p)[1], block)
        )

    if columns.grad is not None and columns.grad.block and cut(columns.grad.block):
        columns = columns._replace(grad=None)
    kept = {
        m: FLOAT32.exp_avg
        for m in ("exp_avg", "exp_avg_sq")
        if (block := getattr(columns, m).block) and cut(block)
    }
    return columns._replace(**kept)


def of_shards(part: Tensor, p: Tensor, data: bool) -> Tensor:
    """Returns this rank's state tensor as a DTensor if FSDP2 shards its parameter.

    Args:
        part: This rank's tensor.
        p: The parameter.
        data: Whether it has the shape of the parameter. Otherwise it has the scales of its blocks.
    """
    if not hasattr(p, "placements") or not part.dim():
        return part
    import torch
    from torch.distributed.tensor import DTensor

    mesh, ranks, _ = _split(p)
    whole = torch.empty(
        p.shape if data else (part.shape[0] * ranks, *part.shape[1:]),
        dtype=part.dtype,
        device="meta",
    )
    return DTensor.from_local(
        part, mesh, p.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def decoded_part(codec: Codec, data: Tensor, scales: Tensor, first: Start) -> Tensor:
    """Decodes a part of a blockwise tensor to float32.

    Args:
        codec: The codec.
        data: Elements of the part.
        scales: Scales of all blocks of the full tensor.
        first: Position of the first element in the full tensor.
    """
    # The part may start inside a block, so each element looks up its own scale.
    of_each = scales[element_numbers(first, data.numel(), data.device, torch.int64) // codec.block]
    return replace(codec, block=1).decode((data.reshape(-1), of_each)).view(data.shape)


def _split(p: Any) -> tuple[Any, int, int]:
    """Returns the mesh, the number of shards and this rank's index of a DTensor."""
    mesh = p.device_mesh
    # With replicated groups the mesh has two axes. The last one shards.
    axis = mesh.ndim - 1
    return mesh, mesh.size(axis), mesh.get_local_rank(axis)


MASTER = ".master"


def plain(
    tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str], masters: Container[str]
) -> dict[str, Tensor]:
    """Returns the optimizer state as plain tensors, no copies.

    Args:
        tensors: State by name.
        names: Names of the parameters.
        masters: Names of parameters to include as masters.
    """
    found = {name: local(t) for name, t in tensors.items()}
    return found | {
        name + MASTER: local(p.detach()) for p, name in names.items() if name in masters
    }


def shards(
    tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]
) -> tuple[dict[str, Tensor], dict[nn.Parameter, Tensor]]:
    """Inverts `plain`. Returns the state, and the values of parameters."""
    params = {name: p for p, name in names.items()}
    masters = {
        params[name]: t
        for key, t in tensors.items()
        if (name := key.removesuffix(MASTER)) in params and name != key
    }
    state = {key: t for key, t in tensors.items() if key.removesuffix(MASTER) not in params}
    owners = {key: params.get(key.rpartition(".")[0]) for key in state}
    return {
        key: t if (p := owners[key]) is None else of_shards(t.to(p.device), p, data=False)
        for key, t in state.items()
    }, masters


@torch.no_grad()
def write(masters: Mapping[nn.Parameter, Tensor]) -> None:
    """Writes values into their parameters."""
    for p, master in masters.items():
        local(p.detach()).copy_(master)


def state_dict_of_one(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """State-dict hook: returns plain tensors, except in the stored form.

    In the stored form checkpoints need the DTensors, because each rank writes its part.
    """
    if not in_stored_form():
        state_dict.update(
            {name: local(t) for name, t in state_dict.items() if isinstance(t, Tensor)}
        )


def load_into_one(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load hook: converts plain tensors to shards."""
    params = {
        f"{prefix}{name}": p
        for name, p in module.named_parameters(remove_duplicate=False)
        if hasattr(p, "placements")
    }
    state_dict.update(
        {
            name: of_shards(t.to(params[name].device, torch.float32), params[name], data=False)
            for name, t in state_dict.items()
            if name in params and not hasattr(t, "placements")
        }
    )
