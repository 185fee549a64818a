"""Memory measurement: measured bytes of a training step next to the planned bytes, by kind.

`measure_memory` builds a job, trains one step on random tokens, and measures a second one:

    persistent tensors   weights, masters, moments, gradients, FP8 state: their sizes
    one microbatch       peak of everything that forward and backward allocate on top
    gradient sums        peak of everything that the reduction over the ranks allocates on top
    optimizer step       peak of everything that the update allocates on top

`LiveBytes` measures the peaks. It sees every output of every operator, and a weak reference tells
when a storage is freed. CPython frees it with its last reference. So the bytes are exact: they do
not depend on the cache and the block sizes of an allocator, and two measurements are equal. Tensors
that autograd saves for backward count. Workspaces inside an operator, such as cuBLAS's, do not.

The measured microbatch is the one with the highest peak of the step:

    default                            the last microbatch: all gradients exist already
    zero2, more than two microbatches  a middle one: gathered weights stay after it
    one microbatch, whole gradients    the only one: its peak includes the new gradients
    pipeline stage                     the schedule of all microbatches
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from fp8cfg.building.builder import build
from fp8cfg.building.job import Job
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.linear_operands import cached_weights
from fp8cfg.optim.low_bit.adam import LowBitTraining
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel.gradient_sync import sum_gradients
from fp8cfg.parallel.process_group import current
from fp8cfg.parallel.sharding import ranks
from fp8cfg.planning.activation_memory import logit_bytes
from fp8cfg.planning.fsdp_memory import root_bytes
from fp8cfg.planning.layout import quantizes_weights_once, reduces_once, stage_parts
from fp8cfg.planning.linear_memory import LinearBytes
from fp8cfg.planning.peak_memory import (
    COMING,
    count_parameters,
    gradient_bytes_before_step,
    optimizer_step_bytes,
    part_linears,
    persistent_memory,
    plan_memory,
)
from fp8cfg.planning.state_shards import unquantized_gradient_bytes
from fp8cfg.planning.zero_memory import reduction_bytes
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_layout import by_fsdp2
from fp8cfg.schema.tables import size, table
from fp8cfg.training.microbatches import count_microbatches
from fp8cfg.training.step import pipeline_schedule

BOUNDS = {"weights": 0.05, "masters": 0.05, "gradients": 0.05, "moments": 0.05, "peak": 0.15}
"""Largest accepted relative error of the plan, by kind."""


def measured_table(recipe: Recipe) -> str:
    """Measures `recipe` and returns a table of planned and measured bytes and their ratio."""
    rows = []
    for kind, (planned, measured) in measure_memory(recipe).items():
        # Tensors below 1 KiB have meaningless ratios.
        if max(planned, measured) <= 1024:
            continue
        ratio = ""
        if measured:
            ratio = f"{planned / measured:.2f}"
        rows.append([kind, size(planned), size(measured), ratio])
    return table(["measured here", "planned", "measured", "ratio"], rows, right=(1, 2, 3))


def measure_memory(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Builds `recipe` and measures the memory of a training step on random tokens.

    All ranks call it.

    Returns:
        Planned and measured bytes of this rank, by kind: "weights", "masters", "gradients",
        "moments" and "FP8 state" stay from step to step. "after forward", "peak" (of the forward
        and backward pass), "gradient sums" and "optimizer step" come on top.
    """
    job = build(recipe)
    stage = 0
    if job.prepared.pipeline is not None:
        stage = job.prepared.pipeline.rank
    measured = _MeasuredStep(job, stage).measure()
    bytes_by_kind = {}
    for kind, planned in planned_bytes(recipe, job.device.type, job.choice.backend, stage).items():
        if kind in measured:
            bytes_by_kind[kind] = (planned, measured[kind])
    return bytes_by_kind


class _MeasuredStep:
    """Measures an optimizer step of a job.

    Args:
        job: A new job.
        stage: Pipeline stage of this rank, counted from 0.
    """

    def __init__(self, job: Job, stage: int) -> None:
        recipe = job.recipe
        prepared = job.prepared
        self.job = job
        self.world = current()
        self.has_stages = prepared.pipeline is not None
        self.num_microbatches = count_microbatches(job, self.world)
        # These stages accumulate unsharded gradients and reduce them in the last pass only.
        self.reduces_at_end = (
            self.has_stages and prepared.fsdp2 and prepared.shard in ("none", "zero1")
        )
        # Under zero2 the gathered weights stay until the last pass, and gradient shards exist.
        self.measures_middle = (
            self.num_microbatches > 2
            and not self.has_stages
            and prepared.fsdp2
            and prepared.shard == "zero2"
        )
        # The plan has this row if a step is one pass, so that gradients replace activations.
        part = stage_parts(recipe, ranks())[stage]
        plan = plan_memory(recipe, job.device.type, part, job.choice.backend)
        self.starts_without_gradients = self.reduces_at_end or COMING in plan
        self.batch = self._random_batch()

    def measure(self) -> dict[str, int]:
        """Returns the measured bytes by kind. See `measure_memory`."""
        job = self.job
        optimizer = job.optimizer
        # The first step allocates moments, scales and workspaces, and these stay.
        self._run_pass(is_last=True)
        optimizer.step()
        optimizer.zero_grad()
        # This gathers the weights, so it must come before the cache of quantized weights is filled.
        gathered = gathered_weights(job)
        caches_weights = quantizes_weights_once(
            job.recipe, job.prepared.state, job.prepared.shard, self.num_microbatches
        )
        with cached_weights(job.model, caches_weights):
            # The microbatches before the measured one: they fill the cache and leave gradients.
            self._run_pass(is_last=self.num_microbatches == 1)
            if self.starts_without_gradients:
                optimizer.zero_grad()
            tensors = persistent_tensors(job)
            # The cache was filled outside of LiveBytes, so its bytes are added to the peak.
            cache_bytes = sum(layer.weight_cache.num_bytes for layer in fp8_linears(job.model))
            live = LiveBytes(
                [*self.batch, *_flat(tensors)],
                mortal=[*gradient_tensors(job), *_hsdp_partial_sums(job)],
                resized=gathered,
            )
            with live, self._gradient_storage():
                forward_bytes = self._run_pass(is_last=not self.measures_middle, live=live)
            if self.measures_middle:
                with optimizer.storing():
                    self._run_pass(is_last=True)
        if isinstance(optimizer, LowBitTraining):
            # Pipeline stages ran without `storing`, so their gradients are quantized now.
            optimizer.store_grads()

        tensors["gradients"] = gradient_tensors(job)
        measured = {}
        for kind, tensors_of_kind in tensors.items():
            measured[kind] = sum(local(tensor).nbytes for tensor in tensors_of_kind)
        with LiveBytes(_flat(tensors)) as live_in_sums:
            sum_gradients(job.prepared, optimizer, self.world)
        with LiveBytes(_flat(tensors)) as live_in_step:
            optimizer.step()

        measured["peak"] = live.peak + cache_bytes
        if self.reduces_at_end:
            # The plan counts gradients as persistent, but here the measured pass allocated them.
            measured["peak"] -= measured["gradients"]
        measured["gradient sums"] = live_in_sums.peak
        measured["optimizer step"] = live_in_step.peak
        if not self.has_stages:
            measured["after forward"] = forward_bytes + cache_bytes
        return measured

    def _random_batch(self) -> list[Tensor]:
        """Returns tokens and targets, and document numbers if the model takes them.

        The batch has one microbatch, or with pipeline stages all microbatches of a step.
        """
        recipe = self.job.recipe
        device = self.job.device
        num_samples = recipe.trainer.micro_batch_size
        if self.has_stages:
            num_samples *= self.num_microbatches
        shape = (num_samples, recipe.model.seq_length)
        batch = [torch.randint(recipe.model.vocab_size, shape, device=device) for _ in range(2)]
        if recipe.data.resets:
            batch.append(torch.zeros(shape, dtype=torch.int32, device=device))
        return batch

    def _run_pass(self, is_last: bool, live: LiveBytes | None = None) -> int:
        """Runs forward and backward once.

        Args:
            is_last: Whether it is the last microbatch of the step.
            live: The active measurement.

        Returns:
            Live bytes between forward and backward, 0 without `live` and for pipeline stages.
        """
        job = self.job
        if self.has_stages:
            with job.autocast():
                factors = [1.0] * self.num_microbatches
                pipeline_schedule(job, self.world).train(self.batch, factors)
            return 0
        if job.prepared.fsdp2:
            from fp8cfg.parallel.fsdp import prepare_microbatch

            prepare_microbatch(job.model, job.prepared.shard, is_last)
        forward_bytes = 0
        with job.autocast():
            loss = job.model(*self.batch)
            if live is not None:
                forward_bytes = live.now
            job.backward(loss)
        return forward_bytes

    def _gradient_storage(self) -> AbstractContextManager[None]:
        """Quantizes gradients in the measured pass if it is the last one, as training does."""
        if self.measures_middle or self.has_stages:
            return nullcontext()
        return self.job.optimizer.storing()


# ------------------------------------------------------------------------------------------------
# The plan


def planned_bytes(recipe: Recipe, device: str, backend: str, stage: int = 0) -> dict[str, int]:
    """Returns planned bytes for the kinds of `measure_memory`.

    Args:
        recipe: The recipe.
        device: "cpu" or "cuda".
        backend: Backend of the FP8 layers.
        stage: Pipeline stage, counted from 0.
    """
    part = stage_parts(recipe, ranks())[stage]
    plan = plan_memory(recipe, device, part, backend)
    linears = part_linears(recipe, part)
    persistent = persistent_memory(recipe, part, linears, backend)
    # "FP8 copies" of the plan has persistent state and temporary copies. Only the state stays.
    fp8_state = persistent.pop("FP8 copies")
    fp8_copies = plan["FP8 copies"] - fp8_state

    forward = plan["activations"] + fp8_copies
    if part.output:
        forward += logit_bytes(LinearBytes(recipe, device, part, 0, backend)).kept_bytes
    gathered = plan.get("gathered", 0)
    if part.shard == "fsdp":
        forward += root_bytes(recipe, part, linears, count_parameters(recipe, part).total)
    elif by_fsdp2(recipe, part.state, part.shards, backend):
        # The measurement counts gathered weights as temporary: they are freed between steps.
        weights = persistent.pop("weights")
        forward += weights
        gathered = weights + plan["accumulation"]
        if not reduces_once(recipe, part):
            # Earlier passes left these shards, so they are not new memory of the measured pass.
            gathered -= unquantized_gradient_bytes(recipe, part, linears)
        elif recipe.trainer.strategy.pipeline_model_parallel_size == 1:
            # Unquantized gradients exist before the last pass.
            gathered -= gradient_bytes_before_step(recipe, part, linears) - plan["gradients"]
    peak = plan["activations"] + fp8_copies + plan["logits"] + plan["backward"] + gathered
    if COMING in plan:
        peak += plan["gradients"] + plan[COMING]

    planned = {**persistent, "FP8 state": fp8_state, "after forward": forward, "peak": peak}
    reduction = reduction_bytes(recipe, part, linears, device, backend)
    if reduction:
        planned["gradient sums"] = reduction
    planned["optimizer step"] = optimizer_step_bytes(recipe, part, linears, device, backend)
    return planned


# ------------------------------------------------------------------------------------------------
# Tensors of a job


def persistent_tensors(job: Job) -> dict[str, list[Tensor]]:
    """Returns the tensors of `job` that stay from step to step by kind, without gradients.

    "FP8 state" includes the scales of weights stored in a codec.
    """
    weights: list[Tensor] = list(job.model.parameters())
    masters: list[Tensor] = []
    moments: list[Tensor] = []
    if job.prepared.fsdp2 and job.prepared.shard != "fsdp":
        # FSDP2's float32 shards are the masters. Gathered weights do not exist between steps.
        weights = []
        masters = list(job.optimizer.names)
    for name, tensor in job.optimizer.state_tensors().items():
        if ".master" in name:
            masters.append(tensor)
        if ".exp_avg" in name or ".momentum" in name:
            moments.append(tensor)
    return {
        "weights": weights,
        "masters": masters,
        "moments": moments,
        "FP8 state": list(job.model.buffers()),
    }


def gradient_tensors(job: Job) -> list[Tensor]:
    """Returns the current gradients of `job`, including gradients stored in a codec."""
    parameters = list(job.model.parameters())
    if job.prepared.fsdp2:
        # While weights are gathered, `parameters()` has these. The shards have the gradients.
        parameters.extend(job.optimizer.names)
    gradients = []
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    return gradients + _flat(job.optimizer.stored_grads)


def tensors_by_kind(job: Job) -> dict[str, list[Tensor]]:
    """Returns this rank's tensors by kind: weights, masters, gradients, moments and scales.

    Under FSDP2 with zero1, zero2 or none, the weights are the gathered ones. Then all ranks must
    call it, since it gathers them.
    """
    persistent = persistent_tensors(job)
    weights = persistent["weights"]
    if job.prepared.fsdp2 and job.prepared.shard != "fsdp":
        weights = gathered_weights(job)
    scales = []
    for name, buffer in job.model.named_buffers():
        if name.endswith(("_scale", "scale_inv")):
            scales.append(buffer)
    kinds = {
        "weights": weights,
        "masters": persistent["masters"],
        "gradients": gradient_tensors(job),
        "moments": persistent["moments"],
        "scales": scales,
    }
    return {kind: [local(tensor) for tensor in tensors] for kind, tensors in kinds.items()}


def gathered_weights(job: Job) -> list[Tensor]:
    """Returns FSDP2's gathered weights. FSDP2 frees their storage and keeps the tensors."""
    if not job.prepared.fsdp2:
        return []
    from fp8cfg.parallel import fsdp

    return fsdp.gathered_weights(job.model)


def _hsdp_partial_sums(job: Job) -> list[Tensor]:
    """Returns HSDP's gradient shards after the reduce-scatter and before the all-reduce."""
    if not job.prepared.fsdp2:
        return []
    from torch.distributed.fsdp import FSDPModule

    from fp8cfg.parallel.fsdp import parameter_groups

    sums = []
    for module in job.model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in parameter_groups(module):
            if group._partial_reduce_output is not None:
                sums.append(group._partial_reduce_output)
    return sums


def _flat(tensors_by_name: Mapping[Any, Iterable[Tensor]]) -> list[Tensor]:
    """Returns the tensors of all names in one list."""
    return [tensor for tensors in tensors_by_name.values() for tensor in tensors]


# ------------------------------------------------------------------------------------------------
# Live bytes


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that were allocated inside the mode.

    Args:
        known: Tensors from before the mode. They are not counted.
        mortal: Tensors from before the mode that may be freed inside. Then their bytes are
            subtracted, so `now` can be negative.
        resized: Tensors with a storage that is resized in place, such as FSDP2's gathered weights.
            Their current size counts.

    Attributes:
        peak: Maximum of `now`, in bytes.
    """

    def __init__(
        self, known: Iterable[Tensor], mortal: Iterable[Tensor] = (), resized: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        self.peak = 0
        self._new_bytes = 0
        # By id, because weights can share a storage, and each storage counts once.
        self._resized = {id(storage): storage for storage in _storages_of(resized)}
        # References, because the id of a freed storage could be reused.
        self._known = [*self._resized.values(), *_storages_of(known)]
        self._watched: dict[int, weakref.ref[torch.UntypedStorage] | None] = {}
        for storage in self._known:
            self._watched[id(storage)] = None
        for storage in _storages_of(mortal):
            self._watch(storage)

    @property
    def now(self) -> int:
        """Bytes of live storages."""
        return self._new_bytes + sum(storage.nbytes() for storage in self._resized.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(tensor_type) for tensor_type in types):
            # The wrapper calls the operation again on its inner tensors. They are counted then.
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for storage in _storages_of(tensors):
            # A view has the storage of its base.
            if id(storage) not in self._watched:
                self._watch(storage)
                self._new_bytes += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return output

    def _watch(self, storage: torch.UntypedStorage) -> None:
        """Subtracts the bytes of `storage` once it is freed."""
        on_freed = partial(self._subtract, id(storage), storage.nbytes())
        self._watched[id(storage)] = weakref.ref(storage, on_freed)

    def _subtract(self, key: int, num_bytes: int, _: Any) -> None:
        """Callback of the weak reference to a freed storage."""
        self._new_bytes -= num_bytes
        del self._watched[key]


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Returns the storages of a tensor, or of the inner tensors if it is a wrapper subclass."""
    # A wrapper reports a storage of its full size, but no memory is behind it.
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.untyped_storage()]
    names, _ = tensor.__tensor_flatten__()
    inner_values = [getattr(tensor, name) for name in names]
    # A DTensor also flattens to its mesh, and the mesh is not a tensor.
    return _storages_of(value for value in inner_values if isinstance(value, Tensor))


def _storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return [storage for tensor in tensors for storage in storages(tensor)]
