"""Memory measurement: planned and measured bytes of a training step, by kind.

Measured are live tensor bytes, counted by a dispatch mode that sees every tensor made and, by a weak reference, when its
storage dies: saved tensors are among them, memory that the allocator keeps is not. The pass that is measured is the last of a
step of two microbatches: it finds all gradients there, and stores those that have a codec. Of more under zero2 it is one that lets
no weights go. Where a step is one pass, and no FSDP2 has shards of gradients, it finds none, and its peak has those that came.
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
from fp8cfg.training.step import count_microbatches, pipeline


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive and were made inside of the mode: `now`, and at most, `peak`. `known` tensors are
    not counted; those of `mortal` are only when they die, which takes their bytes off. `resized` ones, whose memory comes and
    goes while they stay, are counted as they are."""

    def __init__(
        self, known: Iterable[Tensor], mortal: Iterable[Tensor] = (), resized: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        self._now = self.peak = 0
        self._resized = list(
            {id(storage): storage for t in resized for storage in storages(t)}.values()
        )
        self._known = self._resized + [storage for t in known for storage in storages(t)]
        self._seen: dict[int, Any] = {id(storage): None for storage in self._known}
        for t in mortal:
            for storage in storages(t):
                self._watch(storage)

    @property
    def now(self) -> int:
        """Bytes that are alive now."""
        return self._now + sum(map(torch.UntypedStorage.nbytes, self._resized))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # what a wrapper does with the tensors inside of it is seen
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            for storage in storages(t) if isinstance(t, Tensor) else ():
                if id(storage) not in self._seen:
                    self._watch(storage)
                    self._now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        self._seen[id(storage)] = weakref.ref(
            storage, partial(self._gone, id(storage), storage.nbytes())
        )

    def _gone(self, key: int, count: int, _: Any) -> None:
        self._now -= count
        del self._seen[key]


def storages(t: Tensor) -> list[torch.UntypedStorage]:
    """The memory of a tensor: of those inside of it where it is a wrapper, which has none itself and says that it has."""
    if not is_traceable_wrapper_subclass(t):
        return [t.untyped_storage()]
    inner = [getattr(t, name) for name in t.__tensor_flatten__()[0]]  # of a DTensor its mesh too
    return [storage for each in inner if isinstance(each, Tensor) for storage in storages(each)]


BOUNDS = {"weights": 0.05, "masters": 0.05, "gradients": 0.05, "moments": 0.05, "peak": 0.15}
"""How far the plan may be off, by kind."""


def measure(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Planned and measured bytes of `recipe` on this machine: of what stays from step to step; and over that, after the
    forward pass, at the peak of forward and backward pass together where gradients are all there, or with those that come in a
    step of one pass, as they are summed after it, and at the peak of the optimizer's step. A microbatch is random tokens. Of a
    pipeline those of this rank's stage, over all passes of a step, which under zero1 and none begins without gradients.
    """
    job = build(recipe)
    here, world = job.prepared.pipeline, current()
    passes = count_microbatches(job, world)
    count = passes if here is not None else 1
    stage = here.rank if here is not None else 0
    single = COMING in plan_memory(
        recipe, job.device.type, stage_parts(recipe, ranks())[stage], job.choice.backend
    )
    whole = (
        here is not None and job.prepared.fsdp2 and job.prepared.shard in ("none", "zero1")
    )  # gradients, of all passes
    between = passes > 2 and here is None and job.prepared.fsdp2 and job.prepared.shard == "zero2"
    shape = recipe.trainer.micro_batch_size * count, recipe.model.seq_length
    batch = [torch.randint(recipe.model.vocab_size, shape, device=job.device) for _ in range(2)]
    if recipe.data.resets:
        batch.append(torch.zeros(shape, dtype=torch.int32, device=job.device))  # documents
    passed: list[int] = []

    def one_pass(live: LiveBytes | None = None, last: bool = True) -> None:
        if job.prepared.fsdp2 and here is None:
            from fp8cfg.parallel.fsdp import prepare_microbatch

            prepare_microbatch(job.model, job.prepared.shard, last)
        with job.autocast():
            if here is not None:
                pipeline(job, world).train(batch, [1.0] * count)
                return
            loss = job.model(*batch)
            passed.append(live.now if live else 0)
            job.backward(loss)

    one_pass()
    job.optimizer.step()  # makes moments
    job.optimizer.zero_grad()
    gathered = _gathered(
        job
    )  # before quantized weights are kept of them, which are of one gathering
    with cached_weights(
        job.model, quantizes_weights_once(recipe, job.prepared.state, job.prepared.shard, passes)
    ):
        one_pass(last=passes == 1)
        if whole or single:
            job.optimizer.zero_grad()
        kept = stored(job)
        quantized = sum(layer.weight_cache.num_bytes for layer in fp8_linears(job.model))
        known = [*batch, *(t for tensors in kept.values() for t in tensors)]
        storing = nullcontext() if between or here is not None else job.optimizer.storing()
        with LiveBytes(known, [*gradients(job), *_partial_sums(job)], gathered) as live, storing:
            one_pass(live, last=not between)
        if between:
            with job.optimizer.storing():
                one_pass()
    if isinstance(job.optimizer, LowBitTraining):
        job.optimizer.store_grads()  # which came in stages
    kept["gradients"] = gradients(job)
    measured = {kind: sum(_local(t).nbytes for t in tensors) for kind, tensors in kept.items()}
    with LiveBytes(t for tensors in kept.values() for t in tensors) as summing:
        sum_gradients(job.prepared, job.optimizer, world)
    with LiveBytes(t for tensors in kept.values() for t in tensors) as stepping:
        job.optimizer.step()
    made = measured["gradients"] if whole else 0
    measured |= {
        "peak": live.peak + quantized - made,
        "gradient sums": summing.peak,
        "optimizer step": stepping.peak,
    }
    measured |= {"after forward": max(passed) + quantized} if passed else {}
    found = planned(recipe, job.device.type, job.choice.backend, stage)
    return {kind: (n, measured[kind]) for kind, n in found.items() if kind in measured}


def _local(t: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    local: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return local


def _gathered(job: Job) -> list[Tensor]:
    """The weights that FSDP2 gathers: it frees their memory and keeps the tensors."""
    if not job.prepared.fsdp2:
        return []
    from fp8cfg.parallel.fsdp import gathered_weights

    return gathered_weights(job.model)


def _partial_sums(job: Job) -> list[Tensor]:
    """The shards of gradients that one group of ranks has summed, which are gradients once all have."""
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
    """The tensors of `job` that stay from step to step, by kind, but for gradients; the scale of a codec-held weight is one of
    FP8 state's."""
    state = job.optimizer.state_tensors()
    shards = (
        list(job.optimizer.names) if job.prepared.fsdp2 and job.prepared.shard != "fsdp" else []
    )
    return {
        "weights": (
            [] if shards else list(job.model.parameters())
        ),  # gathered ones are not there between steps
        "masters": [*shards, *(t for name, t in state.items() if ".master" in name)],
        "moments": [t for name, t in state.items() if ".exp_avg" in name or ".momentum" in name],
        "FP8 state": list(job.model.buffers()),
    }


def gradients(job: Job) -> list[Tensor]:
    """The gradients of `job` as they are now, those that are stored in a codec among them."""
    shards = (
        job.optimizer.names if job.prepared.fsdp2 else ()
    )  # which gathered weights take the place of
    plain = [
        p.grad for p in dict.fromkeys([*job.model.parameters(), *shards]) if p.grad is not None
    ]
    return [*plain, *(t for stored in stored_grads(job.optimizer).values() for t in stored)]


def by_kind(job: Job) -> dict[str, list[Tensor]]:
    """What a rank holds of its parameters between two steps: `stored`, gradients, and of FP8 state the scales alone; and weights
    as FSDP2 gathers them for a step of zero1, zero2 and none, for which all ranks call it."""
    kept = stored(job)
    scales = [t for name, t in job.model.named_buffers() if name.endswith(("_scale", "scale_inv"))]
    weights = (
        _gathered(job) if job.prepared.fsdp2 and job.prepared.shard != "fsdp" else kept["weights"]
    )
    kinds = {
        "weights": weights,
        "masters": kept["masters"],
        "gradients": gradients(job),
        "moments": kept["moments"],
        "scales": scales,
    }
    return {kind: [_local(t) for t in tensors] for kind, tensors in kinds.items()}


def planned(recipe: Recipe, device: str, backend: str, stage: int = 0) -> dict[str, int]:
    """What the plan says of the kinds that `measure` measures, on `device` ("cpu" or "cuda") where `backend` multiplies, for that
    pipeline `stage`."""
    part = stage_parts(recipe, ranks())[stage]
    kinds = plan_memory(recipe, device, part, backend)
    linears = part_linears(recipe, part)
    stays = persistent_memory(recipe, part, linears, backend)
    state = stays.pop("FP8 copies")
    copies = kinds["FP8 copies"] - state
    logits = logit_bytes(LinearBytes(recipe, device, part, 0, backend)).kept if part.output else 0
    kept = kinds["activations"] + copies + logits
    shard, gathered = part.shard, kinds.get("gathered", 0)
    if shard == "fsdp":
        kept += root_bytes(recipe, part, linears, count_parameters(recipe, part).total)
    elif by_fsdp2(recipe, part.state, part.shards, backend):
        kept += (gathered := stays.pop("weights"))
        gathered += kinds["accumulation"]
        if not reduces_once(recipe, part):
            # The shards that earlier passes left.
            gathered -= unquantized_gradient_bytes(recipe, part, linears)
        elif recipe.trainer.strategy.pipeline_model_parallel_size == 1:
            gathered -= (
                gradient_bytes_before_step(recipe, part, linears) - kinds["gradients"]
            )  # are there before the last pass
    peak = kinds["activations"] + copies + kinds["logits"] + kinds["backward"] + gathered
    if COMING in kinds:
        peak += kinds["gradients"] + kinds[COMING]
    step = optimizer_step_bytes(recipe, part, linears, device, backend)
    sums = reduction_bytes(recipe, part, linears, device, backend)
    found = {"after forward": kept, "peak": peak, "gradient sums": sums, "optimizer step": step}
    return {
        **stays,
        "FP8 state": state,
        **{kind: n for kind, n in found.items() if n or kind != "gradient sums"},
    }


def measured_table(recipe: Recipe) -> str:
    """`measure` as text."""
    rows = [
        [kind, size(p), size(m), f"{p / m:.2f}" if m else ""]
        for kind, (p, m) in measure(recipe).items()
        if max(p, m) > 1024
    ]
    return table(["measured here", "planned", "measured", "ratio"], rows, right=(1, 2, 3))
