"""FSDP2 sharding: float32 weights, their own masters, and moments split over data-parallel ranks, each of which keeps a shard of
every tensor and steps that.

    in fit      weights are gathered                                            gradients are summed into the shards
    zero1       as the first microbatch of a step goes forward, till its end    as the last one goes back
    zero2       the same                                                        as each goes back
    fsdp        before a layer runs, and again before it goes back              as each goes back

In a loop of one's own zero1 does as zero2: nothing says there which microbatch is the last. Groups of ranks that have all state
each (HSDP) sum their shards' gradients in the last microbatch; in each in such a loop, and where their sums are no float32.

Gathered are weights as a rank alone stores them, under fsdp in the codec of storage.gather. Gradients are summed in storage.comm,
a layer at a time while those before it still go back; embedding, last norm and output layer are one group, the last. What is not
summed in each microbatch is added up in storage.weight_grad first, which takes the gradients of the whole model; sums are rounded
to that too, under fsdp to storage.comm.

Beside adapters fsdp splits frozen weights too; zero1 and zero2 leave them whole on each rank, and split the adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, partialmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.config.backend_capabilities import capabilities
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.fsdp_sharding import ZERO, gathered_plain
from fp8cfg.config.precision import Precision
from fp8cfg.config.storage import gathered, resolved
from fp8cfg.numerics.stored_form import in_stored_form
from fp8cfg.parallel.mesh import fsdp_mesh
from fp8cfg.report.memory.shards import by_columns
from fp8cfg.training.distributed.traffic import on_ring
from fp8cfg.training.distributed.world import SENT, World, current

if TYPE_CHECKING:
    from fp8cfg.models.transformer import Transformer
    from fp8cfg.parallel.tensor import TensorRank


COPY = ("under storage.shard={} a rank has parts of it; for an average (EMA) keep {{name: p.detach().clone() for name, p in "
        "job.model.named_parameters()}}, and for whole weights save a checkpoint")
"""Why a model is not copied, and what to do."""
_ADDING_FLOAT32: WeakSet[FSDPModule] = WeakSet()
"""The modules whose parts of a group are added up in float32."""


class _AllGather(DefaultAllGather):
    """FSDP2's own, counted as sent over the ranks of `world`."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> Any:
        SENT.add("weights", (self.world.size - 1) * input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, *rest, **options)


class _ReduceScatter(DefaultReduceScatter):
    """FSDP2's own, in `dtype`, with the sum in that of gradients, counted: on a ring a rank sends all parts but one. FSDP2 would
    add up microbatches in the dtype that it sends (torch 2.13)."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        super().__init__()
        self.world, self.dtype = world, dtype

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> Any:
        sent = input_tensor.to(self.dtype)
        total = output_tensor if sent is input_tensor else torch.empty_like(output_tensor, dtype=self.dtype)
        SENT.add("gradients", (self.world.size - 1) * total.nbytes)
        work = super().__call__(total, sent, *rest, **options)
        if total is not output_tensor:
            output_tensor.copy_(total)
        return work


def _count_sum(world: World, part: Tensor) -> None:
    """Count the all-reduce of a `part` of gradients over groups that has just been."""
    SENT.add("gradients", on_ring(part, world.size))


def refuse_uneven(plan: Sequence[PlannedLinear], precision: Precision, backend: str, ranks: int) -> None:
    """Raise ConfigError where torchao's FP8 all-gather would get shards of different sizes over `ranks`, which nothing pads."""
    uneven = [p for p in plan if p.fp8 and p.out_features % ranks]
    if uneven and capabilities(backend).fp8_gather == "cast" and gathered(precision, backend) == "fp8":
        raise ConfigError(f"storage.gather=fp8: {uneven[0].name} has out_features={uneven[0].out_features}, which {ranks} ranks do "
                          f"not divide; write storage.gather={precision.compute}, or start another number of ranks")


def shard(model: Transformer, precision: Precision, device: str, gradient: torch.dtype) -> None:
    """Split `model`, in place, over all ranks, which compute on `device`: each layer by itself, then the rest; under zero1 and
    zero2 what is trained of it. The gradients of gathered weights are in `gradient`. With tensor parallelism over those ranks that
    have the same part of it, in groups over those of one, which sum gradients with the others. One rank alone gets a process group
    of its own, to compute what several do."""
    if not dist.is_initialized():
        current()  # which raises where torchrun has started several
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    here: TensorRank | None = model.tensor_parallel
    mesh = fsdp_mesh(device, model.stages, model.groups, here.size if here else 1)
    worlds = [World(mesh.get_local_rank(axis), mesh.size(axis)) for axis in range(mesh.ndim)]
    # Activations have the compute dtype already, and rotary tables are to stay in float32.
    zero, comm = precision.storage.shard in ZERO, DTYPES[resolved(precision)["comm"]]
    kept = gradient if zero else comm
    policy = MixedPrecisionPolicy(DTYPES[gathered_plain(precision)], kept, cast_forward_inputs=False)
    whole = {p for p in model.parameters() if zero and not p.requires_grad}
    by_column = {p for name, p in model.named_parameters() if by_columns(precision, name, p.shape, worlds[-1].size)}
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False if zero else None, ignored_params=whole,
                    shard_placement_fn=lambda p: Shard(int(p in by_column)))
        if gradient != policy.param_dtype:
            module.register_forward_pre_hook(partial(_widen_gradients, gradient))
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # shares of the loss are weighed where it is (Job.backward)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_AllGather(worlds[-1]))
        module.set_custom_reduce_scatter(_ReduceScatter(worlds[-1], comm))
        if kept == torch.float32 and precision.storage.accumulate == "wide":  # in which parts of a group are added up
            _ADDING_FLOAT32.add(module)
        for groups in worlds[:-1]:
            module.set_all_reduce_hook(partial(_count_sum, groups))
        # In the place of torch's bare AssertionError.
        type(module).__deepcopy__ = partialmethod(_refuse_copy, precision.storage.shard)  # type: ignore[attr-defined]
    if zero:  # under fsdp shards are what its users expect
        model.register_state_dict_pre_hook(partial(_refuse_shards, precision.storage.shard))  # type: ignore[no-untyped-call]


def _widen_gradients(dtype: torch.dtype, module: nn.Module, args: Any) -> None:
    """Let the gradients of a module's gathered weights be in `dtype`, so that microbatches are not rounded as they are added up."""
    for p in module.parameters():
        if p.requires_grad and not isinstance(p, DTensor) and p.grad_dtype != dtype:
            p.grad_dtype = dtype


def microbatch(model: nn.Module, shard: str, last: bool) -> None:
    """Before the passes of a microbatch, the `last` of a step or another one: whether it sums gradients and lets weights go."""
    assert isinstance(model, FSDPModule)
    _sum(model, last, each=shard != "zero1")
    if shard in ZERO:
        model.set_reshard_after_backward(last)


def _sum(module: FSDPModule, last: bool, each: bool, recurse: bool = True) -> None:
    """Whether the next backward pass sums gradients into shards, the `last` of a step or `each`; and over groups of ranks, which
    sum once a step, but where the parts of a group are added up in fewer bits than float32."""
    module.set_requires_gradient_sync(last or each, recurse=recurse)
    module.set_requires_all_reduce(last or (each and module not in _ADDING_FLOAT32), recurse=recurse)


class FullyShardedStages:
    """The shards of a pipeline rank's parameters: embedding, last norm and output layer are gathered before the passes of a step,
    for no pass goes through the whole model, and summed in the last one of their chunk, under zero2 and fsdp in each: later passes
    bring them no gradients, and FSDP2 then sums nothing (torch 2.13). Layers are gathered and summed as without a pipeline."""

    def __init__(self, model: nn.Module, shard: str, chunks: Sequence[Sequence[nn.Module]]) -> None:
        assert isinstance(model, FSDPModule)
        self.model, self.each, self.shard = model, shard != "zero1", shard
        self.outer = chunks[-1 if model.output_layer is not None else 0]
        for layers in chunks:
            for before, layer in pairwise((model, *layers)):
                assert isinstance(layer, FSDPModule) and isinstance(before, FSDPModule)
                # Torch 2.13 prefetches what the last forward pass had before the layer: another microbatch's, or chunk's.
                layer.set_modules_to_backward_prefetch([before])
        # What the first forward pass of the root does, before which its layers would each be roots (torch 2.13).
        model._get_fsdp_state()._lazy_init()

    def begin(self) -> None:
        """Gather what no layer gathers."""
        self.model.set_reshard_after_backward(False, recurse=self.shard in ZERO)  # `drop` says otherwise
        self.model.unshard()
        for hook in self.model._forward_pre_hooks.values():
            if isinstance(hook, partial) and hook.func is _widen_gradients:
                hook(self.model, ())

    def backward(self, layers: Sequence[nn.Module], first: bool, last: bool) -> None:
        """Whether the next backward pass sums gradients: of all microbatches under zero2 and fsdp, else in the last of `layers`,
        those of embedding and output layer too where these are in the same chunk."""
        for layer in layers:
            assert isinstance(layer, FSDPModule)
            _sum(layer, last, self.each)
        _sum(self.model, last and layers[0] is self.outer[0], self.each, recurse=False)
        self.model.set_is_last_backward((first and last) or self.each)  # which ends with nothing on its way

    def end(self) -> None:
        """Free what was gathered."""
        let_go(self.model)


def _refuse_shards(shard: str, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise where weights are asked for that anyone could use: a rank has shards, which `torch.save` would take for whole ones."""
    if not in_stored_form():
        raise RuntimeError(f"under storage.shard={shard} no rank has whole weights; save a checkpoint with fp8cfg.fit, or write "
                           "storage.shard=none")


def _refuse_copy(module: nn.Module, shard: str, memo: dict[int, Any]) -> NoReturn:
    raise TypeError(f"the model cannot be copied: {COPY.format(shard)}")


def let_go(model: nn.Module) -> None:
    """Free weights that a forward pass gathered and no backward pass will read, as after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def drop(model: nn.Module, shard: str) -> None:
    """Drop what a step that was broken off has gathered and added up; the next backward pass sums, as in a loop of one's own."""
    microbatch(model, shard, last=True)
    assert isinstance(model, FSDPModule)
    if model._get_fsdp_state()._is_root is None:
        return  # before the first forward pass, which makes what is reset
    if not hasattr(model, "reset_iter_state"):  # it is torch 2.13's; the branch goes when pyproject.toml asks for that
        model.register_forward_pre_hook(_refuse_after_error, prepend=True)
        return
    model.reset_iter_state()
    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            for p in group.fsdp_params:
                if hasattr(p, "_unsharded_param"):  # whose gradients torch 2.13 leaves
                    p._unsharded_param.grad = p.unsharded_accumulated_grad = None


def _refuse_after_error(module: nn.Module, args: Any) -> NoReturn:
    raise RuntimeError("a step was broken off, and before torch 2.13 FSDP2 does not drop what it left: build another job")


def gathered_weights(model: nn.Module) -> list[Tensor]:
    """The tensors that weights are gathered in: one for each, in every pass; and weights that are whole."""
    found: dict[Tensor, None] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            # Of the root layers have theirs split.
            found |= dict.fromkeys(p for p in module.parameters() if not isinstance(p, DTensor))
            module.reshard()
    return [*found]


def holders(model: nn.Module) -> World:
    """The ranks that have the shards of the parameters of `model`."""
    mesh: Any = next(p for p in model.parameters() if isinstance(p, DTensor)).device_mesh
    axis = mesh.ndim - 1
    return World(mesh.get_local_rank(axis), mesh.size(axis), group=mesh.get_group(axis))
