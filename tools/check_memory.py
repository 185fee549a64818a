#!/usr/bin/env python3
"""Planned and measured bytes of a training step on a CPU, by kind: how true `fp8cfg plan` is about memory.

    python tools/check_memory.py                                   # llama_tiny and 50M parameters, all precisions: five minutes
    python tools/check_memory.py --size tiny precision=bf16_fp8    # one of them

Measured are live tensor bytes, counted by a dispatch mode that sees every tensor made and, by a weak reference, when its
storage dies: saved tensors are among them, memory that the allocator keeps is not. The pass that is measured finds all
gradients there, as the later microbatches of a step do. Exits with 1 where a bound does not hold.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fp8cfg
from fp8cfg.config.recipe import Recipe
from fp8cfg.report.activations import LOGITS
from fp8cfg.report.layout import whole
from fp8cfg.report.memory import linears_of, memory, persistent, step_bytes
from fp8cfg.report.tables import size, table
from fp8cfg.training.data import run_data

BOUNDS = {"weights": 0.05, "masters": 0.05, "gradients": 0.05, "moments": 0.05, "peak": 0.15}
SIZES = {
    "tiny": ["recipe=llama_tiny"],
    "mid": ["recipe=llama_tiny", "model.hidden_size=512", "model.ffn_hidden_size=1408", "model.num_layers=12",
            "model.num_attention_heads=8", "model.num_query_groups=4", "model.vocab_size=16384", "trainer.micro_batch_size=2"],
}
PRECISIONS = [["precision=fp32"], ["precision=bf16"], ["precision=fp16", "precision.loss_scale=1024"], ["precision=bf16_fp8"], ["precision=bf16_fp8", "fp8.params=false"],
              ["precision=bf16_fp8_current"], ["precision=bf16_fp8_current", "fp8.params=false"]]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive and were made inside of the mode: `now`, and at most, `peak`. `known` tensors are
    not counted."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = [t.untyped_storage() for t in known]
        self._seen: dict[int, Any] = {id(storage): None for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and id(storage := t.untyped_storage()) not in self._seen:
                self._seen[id(storage)] = weakref.ref(storage, partial(self._gone, id(storage), storage.nbytes()))
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key: int, count: int, _: Any) -> None:
        self.now -= count
        del self._seen[key]


def measure(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Planned and measured bytes of `recipe` on this CPU: of what stays from step to step; and over that, after the forward
    pass, at the peak of forward and backward pass together, and at the peak of the optimizer's step."""
    job = fp8cfg.build(recipe)
    batches, _ = run_data(recipe)
    batch = batches.batch(0, 0, 1, 0, recipe.trainer.global_batch_size // recipe.trainer.micro_batch_size)
    passed: list[int] = []

    def one_pass(live: LiveBytes | None = None) -> None:
        with job.autocast():
            loss = job.model(*batch)
            passed.append(live.now if live else 0)
            job.backward(loss)

    one_pass()
    job.optimizer.step()  # makes moments, and keeps the gradients
    parameters, state = list(job.model.parameters()), job.optimizer.state_tensors()
    held = {
        "weights": parameters, "masters": [t for name, t in state.items() if name.endswith(".master")],
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "moments": [t for name, t in state.items() if not name.endswith(".master")], "FP8 state": list(job.model.buffers())}
    with LiveBytes([*batch, *(t for tensors in held.values() for t in tensors)]) as live:
        one_pass(live)
    measured = {kind: sum(t.nbytes for t in tensors) for kind, tensors in held.items()}
    with LiveBytes(t for tensors in held.values() for t in tensors) as stepping:
        job.optimizer.step()
    measured |= {"after forward": passed[-1], "peak": live.peak, "optimizer step": stepping.peak}
    return {kind: (n, measured[kind]) for kind, n in planned(recipe).items()}


def planned(recipe: Recipe) -> dict[str, int]:
    """What the plan says of the kinds that `measure` measures."""
    kinds, part = memory(recipe, "cpu"), whole(recipe)
    linears = linears_of(recipe, part)
    stays = persistent(recipe, part, linears)
    state = stays.pop("FP8 copies")
    copies = kinds["FP8 copies"] - state
    kept = kinds["activations"] + copies + kinds["logits"] * 4 // LOGITS  # of the logits float32 log-probabilities
    peak = kinds["activations"] + copies + kinds["logits"] + kinds["backward"]
    return {**stays, "FP8 state": state, "after forward": kept, "peak": peak, "optimizer step": step_bytes(recipe, part, linears)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="one precision and other overrides in place of all precisions")
    parser.add_argument("--size", choices=list(SIZES), help="this one alone")
    parser.add_argument("--recompute", choices=["none", "full"], help="this one alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    missed = []
    for name in [args.size] if args.size else SIZES:
        for words in [args.words] if args.words else PRECISIONS:
            for recompute in [args.recompute] if args.recompute else ["none", "full"]:
                every = [*SIZES[name], *words, "data=tiny", f"model.recompute_granularity={recompute}"]
                found = measure(fp8cfg.compose(every))
                rows = [[kind, size(p), size(m), f"{p / m:.3f}" if m else "", f"{bound:.0%}" if (bound := BOUNDS.get(kind)) else ""]
                        for kind, (p, m) in found.items() if p or m]
                print(table([f"{name} {' '.join(words)} {recompute}", "planned", "measured", "ratio", "bound"], rows, right=(1, 2, 3, 4)), end="\n\n", flush=True)
                missed += [f"{' '.join(every)}: {kind}" for kind, bound in BOUNDS.items() if abs(found[kind][0] - found[kind][1]) > bound * found[kind][1]]
    print("all within bounds" if not missed else "out of bounds:\n" + "\n".join(missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
