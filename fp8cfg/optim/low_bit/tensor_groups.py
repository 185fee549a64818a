"""Adam over many tensors without a whole one in float32: eagerly in pieces, or each tensor in compiled code.

Compiled code takes a tensor at a time, as torchao's low-bit optimizers do (torchao/optim/adam.py); on a GPU always, as theirs, for
eager code launches some eighty kernels a piece there.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8cfg.numerics.codecs import spans
from fp8cfg.numerics.fused_quantize import TRITON
from fp8cfg.optim.low_bit.adam_step import Scales, Slot, find_amaxes, find_scales, key_of_step, scales_from, store_step, store_whole
from fp8cfg.optim.low_bit.columns import Columns

LEAST_COMPILED = 64
"""Elements below which a tensor is left to eager code: torch.compile takes sizes of 0 and 1 for constants, and a size that is also
that of `hyper` or of a key for the same one, and would compile for each anew."""
OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # round where the code says so
    **dict.fromkeys(("realize_reads_threshold", "realize_acc_reads_threshold", "realize_opcount_threshold"), 1 << 20),
}
"""Inductor's options. Large thresholds: compute again rather than keep a float32 copy of a tensor."""

_CONSTANTS: dict[str, tuple[Columns, bool]] = {}


class Work(NamedTuple):
    """One tensor to step: the tensor, ten numbers on its device (`hyper`), the key of its random numbers where a codec rounds
    stochastically, and, a bool [], whether the step is to be skipped, where the device alone knows."""

    slot: Slot
    hyper: Tensor
    key: Tensor | None = None
    skip: Tensor | None = None


def compiles(device: torch.device) -> bool:
    """Whether steps on `device` are compiled, whoever asks."""
    return TRITON and device.type == "cuda"


@torch.no_grad()
def adam_step(columns: Columns, decoupled: bool, works: Iterable[Work], compiled: bool = False) -> None:
    """Step every tensor of `works`, in place. Compiled code gives the same bits on a CPU; on a GPU a compiler contracts products
    and sums, which changes the last bit of a float32 before it is rounded."""
    with warnings.catch_warnings():
        # Inductor advises against both dtypes in one CPU kernel. Seen with torch 2.13; ends with the torch that does not.
        warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed")
        for work in works:
            count = work.slot.source[0].numel()
            if (compiled or compiles(work.hyper.device)) and count >= LEAST_COMPILED and count % columns.block == 0:
                _step_compiled(columns, decoupled, work)
            elif count:
                _step_in_pieces(columns, decoupled, work)


def _step_in_pieces(columns: Columns, decoupled: bool, work: Work) -> None:
    slot, hyper, key, skip = work
    count, device = slot.source[0].numel(), slot.source[0].device
    scales = Scales()
    if columns.per_tensor:
        amaxes = [find_amaxes(columns, decoupled, _part(columns, slot, a, b), hyper) for a, b in spans(count, device)]
        scales = scales_from(columns, torch.stack(amaxes).amax(0))
    key = key_of_step(key, hyper)
    for a, b in spans(count, device):
        store_step(columns, decoupled, _part(columns, slot, a, b), hyper, key, scales, skip, a, b == count)


def _step_compiled(columns: Columns, decoupled: bool, work: Work) -> None:
    slot = _in_blocks(work.slot, columns.block)
    scales = _compiled(find_scales, columns, decoupled)(slot, work.hyper) if columns.per_tensor else Scales()
    _compiled(store_whole, columns, decoupled)(slot, work.hyper, work.key, scales, work.skip)


@functools.cache
def _compiled(function: Callable[..., Any], columns: Columns, decoupled: bool) -> Callable[..., Any]:
    """`function`, of adam_step.py, compiled for these columns; it takes the other arguments."""
    name = f"{function.__name__}_{len(_CONSTANTS)}"
    _CONSTANTS[name] = (columns, decoupled)

    def run(*args: Any) -> Any:
        return function(*_CONSTANTS[name], *args)  # Dynamo takes the numbers in a global for constants, not those in a closure

    # Dynamo counts recompilations by code object and stops at eight, and these would all share one. Seen with torch 2.13, whose
    # isolate_recompiles ends it once no older torch is supported.
    run.__code__ = run.__code__.replace(co_name=name)
    return torch.compile(run, fullgraph=True, dynamic=True, options=OPTIONS)


def _part(c: Columns, slot: Slot, start: int, stop: int) -> Slot:
    weight = None if slot.weight is None else c.weight.part(slot.weight, start, stop)
    copy = None if slot.copy is None else slot.copy[start:stop]
    return Slot(
        c.source.part(slot.source, start, stop), weight, c.exp_avg.part(slot.exp_avg, start, stop),
        c.exp_avg_sq.part(slot.exp_avg_sq, start, stop), copy, c.read.part(slot.grad, start, stop))  # fmt: skip


def _in_blocks(slot: Slot, block: int) -> Slot:
    """The data as [blocks, block]: in a flat tensor a compiler cannot tell which elements share a scale."""
    if block == 1:
        return slot
    rows: list[Any] = [x.view(-1, block) if isinstance(x, Tensor) else x and (x[0].view(-1, block), *x[1:]) for x in slot]
    return Slot(*rows)
