"""Many tensors through one step of Adam, in pieces, so that no more than a piece is ever float32; eager or compiled."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8cfg.numerics.codecs import spans
from fp8cfg.optim.low_bit.adam_step import Columns, Scales, Slot, find_amaxes, scales_from, step_at_once, store_step
from fp8cfg.optim.low_bit.kernel import kernel

AT_ONCE = 1 << 22
"""Elements up to which compiled code keeps the float32 values of a tensor for its scales, 12 bytes an element, rather than compute
them twice."""
WORTH_A_CALL = 64
"""Elements below which a tensor is left to eager code."""

Back = tuple[list[Tensor], list[Tensor]]
"""Tensors, and those that are copied into them after a step."""


class Work(NamedTuple):
    """A tensor's step: the tensor, what `hyper` gave, and the key of its random numbers where a codec rounds stochastically.
    `back` is of rows, see rows.py."""

    slot: Slot
    hyper: Tensor
    key: Tensor | None = None
    back: Sequence[Back] = ()


class _Piece(NamedTuple):
    owner: int
    slot: Slot
    start: int
    last: bool
    fast: bool


@torch.no_grad()
def adam_step(columns: Columns, decoupled: bool, works: Iterable[Work], compiled: bool = False) -> None:
    """Step every tensor of `works`, in place; rows are for compiled code. It gives the same bits on a CPU; on a GPU a compiler
    contracts products and sums, which changes the last bit of a float32 before it is rounded."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed")  # of Inductor, about kernels that are as fast
        if compiled:
            works = _at_once(columns, decoupled, works)
        _in_two_passes(columns, decoupled, [work for work in works if work.slot.source[0].numel()], compiled)


def _at_once(columns: Columns, decoupled: bool, works: Iterable[Work]) -> list[Work]:
    """Step, in compiled code, rows and tensors whose scales can wait; the others are returned."""
    others = []
    limit, block = AT_ONCE if columns.per_tensor else math.inf, columns.block
    step = kernel(step_at_once, columns, decoupled)
    for work in works:
        count = work.slot.source[0].numel()
        if count <= limit and _compilable(block, count):
            step(_in_blocks(work.slot, block), work.hyper, work.key)
            for own, new in work.back:
                torch._foreach_copy_(own, new)
        else:
            others.append(work)
    return others


def _in_two_passes(columns: Columns, decoupled: bool, works: Sequence[Work], compiled: bool) -> None:
    pieces = [piece for owner, work in enumerate(works) for piece in _pieces(columns, owner, work.slot, compiled)]
    scales = _new_scales(columns, decoupled, works, pieces)
    for owner, slot, start, last, fast in pieces:
        inputs = (slot, works[owner].hyper, works[owner].key, scales[owner])
        if fast:
            kernel(store_step, columns, decoupled)(*inputs)
        else:
            store_step(columns, decoupled, *inputs, start, last)


def _new_scales(columns: Columns, decoupled: bool, works: Sequence[Work], pieces: Sequence[_Piece]) -> list[Scales]:
    """For each of `works` the new scales of whole tensors."""
    if not works or not columns.per_tensor:
        return [Scales()] * len(works)
    found: list[list[Tensor]] = [[] for _ in works]
    for owner, slot, _, _, fast in pieces:
        inputs = (slot, works[owner].hyper)
        find = kernel(find_amaxes, columns, decoupled)(*inputs) if fast else find_amaxes(columns, decoupled, *inputs)
        found[owner].append(find)
    return scales_from(columns, torch.stack([torch.stack(amaxes).amax(0) for amaxes in found]))


def _pieces(columns: Columns, owner: int, slot: Slot, compiled: bool) -> Iterator[_Piece]:
    count = slot.source[0].numel()
    if compiled and _compilable(columns.block, count):
        yield _Piece(owner, _in_blocks(slot, columns.block), 0, True, True)
    else:
        yield from (_Piece(owner, _part(columns, slot, a, b), a, b == count, False) for a, b in spans(count))


def _compilable(block: int, count: int) -> bool:
    return count >= WORTH_A_CALL and count % block == 0


def _part(c: Columns, slot: Slot, start: int, stop: int) -> Slot:
    weight = None if slot.weight is None else c.weight.part(slot.weight, start, stop)
    copy = None if slot.copy is None else slot.copy[start:stop]
    return Slot(
        c.source.part(slot.source, start, stop), weight, c.exp_avg.part(slot.exp_avg, start, stop),
        c.exp_avg_sq.part(slot.exp_avg_sq, start, stop), copy, c.read.part(slot.grad, start, stop))  # fmt: skip


def _in_blocks(slot: Slot, block: int) -> Slot:
    """The data as [blocks, block]: in a flat tensor a compiler does not see which elements share a scale."""
    if block == 1:
        return slot
    rows: list[Any] = [x.view(-1, block) if isinstance(x, Tensor) else x and (x[0].view(-1, block), *x[1:]) for x in slot]
    return Slot(*rows)
