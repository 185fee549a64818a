"""Many tensors through one step of Adam, in pieces, so that no more than a piece is ever float32; eager or compiled."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8cfg.numerics.codecs import spans
from fp8cfg.optim.low_bit_step import Columns, Scales, Slot, find_amaxes, scales_from, store_step

TOGETHER = 4
"""Tensors of equal length in one compiled call: more instructions to overlap, and fewer calls."""
WORTH_A_CALL = 64
"""Elements below which a tensor is left to eager code."""
FUSE: dict[str, Any] = {
    "realize_reads_threshold": 1 << 20, "realize_acc_reads_threshold": 1 << 20, "realize_opcount_threshold": 1 << 20,
    "emulate_precision_casts": True, "size_asserts": False,
}  # fmt: skip
"""Inductor's options: compute again rather than keep a float32 copy of a tensor, and round where the code says so."""


class Work(NamedTuple):
    """A tensor's step: the tensor, what `hyper` gave, and the key of its random numbers where a codec rounds stochastically."""

    slot: Slot
    hyper: Tensor
    key: Tensor | None = None


class _Piece(NamedTuple):
    owner: int
    slot: Slot
    start: int
    last: bool


_Calls = list[tuple[list[_Piece], bool]]  # the pieces of one call, and whether it is compiled


@torch.no_grad()
def adam_step(columns: Columns, decoupled: bool, works: Sequence[Work], compiled: bool = False) -> None:
    """Step every tensor of `works`, in place. Compiled code gives the same bits on a CPU; on a GPU a compiler contracts
    products and sums, which changes the last bit of a float32 before it is rounded."""
    works = [work for work in works if work.slot.source[0].numel()]
    calls = _calls(columns, works, compiled)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed")  # of Inductor, about kernels that are as fast
        _run(columns, decoupled, works, calls)


def _run(columns: Columns, decoupled: bool, works: Sequence[Work], calls: _Calls) -> None:
    scales = _new_scales(columns, decoupled, works, calls)
    for pieces, fast in calls:
        keys, new = [works[p.owner].key for p in pieces], [scales[p.owner] for p in pieces]
        if fast:
            _compiled(store_step, columns, decoupled)(*_inputs(works, pieces), keys, new)
        else:
            store_step(columns, decoupled, *_inputs(works, pieces), keys, new, pieces[0].start, pieces[0].last)


def _calls(columns: Columns, works: Sequence[Work], compiled: bool) -> _Calls:
    """The work in pieces. Compiled code takes whole tensors, of whole blocks, together with others of their length."""
    calls: _Calls = []
    alike: dict[Any, list[_Piece]] = {}
    for owner, (slot, hyper, _) in enumerate(works):
        count = slot.source[0].numel()
        if compiled and count >= WORTH_A_CALL and count % columns.block == 0:
            kind = (count, id(hyper), slot.grad[0].dtype, slot.copy is None)
            alike.setdefault(kind, []).append(_Piece(owner, _in_rows(slot, columns.block), 0, True))
        else:
            calls += [([_Piece(owner, _part(columns, slot, a, b), a, b == count)], False) for a, b in spans(count)]
    together = TOGETHER if columns.block == 1 else 1  # blocks take long to compile as it is
    for pieces in alike.values():
        whole = len(pieces) - len(pieces) % together
        calls += [(pieces[i : i + together], True) for i in range(0, whole, together)]
        calls += [([piece], True) for piece in pieces[whole:]]
    return calls


def _part(c: Columns, slot: Slot, start: int, stop: int) -> Slot:
    weight = None if slot.weight is None else c.weight.part(slot.weight, start, stop)
    copy = None if slot.copy is None else slot.copy[start:stop]
    return Slot(
        c.source.part(slot.source, start, stop), weight, c.exp_avg.part(slot.exp_avg, start, stop),
        c.exp_avg_sq.part(slot.exp_avg_sq, start, stop), copy, c.read.part(slot.grad, start, stop))  # fmt: skip


def _in_rows(slot: Slot, block: int) -> Slot:
    """The data as [blocks, block]: in a flat tensor a compiler does not see which elements share a scale."""
    if block == 1:
        return slot
    rows: list[Any] = [x.view(-1, block) if isinstance(x, Tensor) else x and (x[0].view(-1, block), *x[1:]) for x in slot]
    return Slot(*rows)


def _inputs(works: Sequence[Work], pieces: list[_Piece]) -> tuple[list[Slot], Tensor]:
    return [p.slot for p in pieces], works[pieces[0].owner].hyper


def _new_scales(columns: Columns, decoupled: bool, works: Sequence[Work], calls: _Calls) -> list[Scales]:
    """For each of `works` the new scales of whole tensors."""
    if not works or not any(codec is not None and codec.per_tensor for codec in columns.written):
        return [Scales()] * len(works)
    found: list[list[Tensor]] = [[] for _ in works]
    for pieces, fast in calls:
        find = _compiled(find_amaxes, columns, decoupled) if fast else functools.partial(find_amaxes, columns, decoupled)
        for piece, amaxes in zip(pieces, find(*_inputs(works, pieces)).unbind(), strict=True):
            found[piece.owner].append(amaxes)
    return scales_from(columns, torch.stack([rows[0] if len(rows) == 1 else torch.stack(rows).amax(0) for rows in found]))


_CONSTANTS: dict[str, tuple[Columns, bool]] = {}


@functools.cache
def _compiled(function: Callable[..., Any], columns: Columns, decoupled: bool) -> Callable[..., Any]:
    name = f"{function.__name__}_{len(_CONSTANTS)}"
    _CONSTANTS[name] = (columns, decoupled)

    def run(*args: Any) -> Any:
        return function(*_CONSTANTS[name], *args)  # Dynamo takes the numbers in a global for constants, not those in a closure

    # Dynamo counts recompilations by code object and stops at eight; without this all kernels would share one.
    run.__code__ = run.__code__.replace(co_name=name)
    return torch.compile(run, fullgraph=True, dynamic=True, options=FUSE)
