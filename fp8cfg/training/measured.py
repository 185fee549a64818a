"""Planned and measured bytes of a training step, by kind.

Measured are live tensor bytes, counted by a dispatch mode that sees every tensor made and, by a weak reference, when its
storage dies: saved tensors are among them, memory that the allocator keeps is not. The pass that is measured is the last of a
step of two microbatches: it finds all gradients there, and stores those that have a codec.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8cfg.builder import build
from fp8cfg.config.recipe import Recipe
from fp8cfg.job import Job
from fp8cfg.report.activations import LOGITS
from fp8cfg.report.layout import whole
from fp8cfg.report.memory import linears_of, memory, persistent, step_bytes
from fp8cfg.report.tables import size, table
from fp8cfg.training.reduction import stored_grads


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that are alive and were made inside of the mode: `now`, and at most, `peak`. `known` tensors are
    not counted; those of `mortal` are only when they die, which takes their bytes off."""

    def __init__(self, known: Iterable[Tensor], mortal: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = [t.untyped_storage() for t in known]
        self._seen: dict[int, Any] = {id(storage): None for storage in self._known}
        for t in mortal:
            self._watch(t.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and id(storage := t.untyped_storage()) not in self._seen:
                self._watch(storage)
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        self._seen[id(storage)] = weakref.ref(storage, partial(self._gone, id(storage), storage.nbytes()))

    def _gone(self, key: int, count: int, _: Any) -> None:
        self.now -= count
        del self._seen[key]


BOUNDS = {"weights": 0.05, "masters": 0.05, "gradients": 0.05, "moments": 0.05, "peak": 0.15}
"""How far the plan may be off, by kind."""


def measure(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Planned and measured bytes of `recipe` on this machine: of what stays from step to step; and over that, after the
    forward pass, at the peak of forward and backward pass together where gradients are all there, and at the peak of the
    optimizer's step. A microbatch is random tokens."""
    job = build(recipe)
    shape = recipe.trainer.micro_batch_size, recipe.model.seq_length
    batch = [torch.randint(recipe.model.vocab_size, shape, device=job.device) for _ in range(2)]
    passed: list[int] = []

    def one_pass(live: LiveBytes | None = None) -> None:
        with job.autocast():
            loss = job.model(*batch)
            passed.append(live.now if live else 0)
            job.backward(loss)

    one_pass()
    job.optimizer.step()  # makes moments
    job.optimizer.zero_grad()
    one_pass()
    kept = stored(job)
    known = [*batch, *(t for tensors in kept.values() for t in tensors), *_gathered(job)]
    with LiveBytes(known, gradients(job)) as live, job.optimizer.storing():
        one_pass(live)
    kept["gradients"] = gradients(job)
    measured = {kind: sum(t.nbytes for t in tensors) for kind, tensors in kept.items()}
    with LiveBytes(t for tensors in kept.values() for t in tensors) as stepping:
        job.optimizer.step()
    measured |= {"after forward": passed[-1], "peak": live.peak, "optimizer step": stepping.peak}
    return {kind: (n, measured[kind]) for kind, n in planned(recipe, job.device.type).items()}


def _gathered(job: Job) -> list[Tensor]:
    """The weights that FSDP2 gathers under shard=fsdp: it frees their memory and keeps the tensors, so they are not measured."""
    if job.recipe.storage.shard != "fsdp":
        return []
    from fp8cfg.training.fsdp import gathered_weights

    return gathered_weights(job.model)


def stored(job: Job) -> dict[str, list[Tensor]]:
    """The tensors of `job` that stay from step to step, by kind, but for gradients; the scale of a codec-held weight is one of
    FP8 state's."""
    state = job.optimizer.state_tensors()
    return {"weights": list(job.model.parameters()), "masters": [t for name, t in state.items() if ".master" in name],
            "moments": [t for name, t in state.items() if ".exp_avg" in name or ".momentum" in name],
            "FP8 state": list(job.model.buffers())}


def gradients(job: Job) -> list[Tensor]:
    """The gradients of `job` as they are now, those that are stored in a codec among them."""
    plain = [p.grad for p in job.model.parameters() if p.grad is not None]
    return [*plain, *(t for stored in stored_grads(job).values() for t in stored)]


def by_kind(job: Job) -> dict[str, list[Tensor]]:
    """What `job` holds of its parameters between two steps: `stored`, gradients, and of FP8 state the scales alone."""
    kept = stored(job)
    scales = [t for name, t in job.model.named_buffers() if name.endswith(("_scale", "scale_inv"))]
    return {"weights": kept["weights"], "masters": kept["masters"], "gradients": gradients(job), "moments": kept["moments"],
            "scales": scales}


def planned(recipe: Recipe, device: str) -> dict[str, int]:
    """What the plan says of the kinds that `measure` measures, on `device` ("cpu" or "cuda")."""
    kinds, part = memory(recipe, device), whole(recipe)
    linears = linears_of(recipe, part)
    stays = persistent(recipe, part, linears)
    state = stays.pop("FP8 copies")
    copies = kinds["FP8 copies"] - state
    kept = kinds["activations"] + copies + kinds["logits"] * 4 // LOGITS  # of the logits float32 log-probabilities
    peak = kinds["activations"] + copies + kinds["logits"] + kinds["backward"]
    return {**stays, "FP8 state": state, "after forward": kept, "peak": peak, "optimizer step": step_bytes(recipe, part, linears)}


def measured_table(recipe: Recipe) -> str:
    """`measure` as text."""
    rows = [[kind, size(p), size(m), f"{p / m:.2f}" if m else ""] for kind, (p, m) in measure(recipe).items() if max(p, m) > 1024]
    return table(["measured here", "planned", "measured", "ratio"], rows, right=(1, 2, 3))
