"""Storage columns: the codecs of a parameter's weight, master, gradient and moments."""

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
    """The codecs of one parameter, one for each column of the low-precision chart. `grad` is the codec of gradients stored apart
    from `.grad`; None leaves them where autograd puts them.
    """

    weight: Codec = Codec(FP32)
    master: Codec | None = None
    grad: Codec | None = None
    exp_avg: Codec = Codec(FP32)
    exp_avg_sq: Codec = Codec(FP32)

    @property
    def source(self) -> Codec:
        """The codec of the tensor that a step updates: the master, or the weight where there is none."""
        return self.master or self.weight

    @property
    def read(self) -> Codec:
        """The codec in which gradients are stored."""
        return self.grad or Codec(FP32)

    @property
    def written(self) -> tuple[Codec | None, ...]:
        """The codecs that a step writes, in the order of `Slot`; None for the weight where it is the source."""
        return (
            self.source,
            None if self.master is None else self.weight,
            self.exp_avg,
            self.exp_avg_sq,
        )

    @property
    def stochastic(self) -> bool:
        """Whether a step needs random numbers."""
        return any(codec is not None and codec.rounding == "stochastic" for codec in self.written)

    @property
    def amaxes(self) -> tuple[bool, ...]:
        """Whether scales of whole tensors need the amax of the weight, which its master shares, and of each moment."""
        source, weight, *moments = (
            codec is not None and codec.per_tensor for codec in self.written
        )
        return (source or weight, *moments)

    @property
    def per_tensor(self) -> bool:
        """Whether any scale is computed from the amax of a whole tensor."""
        return any(codec is not None and codec.per_tensor for codec in self.written)

    @property
    def blocks_written(self) -> bool:
        """Whether any scale that a step writes is computed from the amax of a block."""
        return any(codec is not None and codec.block for codec in self.written)

    @property
    def block(self) -> int:
        """The number of elements that a piece, unless it is the last, must be a multiple of."""
        return max(codec.block or 1 for codec in (*self.written, self.read) if codec is not None)


def named_columns(
    weight: str = "fp32",
    master_weight: str = "none",
    weight_grad: str = "fp32",
    exp_avg: str = "fp32",
    exp_avg_sq: str = "fp32",
    rounding: Rounding = "nearest",
) -> Columns:
    """The columns by the names that the storage keys take. `rounding` is that of weights and masters. Gradients without a scale
    stay where autograd puts them. Raises ValueError for an unknown name."""

    def updated(name: str) -> Codec:
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
"""Everything in float32."""


def local(t: Tensor) -> Tensor:
    """The plain tensor in the memory of this rank that `t` is, or is a part of."""
    here: Any = t.to_local() if hasattr(t, "to_local") else t
    inner: Tensor = getattr(here, "_tensor", here)  # of a shard that is gathered in FP8
    return inner


def first_element(p: Tensor, part: StridedStart | None) -> Start:
    """The place, flat, of the first element of this rank's shard in the whole of `p`, which is a `part` of a tensor where tensor
    parallelism splits that."""
    first = 0
    if hasattr(p, "placements"):
        _, ranks, rank = _split(p)
        first = first_row(p.shape[0], ranks, rank) * (p.numel() // max(1, p.shape[0]))
    return first if part is None else part._replace(start=first)


def fits(shape: Size | tuple[int, ...], ranks: int, block: int) -> bool:
    """Whether each of `ranks` shards of a tensor of `shape` is whole blocks of so many flat elements, and as many as the others; or
    the whole tensor."""
    if ranks == 1:
        return True
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0] % ranks == 0 and (shape[0] // ranks * columns) % block == 0


def columns_of_shard(columns: Columns, p: Tensor, part: StridedStart | None) -> Columns:
    """`columns` for the state of this rank's shard of `p`, a `part` of a tensor where tensor parallelism splits that: moments and
    gradients in blocks are float32 where cuts would go through these. A shard of FSDP2 is its own master.
    """
    if by_rows := hasattr(p, "placements"):
        columns = columns._replace(weight=FLOAT32.weight, master=None)

    def cut(block: int) -> bool:
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
    """What this rank has of a tensor of the state of `p`, as a part of the whole: its `data`, or the scales of its blocks."""
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
    """The float32 values of `data`, elements from `first` on of a tensor whose blocks have `scales`."""
    of_each = scales[element_numbers(first, data.numel(), data.device, torch.int64) // codec.block]
    return replace(codec, block=1).decode((data.reshape(-1), of_each)).view(data.shape)


def _split(p: Any) -> tuple[Any, int, int]:
    """The mesh of a split tensor, the ranks that have its shards, and the number of this one."""
    mesh = p.device_mesh
    axis = mesh.ndim - 1
    return mesh, mesh.size(axis), mesh.get_local_rank(axis)


MASTER = ".master"


def plain(
    tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str], masters: Container[str]
) -> dict[str, Tensor]:
    """The state `tensors` of the parameters of these `names` as plain tensors, no copies; with those of `masters` themselves."""
    found = {name: local(t) for name, t in tensors.items()}
    return found | {
        name + MASTER: local(p.detach()) for p, name in names.items() if name in masters
    }


def shards(
    tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]
) -> tuple[dict[str, Tensor], dict[nn.Parameter, Tensor]]:
    """The inverse of `plain`: the state, and the values of parameters."""
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
    """Write these values into their parameters."""
    for p, master in masters.items():
        local(p.detach()).copy_(master)


def state_dict_of_one(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """State dict hook: plain tensors, but in the stored form, of which checkpoints write parts."""
    if not in_stored_form():
        state_dict.update(
            {name: local(t) for name, t in state_dict.items() if isinstance(t, Tensor)}
        )


def load_into_one(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load hook: the shards that plain tensors are."""
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
