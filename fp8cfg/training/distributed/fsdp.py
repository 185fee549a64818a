"""FSDP2 sharding: weights, gradients and moments split over data-parallel ranks, each of which keeps a part of every tensor.

    forward     a layer's weights are gathered before it runs, in the codec of storage.gather, and let go of after it
    backward    they are gathered again; gradients are summed into the parts, in storage.comm, after each microbatch
    step        each rank steps its float32 parts, which are their own masters

Embedding, last norm and output layer are one group, gathered once a pass. Microbatches add up in float32 in the parts, so that
no rank ever has the gradients of the whole model; the price is a sum over the ranks for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.config.backend_capabilities import capabilities
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.precision import Precision
from fp8cfg.config.storage import gathered, resolved
from fp8cfg.parallel.mesh import fsdp_mesh
from fp8cfg.training.distributed.collectives import Message
from fp8cfg.training.distributed.world import SENT, World

if TYPE_CHECKING:
    from fp8cfg.models.transformer import Transformer
    from fp8cfg.parallel.tensor import TensorRank


COPY = ("under storage.shard=fsdp a rank has parts of it; for an average (EMA) keep {name: p.detach().clone() for name, p in "
        "job.model.named_parameters()}, and for whole weights save a checkpoint")
"""Why a model is not copied, and what to do."""


class _AllGather(DefaultAllGather):
    """FSDP2's own, counted as sent over the ranks of `world`."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> Any:
        SENT.count(Message("gather", input_tensor, "weights"), self.world.rank, self.world.size)
        return super().__call__(output_tensor, input_tensor, *rest, **options)


class _ReduceScatter(DefaultReduceScatter):
    """FSDP2's own, counted: on a ring a rank sends all parts but one; and the all-reduce over other `groups` that follows it."""

    def __init__(self, world: World, groups: Sequence[World] = ()) -> None:
        super().__init__()
        self.world, self.groups = world, groups

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> Any:
        message = Message("exchange", input_tensor, "gradients", (output_tensor.nbytes,) * self.world.size)
        SENT.count(message, self.world.rank, self.world.size)
        for group in self.groups:
            SENT.count(Message("sum", output_tensor, "gradients"), group.rank, group.size)
        return super().__call__(output_tensor, input_tensor, *rest, **options)


def refuse_uneven(plan: Sequence[PlannedLinear], precision: Precision, backend: str, ranks: int) -> None:
    """Raise ConfigError where torchao's FP8 all-gather would get shards of different sizes over `ranks`, which nothing pads."""
    uneven = [p for p in plan if p.fp8 and p.out_features % ranks]
    if uneven and capabilities(backend).fp8_gather == "cast" and gathered(precision, backend) == "fp8":
        raise ConfigError(f"storage.gather=fp8: {uneven[0].name} has out_features={uneven[0].out_features}, which {ranks} ranks do "
                          f"not divide; write storage.gather={precision.compute}, or start another number of ranks")


def shard(model: Transformer, precision: Precision, device: str) -> None:
    """Split `model`, in place, over all ranks, which compute on `device`: each layer by itself, then the rest; with tensor
    parallelism over those that have the same part of it, in groups over those of one, which sum gradients with the others. One
    rank alone gets a process group of its own, so that it computes what several do."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    here: TensorRank | None = model.tensor_parallel
    mesh = fsdp_mesh(device, model.groups, here.size if here else 1)
    worlds = [World(mesh.get_local_rank(axis), mesh.size(axis)) for axis in range(mesh.ndim)]
    # Activations have the compute dtype already, and rotary tables are to stay in float32.
    policy = MixedPrecisionPolicy(DTYPES[precision.compute], DTYPES[resolved(precision)["comm"]], cast_forward_inputs=False)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # shares of the loss are weighed where it is (Job.backward)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_AllGather(worlds[-1]))
        module.set_custom_reduce_scatter(_ReduceScatter(worlds[-1], worlds[:-1]))
        type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]  # in the place of torch's bare AssertionError


def _refuse_copy(module: nn.Module, memo: dict[int, Any]) -> NoReturn:
    raise TypeError(f"the model cannot be copied: {COPY}")


def let_go(model: nn.Module) -> None:
    """Free weights that a forward pass gathered and no backward pass will read, as after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered_weights(model: nn.Module) -> list[Tensor]:
    """The tensors that weights are gathered in: one for each, in every pass."""
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            found += [p for p in module.parameters() if not isinstance(p, DTensor)]  # of the root layers have theirs split
            module.reshard()
    return found


def local(t: Tensor) -> Tensor:
    """This rank's part of a tensor, or the tensor itself where it is not split."""
    return _plain(t.to_local()) if isinstance(t, DTensor) else t


def _plain(t: Tensor) -> Tensor:
    """The tensor in what torchao wraps weights in that are gathered in FP8."""
    inner: Tensor = getattr(t, "_tensor", t)
    return inner
