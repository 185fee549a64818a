"""FSDP2: each data-parallel rank keeps one shard of every parameter, in float32, and steps it.

    storage.shard   weights are gathered                      gradients are reduced into the shards
    zero1           once a step, in the first forward pass    once a step, in the last backward pass
    zero2           once a step, in the first forward pass    in each backward pass
    fsdp            in each forward and each backward pass    in each backward pass
    none            as zero1, from the rank's only shard      as zero1, over all ranks

Your own training loop does not mark the last microbatch, so zero1 and none reduce in each backward
pass there.

Weights are gathered in the stored dtype of a single rank, or under fsdp in storage.gather.
Gradients are reduced in storage.comm, layer by layer, while earlier layers still run backward.
Embedding, final norm and output layer form one group, reduced last. Gradients that wait for the
last microbatch are accumulated in storage.weight_grad, and this takes memory for the full model.

Under HSDP each group of ranks has all shards. The groups all-reduce their shards in the last
microbatch, or in each one if sums are not float32. With none each rank is such a group.

With LoRA, fsdp shards frozen weights too. The other modes replicate them and shard the adapters.
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

from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.formats import DTYPES
from fp8cfg.numerics.fsdp_weights import refresh_shards
from fp8cfg.optim.low_bit.columns import load_into_one, state_dict_of_one
from fp8cfg.parallel.fsdp_refusals import refuse_after_error, refuse_copy, refuse_shards
from fp8cfg.parallel.process_group import SENT, World, current, ring_bytes
from fp8cfg.parallel.sharding import shards_columns
from fp8cfg.schema.storage import ZERO, StateDtypes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fp8cfg.backends.protocol import PreparedModel
    from fp8cfg.models.transformer import Transformer
    from fp8cfg.optim.low_bit.adam import LowBitTraining
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer


REDUCES_EACH_MICROBATCH = ("zero2", "fsdp")
"""Values of storage.shard that reduce gradients in each backward pass."""
_ACCUMULATES_FLOAT32: WeakSet[FSDPModule] = WeakSet()
"""Modules that sum reduced microbatches in float32. Under HSDP they all-reduce once a step."""


def apply_fsdp(
    model: Transformer, state: StateDtypes, mesh: DeviceMesh, grad_dtype: torch.dtype
) -> None:
    """Shards `model` in place: each layer as one FSDP module, then the rest.

    Args:
        model: The Transformer, on its device or on the meta device.
        state: Storage dtypes. storage.shard is resolved.
        mesh: The mesh of `fsdp_mesh`. Its last axis has the shards. Along the axis before it, if
            any, groups of ranks have all shards each.
        grad_dtype: Dtype of the gradients of gathered weights.
    """
    storage = state.precision.storage
    shard = storage.shard
    stays_gathered = shard != "fsdp"
    worlds = [World(mesh.get_local_rank(axis), mesh.size(axis)) for axis in range(mesh.ndim)]
    *replicas, shards = worlds
    comm_dtype = DTYPES[state.linear["comm"]]
    # FSDP2 accumulates microbatches in its reduce_dtype. Only `fsdp` accumulates in storage.comm:
    # the other modes accumulate in grad_dtype, and _ReduceScatter casts before it sends.
    reduce_dtype = grad_dtype if stays_gathered else comm_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[state.gathered_dtype],
        reduce_dtype=reduce_dtype,
        # Activations have the compute dtype already, and rotary tables must stay in float32.
        cast_forward_inputs=False,
    )
    replicated = set()
    if stays_gathered:
        replicated = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    column_sharded = set()
    for name, parameter in model.named_parameters():
        if shards_columns(state, name, parameter.shape, shards.size):
            column_sharded.add(parameter)

    # The root comes last: it takes all parameters outside of layers.
    for module in (*model.layers, model):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            # None: layers free their weights after the forward pass, the root keeps its own.
            reshard_after_forward=False if stays_gathered else None,
            ignored_params=replicated,
            shard_placement_fn=lambda parameter: Shard(int(parameter in column_sharded)),
        )
        if grad_dtype != policy.param_dtype:
            module.register_forward_pre_hook(partial(set_grad_dtype, grad_dtype))
        if shard == "none" and comm_dtype != grad_dtype:
            module.register_forward_pre_hook(partial(set_reduce_dtype, comm_dtype))
        assert isinstance(module, FSDPModule)
        # Sum, don't average: Job.backward has weighted the loss of this rank already.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_AllGather(shards))
        module.set_custom_reduce_scatter(_ReduceScatter(shards, comm_dtype))
        for world in replicas:
            module.set_all_reduce_hook(partial(_count_all_reduce, world, reduce_dtype))
        if reduce_dtype == torch.float32 and storage.accumulate == "wide":
            _ACCUMULATES_FLOAT32.add(module)
        # torch's own __deepcopy__ of an FSDP module raises a bare AssertionError. fully_shard has
        # created a new class for the module, so plain modules stay copyable.
        type(module).__deepcopy__ = partialmethod(refuse_copy, shard)  # type: ignore[attr-defined]

    if shard in ZERO:  # users of fsdp expect a state dict of shards
        model.register_state_dict_pre_hook(partial(refuse_shards, shard))
    if shard == "none":
        model.register_state_dict_post_hook(state_dict_of_one)
        model.register_load_state_dict_pre_hook(load_into_one)


def set_grad_dtype(dtype: torch.dtype, module: nn.Module, args: Any) -> None:
    """Forward pre-hook: sets the dtype of the gradients of gathered weights.

    In the dtype of the weights each microbatch would round the accumulated gradient.
    """
    for parameter in module.parameters():
        # Shards are DTensors and keep their own dtype.
        is_gathered = not isinstance(parameter, DTensor)
        if parameter.requires_grad and is_gathered and parameter.grad_dtype != dtype:
            parameter.grad_dtype = dtype


def set_reduce_dtype(dtype: torch.dtype, module: nn.Module, args: Any) -> None:
    """Forward pre-hook: sets the dtype in which groups of ranks all-reduce gradients.

    FSDP2 (torch 2.13) would add up microbatches in the reduce_dtype of a policy too, and takes the
    dtype of the weights if the policy has none. The first forward pass sets the field from the
    policy, so it can't be set earlier.
    """
    assert isinstance(module, FSDPModule)
    for group in parameter_groups(module):
        # A private field: FSDP2 has no setter for it.
        group._reduce_dtype = dtype


class _AllGather(DefaultAllGather):
    """FSDP2's all-gather. Counts the bytes sent over the ranks of `world`."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *arguments: Any, **options: Any
    ) -> Any:
        SENT.add("weights", (self.world.size - 1) * input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, *arguments, **options)


class _ReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, which sends in `dtype` and returns the sum in the dtype of gradients.

    Without it FSDP2 (torch 2.13) would accumulate microbatches in the dtype of the collective.
    """

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        super().__init__()
        self.world = world
        self.dtype = dtype

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *arguments: Any, **options: Any
    ) -> Any:
        needs_cast = input_tensor.dtype != self.dtype
        reduced = output_tensor
        if needs_cast:
            input_tensor = input_tensor.to(self.dtype)
            reduced = torch.empty_like(output_tensor, dtype=self.dtype)
        # On a ring a rank sends every shard but one.
        SENT.add("gradients", (self.world.size - 1) * reduced.nbytes)
        work = super().__call__(reduced, input_tensor, *arguments, **options)
        if needs_cast:
            output_tensor.copy_(reduced)
        return work


def _count_all_reduce(world: World, grad_dtype: torch.dtype, grad_shard: Tensor) -> None:
    """All-reduce hook: counts the bytes of the sum over `world` and rounds it to `grad_dtype`."""
    SENT.add("gradients", ring_bytes(grad_shard, world.size))
    if grad_dtype.itemsize < grad_shard.dtype.itemsize:
        grad_shard.copy_(grad_shard.to(grad_dtype))


def prepare_microbatch(model: nn.Module, shard: str, last: bool) -> None:
    """Configures the next forward and backward pass: gathered weights and gradient reduction.

    Args:
        model: A model after `apply_fsdp`.
        shard: storage.shard, resolved.
        last: Whether this is the last microbatch of the step.
    """
    assert isinstance(model, FSDPModule)
    _set_gradient_sync(model, last, reduces_each=shard in REDUCES_EACH_MICROBATCH)
    # Weights stay gathered until the step's last backward pass. fsdp frees them after each.
    if shard != "fsdp":
        model.set_reshard_after_backward(last)


def _set_gradient_sync(
    module: FSDPModule, last: bool, reduces_each: bool, recurse: bool = True
) -> None:
    """Sets whether the next backward pass reduces gradients.

    Args:
        module: An FSDP module.
        last: Whether this is the last microbatch.
        reduces_each: Whether every microbatch reduces gradients.
        recurse: Whether to set modules inside too.
    """
    module.set_requires_gradient_sync(last or reduces_each, recurse=recurse)
    # Groups of ranks sum once a step. If sums have fewer bits than float32, they sum in each pass,
    # as without groups.
    all_reduces_each = reduces_each and module not in _ACCUMULATES_FLOAT32
    module.set_requires_all_reduce(last or all_reduces_each, recurse=recurse)


def reshard_weights(model: nn.Module) -> None:
    """Frees gathered weights that no backward pass will free, as after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def attach_optimizer(
    optimizer: MixedPrecisionOptimizer | LowBitTraining, prepared: PreparedModel
) -> None:
    """Connects an optimizer with the shards of `prepared.model` that it steps."""
    optimizer.sharded = prepared.shard in ZERO
    optimizer.masters_of = {
        name for name, columns in prepared.columns.items() if columns["master_weight"] != "none"
    }
    if prepared.shard == "none":
        optimizer.one_shard = lambda: refresh_shards(fp8_linears(prepared.model))
    # A training loop of the user may have gathered weights before the step, with the old values.
    optimizer.on_written.append(partial(reshard_weights, prepared.model))


def discard_step(model: nn.Module, shard: str) -> None:
    """Frees gathered weights and discards gradients after an error in the midst of a step."""
    # The next pass may come from a user's loop. It reduces in each backward pass.
    prepare_microbatch(model, shard, last=True)
    assert isinstance(model, FSDPModule)
    if model._get_fsdp_state()._is_root is None:
        return  # no forward pass yet, so there is no state to reset
    # New in torch 2.13. Remove this branch when pyproject.toml requires 2.13.
    if not hasattr(model, "reset_iter_state"):
        model.register_forward_pre_hook(refuse_after_error, prepend=True)
        return
    model.reset_iter_state()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in parameter_groups(module):
            for parameter in group.fsdp_params:
                # reset_iter_state of torch 2.13 keeps both gradients.
                if not hasattr(parameter, "_unsharded_param"):
                    continue
                parameter._unsharded_param.grad = None
                # In torch 2.15 a property that reads the gradient above.
                if "unsharded_accumulated_grad" in vars(parameter):
                    parameter.unsharded_accumulated_grad = None


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Returns the groups of parameters that `module` gathers, each in one all-gather."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    # Before torch 2.13 a module has one group. Remove this when pyproject.toml requires 2.13.
    if state._fsdp_param_group:
        return [state._fsdp_param_group]
    return []


def gathered_weights(model: nn.Module) -> list[Tensor]:
    """Returns the tensors in which passes gather weights, and the replicated weights.

    FSDP2 gathers a weight into the same tensor in every pass.
    """
    weights: dict[Tensor, None] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for parameter in module.parameters():
                # Parameters of modules inside are still DTensors here.
                if not isinstance(parameter, DTensor):
                    weights[parameter] = None
            module.reshard()
    return [*weights]


def shard_world(model: nn.Module) -> World:
    """Returns the ranks that have the shards of one copy of the parameters of `model`."""
    sharded = (parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    mesh: Any = next(sharded).device_mesh
    axis = mesh.ndim - 1
    return World(mesh.get_local_rank(axis), mesh.size(axis), group=mesh.get_group(axis))


def start_single_rank_group(device: str) -> None:
    """Starts a process group of one rank, which FSDP2 needs, unless there is a process group.

    Raises:
        ConfigError: torchrun started several ranks.
    """
    if dist.is_initialized():
        return
    current()  # raises the error
    backend = "nccl" if device == "cuda" else "gloo"
    # A store in this process: one rank needs no rendezvous and no port.
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


class FSDPStageSync:
    """FSDP2 under pipeline parallelism: gathers and reductions around the passes of stages.

    The pipeline calls layers, and no pass goes through the full model. So the pipeline replaces
    FSDP2's root. It gathers embedding, final norm and output layer before the passes of a step. It
    reduces their gradients in each backward pass of their chunk under zero2 and fsdp, and in the
    chunk's last one under zero1 and none. The rank's last pass would be too late: it may belong to
    another chunk. These modules then get no gradients in it, and FSDP2 (torch 2.13) reduces
    nothing. Layers are gathered and reduced as without a pipeline.

    Args:
        model: The rank's part of the model, after `apply_fsdp`.
        shard: storage.shard, resolved.
        chunks: The layers of each chunk of this rank.
    """

    def __init__(self, model: nn.Module, shard: str, chunks: Sequence[Sequence[nn.Module]]) -> None:
        assert isinstance(model, FSDPModule)
        self.model = model
        self.shard = shard
        self.reduces_each = shard in REDUCES_EACH_MICROBATCH
        # The chunk that runs embedding, or final norm and output layer.
        self.outer_chunk = chunks[0] if model.output_layer is None else chunks[-1]
        for layers in chunks:
            for previous, layer in pairwise((model, *layers)):
                assert isinstance(layer, FSDPModule) and isinstance(previous, FSDPModule)
                # By default torch 2.13 prefetches the module before the layer in the last forward
                # pass, but that was another microbatch or another chunk.
                layer.set_modules_to_backward_prefetch([previous])
        # The root's first forward pass does this (torch 2.13). Without it each layer would become
        # a root in its own first pass.
        model._get_fsdp_state()._lazy_init()

    def begin(self) -> None:
        """Gathers the weights outside of layers."""
        # `discard_step` sets True.
        self.model.set_reshard_after_backward(False, recurse=self.shard != "fsdp")
        self.model.unshard()
        # The root's own forward pre-hooks don't run, as nobody calls the model.
        for hook in self.model._forward_pre_hooks.values():
            if isinstance(hook, partial) and hook.func in (set_grad_dtype, set_reduce_dtype):
                hook(self.model, ())

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Runs a stage's forward pass as if the model, the root, had called it.

        Otherwise each layer would start as a root, and a root's all-gather waits for all work of
        the compute stream: communication and computation would take turns (torch 2.13).
        """
        state: Any = self.model._get_fsdp_state()
        state._root_pre_forward(self.model, (), {})
        try:
            yield
        finally:
            # What FSDPState._post_forward does at the end of a root: it frees the buffer of the
            # last all-gather after both streams have read it.
            state._state_ctx.iter_forward_root = None
            last_gather = state._comm_ctx.all_gather_state
            if last_gather:
                state._comm_ctx.all_gather_copy_in_stream.wait_event(last_gather.event)
                state._comm_ctx.all_gather_stream.wait_event(last_gather.event)
                state._comm_ctx.all_gather_state = None

    def backward(self, layers: Sequence[nn.Module], first: bool, last: bool) -> None:
        """Sets the reductions of the next backward pass.

        Args:
            layers: The layers of the chunk.
            first: Whether it is the first chunk of this rank. Its backward pass comes last.
            last: Whether it is the last microbatch of the chunk.
        """
        for layer in layers:
            assert isinstance(layer, FSDPModule)
            _set_gradient_sync(layer, last, self.reduces_each)
        is_outer = layers[0] is self.outer_chunk[0]
        _set_gradient_sync(self.model, last and is_outer, self.reduces_each, recurse=False)
        # The last backward pass waits for all reductions.
        self.model.set_is_last_backward((first and last) or self.reduces_each)

    def end(self) -> None:
        """Frees gathered weights."""
        reshard_weights(self.model)
