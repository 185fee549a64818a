"""Memory measurement: planned and measured bytes of a training step, by kind.

The measured bytes are the bytes of live tensors. A dispatch mode sees every new tensor, and a weak
reference tells when its storage is freed. Tensors saved for backward count. Memory cached by the
allocator does not.

The measured pass depends on the layout:

    default                            the last microbatch: all gradients exist already
    zero2, more than two microbatches  a middle one: gathered weights stay after it
    one microbatch, whole gradients    the only one: its peak includes the new gradients
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
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
from fp8cfg.parallel.gradient_sync import stored_grads, sum_gradients
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
from fp8cfg.training.step import count_microbatches, pipeline_schedule


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
        self._now = self.peak = 0
        # Weights can share a storage, and each storage counts once.
        self._resized = list(
            {id(storage): storage for t in resized for storage in storages(t)}.values()
        )
        # The references keep these storages alive: the id of a freed one could be reused.
        self._known = self._resized + [storage for t in known for storage in storages(t)]
        self._seen: dict[int, Any] = {id(storage): None for storage in self._known}
        for t in mortal:
            for storage in storages(t):
                self._watch(storage)

    @property
    def now(self) -> int:
        """Bytes of live storages."""
        return self._now + sum(map(torch.UntypedStorage.nbytes, self._resized))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            # The wrapper calls the operation again on its inner tensors. They are counted then.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            for storage in storages(t) if isinstance(t, Tensor) else ():
                if id(storage) not in self._seen:
                    self._watch(storage)
                    self._now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        """Subtracts the bytes of `storage` once it is freed."""
        self._seen[id(storage)] = weakref.ref(
            storage, partial(self._gone, id(storage), storage.nbytes())
        )

    def _gone(self, key: int, count: int, _: Any) -> None:
        """Callback of the weak reference to a freed storage."""
        self._now -= count
        del self._seen[key]


def storages(t: Tensor) -> list[torch.UntypedStorage]:
    """Returns the storages of a tensor, or of the inner tensors if it is a wrapper subclass."""
    # A wrapper reports a storage of its full size, but no memory is behind it.
    if not is_traceable_wrapper_subclass(t):
        return [t.untyped_storage()]
    # A DTensor also flattens to its mesh, and the mesh is not a tensor.
    inner = [getattr(t, name) for name in t.__tensor_flatten__()[0]]
    return [
        storage for tensor in inner if isinstance(tensor, Tensor) for storage in storages(tensor)
    ]


BOUNDS = {"weights": 0.05, "masters": 0.05, "gradients": 0.05, "moments": 0.05, "peak": 0.15}
"""Largest accepted relative error of the plan, by kind."""


def measure(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Builds `recipe`, runs a training step on random tokens and measures its memory.

    On a pipeline stage the measured pass is the whole schedule of a step. All ranks call it.

    Returns:
        Planned and measured bytes of this rank, by kind: "weights", "masters", "gradients",
        "moments" and "FP8 state" stay from step to step. "after forward", "peak" (of the forward
        and backward pass), "gradient sums" and "optimizer step" come on top.
    """
    job = build(recipe)
    stages, world = job.prepared.pipeline, current()
    passes = count_microbatches(job, world)
    count = passes if stages is not None else 1
    stage = stages.rank if stages is not None else 0
    # The plan has this row if a step is one pass, so that gradients replace activations.
    single = COMING in plan_memory(
        recipe, job.device.type, stage_parts(recipe, ranks())[stage], job.choice.backend
    )
    # These stages accumulate unsharded gradients and reduce them only in the last pass.
    gathers_after_step = (
        stages is not None and job.prepared.fsdp2 and job.prepared.shard in ("none", "zero1")
    )
    # The peak under zero2: shards of gradients exist, and the weights stay gathered.
    measures_between = (
        passes > 2 and stages is None and job.prepared.fsdp2 and job.prepared.shard == "zero2"
    )
    shape = recipe.trainer.micro_batch_size * count, recipe.model.seq_length
    batch = [torch.randint(recipe.model.vocab_size, shape, device=job.device) for _ in range(2)]
    if recipe.data.resets:
        batch.append(torch.zeros(shape, dtype=torch.int32, device=job.device))  # document numbers
    passed: list[int] = []

    def one_pass(live: LiveBytes | None = None, last: bool = True) -> None:
        """Runs forward and backward once. `last` marks the last microbatch of a step."""
        if job.prepared.fsdp2 and stages is None:
            from fp8cfg.parallel.fsdp import prepare_microbatch

            prepare_microbatch(job.model, job.prepared.shard, last)
        with job.autocast():
            if stages is not None:
                pipeline_schedule(job, world).train(batch, [1.0] * count)
                return
            loss = job.model(*batch)
            passed.append(live.now if live else 0)
            job.backward(loss)

    # A first step allocates the moments, scales and workspaces. They are not temporary memory.
    one_pass()
    job.optimizer.step()
    job.optimizer.zero_grad()
    # This gathers the weights, so it must come before the cache of quantized weights is filled.
    gathered = _gathered(job)
    with cached_weights(
        job.model, quantizes_weights_once(recipe, job.prepared.state, job.prepared.shard, passes)
    ):
        one_pass(last=passes == 1)
        if gathers_after_step or single:
            job.optimizer.zero_grad()
        stored_bytes = stored(job)
        # The first pass filled this cache outside of LiveBytes, so its bytes are added below.
        quantized = sum(layer.weight_cache.num_bytes for layer in fp8_linears(job.model))
        known = [*batch, *(t for tensors in stored_bytes.values() for t in tensors)]
        storing = (
            nullcontext() if measures_between or stages is not None else job.optimizer.storing()
        )
        with LiveBytes(known, [*gradients(job), *_partial_sums(job)], gathered) as live, storing:
            one_pass(live, last=not measures_between)
        if measures_between:
            with job.optimizer.storing():
                one_pass()
    if isinstance(job.optimizer, LowBitTraining):
        # Pipeline stages ran without `storing`, so their gradients are quantized now.
        job.optimizer.store_grads()
    stored_bytes["gradients"] = gradients(job)
    measured = {
        kind: sum(_local(t).nbytes for t in tensors) for kind, tensors in stored_bytes.items()
    }
    with LiveBytes(t for tensors in stored_bytes.values() for t in tensors) as summing:
        sum_gradients(job.prepared, job.optimizer, world)
    with LiveBytes(t for tensors in stored_bytes.values() for t in tensors) as stepping:
        job.optimizer.step()
    # The plan counts gradients as persistent memory, but this pass allocated them in its peak.
    gradient_bytes = measured["gradients"] if gathers_after_step else 0
    measured |= {
        "peak": live.peak + quantized - gradient_bytes,
        "gradient sums": summing.peak,
        "optimizer step": stepping.peak,
    }
    measured |= {"after forward": max(passed) + quantized} if passed else {}
    prediction = planned(recipe, job.device.type, job.choice.backend, stage)
    return {kind: (n, measured[kind]) for kind, n in prediction.items() if kind in measured}


def _local(t: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, and other tensors unchanged."""
    local: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return local


def _gathered(job: Job) -> list[Tensor]:
    """Returns FSDP2's gathered weights. FSDP2 frees their storage and keeps the tensors."""
    if not job.prepared.fsdp2:
        return []
    from fp8cfg.parallel.fsdp import gathered_weights

    return gathered_weights(job.model)


def _partial_sums(job: Job) -> list[Tensor]:
    """Returns HSDP's gradient shards after the reduce-scatter and before the all-reduce."""
    if not job.prepared.fsdp2:
        return []
    from torch.distributed.fsdp import FSDPModule

    from fp8cfg.parallel.fsdp import parameter_groups

    groups = [
        group
        for module in job.model.modules()
        if isinstance(module, FSDPModule)
        for group in parameter_groups(module)
    ]
    return [
        group._partial_reduce_output for group in groups if group._partial_reduce_output is not None
    ]


def stored(job: Job) -> dict[str, list[Tensor]]:
    """Returns the persistent tensors of `job` by kind, without gradients.

    "FP8 state" includes the scales of weights stored in a codec.
    """
    state = job.optimizer.state_tensors()
    # FSDP2's float32 shards are the masters. Gathered weights do not exist between steps.
    shards = (
        list(job.optimizer.names) if job.prepared.fsdp2 and job.prepared.shard != "fsdp" else []
    )
    return {
        "weights": [] if shards else list(job.model.parameters()),
        "masters": [*shards, *(t for name, t in state.items() if ".master" in name)],
        "moments": [t for name, t in state.items() if ".exp_avg" in name or ".momentum" in name],
        "FP8 state": list(job.model.buffers()),
    }


def gradients(job: Job) -> list[Tensor]:
    """Returns the current gradients of `job`, including gradients stored in a codec."""
    # While weights are gathered, `parameters()` has these. The shards have the gradients.
    shards = job.optimizer.names if job.prepared.fsdp2 else ()
    plain = [
        p.grad for p in dict.fromkeys([*job.model.parameters(), *shards]) if p.grad is not None
    ]
    return [*plain, *(t for stored in stored_grads(job.optimizer).values() for t in stored)]


def by_kind(job: Job) -> dict[str, list[Tensor]]:
    """Returns this rank's tensors by kind: weights, masters, gradients, moments and scales.

    Under FSDP2 with zero1, zero2 or none, the weights are the gathered ones. Then all ranks must
    call it, since it gathers them.
    """
    stored_bytes = stored(job)
    scales = [t for name, t in job.model.named_buffers() if name.endswith(("_scale", "scale_inv"))]
    weights = (
        _gathered(job)
        if job.prepared.fsdp2 and job.prepared.shard != "fsdp"
        else stored_bytes["weights"]
    )
    kinds = {
        "weights": weights,
        "masters": stored_bytes["masters"],
        "gradients": gradients(job),
        "moments": stored_bytes["moments"],
        "scales": scales,
    }
    return {kind: [_local(t) for t in tensors] for kind, tensors in kinds.items()}


def planned(recipe: Recipe, device: str, backend: str, stage: int = 0) -> dict[str, int]:
    """Returns planned bytes for the kinds of `measure`.

    Args:
        recipe: The recipe.
        device: "cpu" or "cuda".
        backend: Backend of the FP8 layers.
        stage: Pipeline stage, counted from 0.
    """
    part = stage_parts(recipe, ranks())[stage]
    kinds = plan_memory(recipe, device, part, backend)
    linears = part_linears(recipe, part)
    persistent = persistent_memory(recipe, part, linears, backend)
    # "FP8 copies" of the plan has persistent state and temporary copies. Only the first stays.
    state = persistent.pop("FP8 copies")
    copies = kinds["FP8 copies"] - state
    logits = logit_bytes(LinearBytes(recipe, device, part, 0, backend)).kept if part.output else 0
    forward_bytes = kinds["activations"] + copies + logits
    shard, gathered = part.shard, kinds.get("gathered", 0)
    if shard == "fsdp":
        forward_bytes += root_bytes(recipe, part, linears, count_parameters(recipe, part).total)
    elif by_fsdp2(recipe, part.state, part.shards, backend):
        # The measurement counts gathered weights as temporary: they are freed between steps.
        forward_bytes += (gathered := persistent.pop("weights"))
        gathered += kinds["accumulation"]
        if not reduces_once(recipe, part):
            # Earlier passes left these shards, so they are not new memory of the measured pass.
            gathered -= unquantized_gradient_bytes(recipe, part, linears)
        elif recipe.trainer.strategy.pipeline_model_parallel_size == 1:
            # Wide gradients exist before the last pass.
            gathered -= gradient_bytes_before_step(recipe, part, linears) - kinds["gradients"]
    peak = kinds["activations"] + copies + kinds["logits"] + kinds["backward"] + gathered
    if COMING in kinds:
        peak += kinds["gradients"] + kinds[COMING]
    step = optimizer_step_bytes(recipe, part, linears, device, backend)
    sums = reduction_bytes(recipe, part, linears, device, backend)
    prediction = {
        "after forward": forward_bytes,
        "peak": peak,
        "gradient sums": sums,
        "optimizer step": step,
    }
    return {
        **persistent,
        "FP8 state": state,
        **{kind: n for kind, n in prediction.items() if n or kind != "gradient sums"},
    }


def measured_table(recipe: Recipe) -> str:
    """Measures `recipe` and returns a table of planned and measured bytes and their ratio."""
    # Tensors below 1 KiB have meaningless ratios.
    rows = [
        [kind, size(p), size(m), f"{p / m:.2f}" if m else ""]
        for kind, (p, m) in measure(recipe).items()
        if max(p, m) > 1024
    ]
    return table(["measured here", "planned", "measured", "ratio"], rows, right=(1, 2, 3))
