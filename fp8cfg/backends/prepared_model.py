"""Prepared model: a model in the precision of the recipe, and what its optimizer and its ranks need to know of its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fp8cfg.numerics import Region


@dataclass
class PreparedModel:
    """A model in the recipe's precision, the float32 masters of its parameters by name, the autocast region of its FP8 layers, and
    the storage columns of its parameters by name. `owner` gives the rank that keeps the state of each parameter, where that is
    sharded by whole tensors, and `shard` is storage.shard, resolved; under `fsdp2` parameters are float32 shards that torch's FSDP2
    gathers, and their own masters. `tensor_parallel` is this rank's place among those that share each matrix, a
    parallel.tensor.TensorRank, None where parameters are whole; `pipeline` that among those that share the layers, a
    parallel.pipeline.PipelineRank, None where this rank has all.
    """

    model: torch.nn.Module
    masters: dict[str, Tensor]
    region: Region
    device: torch.device
    columns: dict[str, dict[str, str]] = field(default_factory=dict)
    owner: dict[str, int] = field(default_factory=dict)
    shard: str = "none"
    fsdp2: bool = False
    tensor_parallel: Any = None
    pipeline: Any = None
    # the process group of ranks that share layers and samples, where fp8.tp_only_amax_red asks for
    # it
    same_samples: Any = None

    @property
    def mesh(self) -> Any:
        """The DeviceMesh of the ranks that share parameters or layers, with the axes shards and tp and, before them, pp; None where
        every rank has the whole model."""
        place = self.pipeline or self.tensor_parallel
        return place.mesh if place is not None else None
