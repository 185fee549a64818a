"""FSDP2 sharding: float32 weights, their own masters, and moments split over data-parallel ranks, each of which keeps a shard of
every tensor and steps that.

    in fit      weights are gathered                                            gradients are summed into the shards
    zero1       as the first microbatch of a step goes forward, till its end    as the last one goes back
    zero2       the same                                                        as each goes back
    fsdp        before a layer runs, and again before it goes back              as each goes back
    none        as under zero1, by each rank alone, which has the one shard     as under zero1, of all ranks

In a loop of one's own zero1 and none sum as each goes back: nothing says there which microbatch is the last. Groups of ranks that
have all state each (HSDP) sum their shards' gradients in the last microbatch; in each in such a loop, and where their sums are no
float32. Under none each rank is such a group.

Gathered are weights as a rank alone stores them, under fsdp in the codec of storage.gather. Gradients are summed in storage.comm,
a layer at a time while those before it still go back; embedding, last norm and output layer are one group, the last. What is not
summed in each microbatch is added up in storage.weight_grad first, which takes the gradients of the whole model; sums are rounded
to that too, under fsdp to storage.comm.

Beside adapters fsdp splits frozen weights too; others leave them whole on each rank, and take the adapters alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor, Shard

from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.fsdp_weights import refresh_shards
from fp8cfg.optim.low_bit.columns import load_into_one, state_dict_of_one
from fp8cfg.parallel.fsdp_refusals import refuse_after_error, refuse_copy, refuse_shards
from fp8cfg.parallel.process_group import SENT, World, current, on_ring
from fp8cfg.parallel.sharding import by_columns
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.rules_layout import ZERO, gathered_plain
from fp8cfg.schema.storage import resolved

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fp8cfg.backends.protocol import PreparedModel
    from fp8cfg.models.transformer import Transformer
    from fp8cfg.optim.low_bit.adam import LowBitTraining
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer


REDUCED_IN_EACH_PASS = ("zero2", "fsdp")
"""Where gradients are summed in each backward pass."""
_ADDING_FLOAT32: WeakSet[FSDPModule] = WeakSet()
"""The modules whose parts of a group are added up in float32."""


class _AllGather(DefaultAllGather):
    """FSDP2's own, counted as sent over the ranks of `world`."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any
    ) -> Any:
        SENT.add("weights", (self.world.size - 1) * input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, *rest, **options)


class _ReduceScatter(DefaultReduceScatter):
    """FSDP2's own, in `dtype`, with the sum in that of gradients, counted: on a ring a rank sends all parts but one. FSDP2 would
    add up microbatches in the dtype that it sends (torch 2.13)."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        super().__init__()
        self.world, self.dtype = world, dtype

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any
    ) -> Any:
        sent = input_tensor.to(self.dtype)
        total = (
            output_tensor
            if sent is input_tensor
            else torch.empty_like(output_tensor, dtype=self.dtype)
        )
        SENT.add("gradients", (self.world.size - 1) * total.nbytes)
        work = super().__call__(total, sent, *rest, **options)
        if total is not output_tensor:
            output_tensor.copy_(total)
        return work


def _count_sum(world: World, kept: torch.dtype, part: Tensor) -> None:
    """Count the all-reduce of a `part` of gradients over groups that has just been, and round it to what is `kept`."""
    SENT.add("gradients", on_ring(part, world.size))
    if kept.itemsize < part.dtype.itemsize:
        part.copy_(part.to(kept))


def start_alone(device: str) -> None:
    """Start a process group of one rank, if there is none: FSDP2 needs one to compute what several ranks do."""
    if dist.is_initialized():
        return
    current()  # which raises where torchrun has started several
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1
    )


def shard(
    model: Transformer, precision: Precision, mesh: DeviceMesh, gradient: torch.dtype
) -> None:
    """Split `model`, in place, over the last axis of `mesh`, as of fsdp_mesh: each layer by itself, then the rest; but under fsdp
    what is trained of it, under none into one shard each. The gradients of gathered weights are in `gradient`. Groups of ranks that
    have all shards sum gradients with each other."""
    chosen = precision.storage.shard
    worlds = [World(mesh.get_local_rank(axis), mesh.size(axis)) for axis in range(mesh.ndim)]
    # Activations have the compute dtype already, and rotary tables are to stay in float32.
    once, comm = chosen != "fsdp", DTYPES[resolved(precision)["comm"]]
    kept = gradient if once else comm
    policy = MixedPrecisionPolicy(
        DTYPES[gathered_plain(precision)], kept, cast_forward_inputs=False
    )
    whole = {p for p in model.parameters() if once and not p.requires_grad}
    by_column = {
        p
        for name, p in model.named_parameters()
        if by_columns(precision, name, p.shape, worlds[-1].size)
    }
    for module in (*model.layers, model):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=False if once else None,
            ignored_params=whole,
            shard_placement_fn=lambda p: Shard(int(p in by_column)),
        )
        if gradient != policy.param_dtype:
            module.register_forward_pre_hook(partial(widen_gradients, gradient))
        if chosen == "none" and comm != gradient:
            module.register_forward_pre_hook(partial(send_in, comm))
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(
            1.0
        )  # shares of the loss are weighed where it is (Job.backward)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_AllGather(worlds[-1]))
        module.set_custom_reduce_scatter(_ReduceScatter(worlds[-1], comm))
        if (
            kept == torch.float32 and precision.storage.accumulate == "wide"
        ):  # in which parts of a group are added up
            _ADDING_FLOAT32.add(module)
        for over in worlds[:-1]:
            module.set_all_reduce_hook(partial(_count_sum, over, kept))
        # In the place of torch's bare AssertionError.
        type(module).__deepcopy__ = partialmethod(refuse_copy, chosen)  # type: ignore[attr-defined]
    if chosen in ZERO:  # under fsdp shards are what its users expect
        model.register_state_dict_pre_hook(partial(refuse_shards, chosen))
    if chosen == "none":
        model.register_state_dict_post_hook(state_dict_of_one)
        model.register_load_state_dict_pre_hook(load_into_one)


def widen_gradients(dtype: torch.dtype, module: nn.Module, args: Any) -> None:
    """Let the gradients of a module's gathered weights be in `dtype`, so that microbatches are not rounded as they are added up."""
    for p in module.parameters():
        if p.requires_grad and not isinstance(p, DTensor) and p.grad_dtype != dtype:
            p.grad_dtype = dtype


def send_in(dtype: torch.dtype, module: nn.Module, args: Any) -> None:
    """Let a module's gradients be summed over groups in `dtype`. In a policy FSDP2 would add up microbatches in that too, and take
    the dtype of weights for no dtype (torch 2.13)."""
    assert isinstance(module, FSDPModule)
    for group in parameter_groups(module):  # after the first forward pass has set it
        group._reduce_dtype = dtype


def microbatch(model: nn.Module, shard: str, last: bool) -> None:
    """Before the passes of a microbatch, the `last` of a step or another one: whether it sums gradients and lets weights go."""
    assert isinstance(model, FSDPModule)
    sums(model, last, each=shard in REDUCED_IN_EACH_PASS)
    if shard != "fsdp":
        model.set_reshard_after_backward(last)


def sums(module: FSDPModule, last: bool, each: bool, recurse: bool = True) -> None:
    """Whether the next backward pass sums gradients into shards, the `last` of a step or `each`; and over groups of ranks, which
    sum once a step, but where the parts of a group are added up in fewer bits than float32."""
    module.set_requires_gradient_sync(last or each, recurse=recurse)
    module.set_requires_all_reduce(
        last or (each and module not in _ADDING_FLOAT32), recurse=recurse
    )


def let_go(model: nn.Module) -> None:
    """Free weights that a forward pass gathered and no backward pass will read, as after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def attach(optimizer: MixedPrecisionOptimizer | LowBitTraining, prepared: PreparedModel) -> None:
    """Let `optimizer` step the shards of `prepared.model`, and say of which its state is."""
    optimizer.sharded = prepared.shard in ZERO
    optimizer.masters_of = {
        name for name, columns in prepared.columns.items() if columns["master_weight"] != "none"
    }
    if prepared.shard == "none":
        optimizer.one_shard = lambda: refresh_shards(fp8_linears(prepared.model))
    optimizer.on_written.append(
        partial(let_go, prepared.model)
    )  # weights that a loop of one's own has gathered meanwhile


def drop(model: nn.Module, shard: str) -> None:
    """Drop what a step that was broken off has gathered and added up; the next backward pass sums, as in a loop of one's own."""
    microbatch(model, shard, last=True)
    assert isinstance(model, FSDPModule)
    if model._get_fsdp_state()._is_root is None:
        return  # before the first forward pass, which makes what is reset
    if not hasattr(
        model, "reset_iter_state"
    ):  # it is torch 2.13's; the branch goes when pyproject.toml asks for that
        model.register_forward_pre_hook(refuse_after_error, prepend=True)
        return
    model.reset_iter_state()
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            for p in group.fsdp_params:
                if hasattr(p, "_unsharded_param"):  # whose gradients torch 2.13 leaves
                    p._unsharded_param.grad = None
                    if "unsharded_accumulated_grad" in vars(p):  # in torch 2.15 the same one
                        p.unsharded_accumulated_grad = None


def parameter_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that `module` gathers at once. Before torch 2.13 there is one; the branch goes when pyproject.toml
    asks for that."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return [state._fsdp_param_group] if state._fsdp_param_group else []


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


class FullyShardedStages:
    """The shards of a pipeline rank's parameters: embedding, last norm and output layer are gathered before the passes of a step,
    for no pass goes through the whole model, and summed in the last one of their chunk, under zero2 and fsdp in each: later passes
    bring them no gradients, and FSDP2 then sums nothing (torch 2.13). Layers are gathered and summed as without a pipeline.
    """

    def __init__(self, model: nn.Module, shard: str, chunks: Sequence[Sequence[nn.Module]]) -> None:
        assert isinstance(model, FSDPModule)
        self.model, self.each, self.shard = model, shard in REDUCED_IN_EACH_PASS, shard
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
        self.model.set_reshard_after_backward(
            False, recurse=self.shard != "fsdp"
        )  # `drop` says otherwise
        self.model.unshard()
        for hook in self.model._forward_pre_hooks.values():
            if isinstance(hook, partial) and hook.func in (widen_gradients, send_in):
                hook(self.model, ())

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass of a stage, whose FSDP root is the model, as if that ran itself.

        Otherwise each layer would begin as a root, and a root's all-gather waits for all that the
        compute stream has to do: communication and computation would take turns (torch 2.13).
        """
        state: Any = self.model._get_fsdp_state()
        state._root_pre_forward(self.model, (), {})
        try:
            yield
        finally:
            # The end of FSDPState._post_forward of a root: free the last all-gather's buffer.
            state._state_ctx.iter_forward_root = None
            last = state._comm_ctx.all_gather_state
            if last:
                state._comm_ctx.all_gather_copy_in_stream.wait_event(last.event)
                state._comm_ctx.all_gather_stream.wait_event(last.event)
                state._comm_ctx.all_gather_state = None

    def backward(self, layers: Sequence[nn.Module], first: bool, last: bool) -> None:
        """Whether the next backward pass sums gradients: of all microbatches under zero2 and fsdp, else in the last of `layers`,
        those of embedding and output layer too where these are in the same chunk."""
        for layer in layers:
            assert isinstance(layer, FSDPModule)
            sums(layer, last, self.each)
        sums(self.model, last and layers[0] is self.outer[0], self.each, recurse=False)
        self.model.set_is_last_backward(
            (first and last) or self.each
        )  # which ends with nothing on its way

    def end(self) -> None:
        """Free what was gathered."""
        let_go(self.model)
