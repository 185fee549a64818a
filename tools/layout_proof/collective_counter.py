"""Collective counter: the bytes that a rank sends, fake or not, by the axis of the layout that a group spans.

A dispatch mode sees them where torch hands them to a process group, whoever asked for them: models, FSDP2, schedules, optimizers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from fp8cfg.parallel.mesh import coordinates
from fp8cfg.schema.training import Strategy

AXES = {
    "dp_replicate": "replicate",
    "dp_shard": "data",
    "cp": "context",
    "tp": "tensor",
    "pp": "pipeline",
}
HOW = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "send": "send",
    "recv_": "",
    "wait_tensor": "",
    "_wrap_tensor_autograd": "",
    "barrier": "",
}
"""Torch's operators, and what they are called here; nothing of what does not send."""


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up, in `sent`, the bytes sent inside of the mode by axis of the layout of `strategy`."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._strategy, self._names = strategy, dict[str, str]()
        self.sent = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # what a DTensor does with the tensors inside of it is seen
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.partition(".")[0]
            if how := HOW[name]:  # an unknown one is a KeyError
                self._count(name, how, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, how: str, args: Any) -> None:
        group = next(g for a in args if (g := _group(a)) is not None)
        tensors = [
            t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)
        ]
        ranks = group.size()
        if ranks > 1:
            self.sent[self._axis(group)] += _sent(name, how, tensors, args, ranks, group.rank())

    def _axis(self, group: dist.ProcessGroup) -> str:
        """The axes along which the ranks of `group` differ."""
        if group.group_name not in self._names:
            every = dist.get_process_group_ranks(group)
            places = [coordinates(self._strategy, rank, dist.get_world_size()) for rank in every]
            varying = [
                said for axis, said in AXES.items() if len({place[axis] for place in places}) > 1
            ]
            if (
                len(varying) > 1 and "replicate" in varying
            ):  # several groups together are data-parallel ranks
                varying = [
                    *dict.fromkeys("data" if said == "replicate" else said for said in varying)
                ]
            self._names[group.group_name] = " x ".join(varying)
        return self._names[group.group_name]


def _group(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an operator is given: by name, as itself, or boxed."""
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, str) and argument not in ("sum", "max", "avg"):
        return _resolve_process_group(argument)
    try:
        return (
            dist.ProcessGroup.unbox(argument) if type(argument).__name__ == "ScriptObject" else None
        )
    except RuntimeError:  # another object, such as the kind of a reduction
        return None


def _sent(name: str, how: str, tensors: list[Tensor], args: Any, ranks: int, rank: int) -> int:
    """Bytes of one collective that leave this rank, as plan and training count them."""
    sizes = [t.nbytes for t in tensors]
    if how == "all-reduce":
        return sum(2 * (ranks - 1) * n // ranks for n in sizes)
    if how == "send":
        return sum(sizes)
    if how == "all-gather":  # in place: the whole, and the part
        return (ranks - 1) * min(sizes)
    if how == "reduce-scatter":
        return max(sizes) * (ranks - 1) // ranks
    whole, splits = (
        args[1],
        args[4],
    )  # of an all-to-all: output, input, group, output splits, input splits
    return int(whole.nbytes - splits[rank] * whole.element_size())
