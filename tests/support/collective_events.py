"""Collectives of a step in the order in which they start."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
}


class Events(TorchDispatchMode):
    """Collectives as they start, by kind and bytes handed over, and what `said` adds."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            handed = args[1] if name.endswith("_base_") else args[0]  # the output goes first
            self.found.append(
                (
                    KINDS.get(name, name),
                    sum(t.nbytes for t in tree_leaves(handed) if isinstance(t, Tensor)),
                )
            )
        return func(*args, **(kwargs or {}))

    def of(self, *kinds: str) -> list[tuple[str, int]]:
        return [event for event in self.found if event[0] in kinds]
