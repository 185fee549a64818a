"""Adam step of many stored tensors: eagerly in pieces, or several tensors per launch when compiled.

Compiled code computes amaxes of rows. Scales of all tensors follow in one launch. They are written
after all tensors are stored.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental import _config as shape_config

from fp8cfg.numerics.codecs import chunk_ranges
from fp8cfg.numerics.formats import Start, advance_start
from fp8cfg.numerics.kernels.launch import HAS_TRITON
from fp8cfg.optim.low_bit.adam_update import (
    ROW,
    Scales,
    Slot,
    find_amaxes,
    find_row_amaxes_of_several,
    key_of_step,
    moved,
    scales_from,
    scales_of_all,
    store_scales,
    store_several,
    store_step,
)
from fp8cfg.optim.low_bit.columns import Columns

LEAST_COMPILED = 64
"""Smallest tensor for compiled code.

torch.compile treats sizes 0 and 1 as constants, and a size equal to the size of `hyper` or of a key
as the same symbol. It would recompile for each of these.
"""
OPTIONS: dict[str, Any] = {
    # Same rounding as eager code. Triton's default division is approximate.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    **dict.fromkeys(
        ("realize_reads_threshold", "realize_acc_reads_threshold", "realize_opcount_threshold"),
        1 << 20,
    ),
}
"""Inductor options. Large thresholds recompute values instead of storing float32 copies."""
TOGETHER = 4
"""Tensors per launch on a GPU.

Eight take twice as long to compile and split into two kernels, because the number of
arguments is limited.
"""
Options = tuple[tuple[str, int], ...]
REDUCED: Options = (("combo_kernels", True), ("combo_kernels_autotune", 1))
"""Options for reductions of several tensors. Without autotuning a program would take 1024 rows."""
STORED: Options = (
    ("combo_kernels", True),
    ("combo_kernels_autotune", 0),
    ("combo_kernels_pointwise_only", True),
)
"""Options for code that writes several tensors.

Autotuning would copy them. Combined reductions without autotuning would take 1024 values per
thread, and LLVM would optimize such code for minutes.
"""
_CONSTANTS: dict[str, tuple[Any, ...]] = {}


def compiles(device: torch.device) -> bool:
    """Whether steps on `device` are always compiled."""
    return HAS_TRITON and device.type == "cuda"


def in_one_piece(count: int, block: int) -> bool:
    """Whether compiled code supports a tensor of `count` elements with scales for each `block`."""
    return count >= LEAST_COMPILED and count % block == 0


def together(device: torch.device) -> int:
    """Returns the largest number of tensors in one launch on `device`."""
    return TOGETHER if compiles(device) else 1


def launch_groups(kinds: Sequence[Hashable], most: int) -> Iterator[list[int]]:
    """Yields groups of indices with equal `kinds`, at most `most` in each."""
    places = defaultdict[Hashable, list[int]](list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    for found in places.values():
        yield from (found[i : i + most] for i in range(0, len(found), most))


@functools.cache
def compiled_code(
    function: Callable[..., Any], *constants: Any, more: Options = ()
) -> Callable[..., Any]:
    """Returns a compiled function with its first arguments fixed.

    Args:
        function: The function.
        constants: Its first arguments, such as columns.
        more: Inductor options for a list of several tensors as the next argument. Each length of
            the list is compiled separately.
    """
    if not more:
        return _compiled(function, constants, ())
    of_length = functools.cache(lambda length: _compiled(function, constants, more))

    def run_of_any_sizes(several: Sequence[Any], *args: Any) -> Any:
        # Tensors with equal sizes now may have different sizes next time.
        with shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return of_length(len(several))(several, *args)

    return run_of_any_sizes


def _compiled(
    function: Callable[..., Any], constants: tuple[Any, ...], more: Options
) -> Callable[..., Any]:
    """Compiles `function` with fixed first arguments."""
    name = f"{function.__name__}_{len(_CONSTANTS)}"
    _CONSTANTS[name] = constants

    def run(*args: Any) -> Any:
        # Dynamo treats numbers from a global as constants, but not numbers from a closure.
        return function(*_CONSTANTS[name], *args)

    # Dynamo stops after eight recompilations of a code object. All functions here would share one.
    # Seen with torch 2.13. Its option isolate_recompiles can replace this once older versions are
    # no longer supported.
    run.__code__ = run.__code__.replace(co_name=name)
    return torch.compile(run, fullgraph=True, dynamic=True, options=OPTIONS | dict(more))


class Work(NamedTuple):
    """A tensor to step.

    Attributes:
        slot: The stored tensors.
        hyper: Factors of the step, float32 [10] on the device.
        key: Random key of the tensor, if a codec rounds stochastically.
        skip: Whether to skip the step, bool [] on the device, or None if the host has decided.
        first: Position of the first element in the full tensor.
    """

    slot: Slot
    hyper: Tensor
    key: Tensor | None = None
    skip: Tensor | None = None
    first: Start = 0


@torch.no_grad()
def adam_step(
    columns: Columns,
    decoupled: bool,
    works: Iterable[Work],
    compiled: bool = False,
    amaxes: Iterable[Tensor | None] = repeat(None),
) -> None:
    """Steps every tensor of `works`, in place.

    Compiled code has the same bits as eager code on a CPU. On a GPU the compiler contracts products
    and sums, which changes the last float32 bit before rounding.

    Args:
        columns: Codecs of the tensors.
        decoupled: Whether weight decay is decoupled (AdamW).
        works: The tensors.
        compiled: Whether to compile on a CPU too.
        amaxes: Amaxes of the full tensors [3] if `works` are shards, from `amaxes_of_steps`.
    """
    with _dtypes_may_mix():
        in_one = list[tuple[Work, Tensor | None]]()
        for work, of_whole in zip(works, amaxes):  # noqa: B905  # amaxes may be endless
            if _in_one(columns, work, compiled):
                in_one.append((work, of_whole))
            # An empty shard still stores the scales of the full tensor.
            elif work.slot.source[0].numel() or of_whole is not None:
                _step_in_pieces(columns, decoupled, work, of_whole)
        _step_compiled(columns, decoupled, in_one)


@torch.no_grad()
def amaxes_of_steps(
    columns: Columns, decoupled: bool, works: Sequence[Work], compiled: bool = False
) -> Tensor:
    """Returns the amaxes of weight and moments after the steps, [works, 3].

    0 for a column without a per-tensor scale.
    """
    with _dtypes_may_mix():
        in_one = [work for work in works if _in_one(columns, work, compiled)]
        left = iter(_amaxes_compiled(columns, decoupled, in_one).unbind() if in_one else ())
        return torch.stack(
            [
                (
                    next(left)
                    if _in_one(columns, work, compiled)
                    else _amaxes_in_pieces(columns, decoupled, work)
                )
                for work in works
            ]
        )


def _amaxes_compiled(columns: Columns, decoupled: bool, works: Sequence[Work]) -> Tensor:
    """Computes `amaxes_of_steps` in compiled code."""
    slots = [_in_blocks(work.slot, columns.block) for work in works]
    found = iter(
        _wanted_amaxes(columns, decoupled, slots, works, _groups(columns, works)).unbind(1)
    )
    return torch.stack(
        [
            next(found) if wanted else works[0].hyper.new_zeros(len(works))
            for wanted in columns.amaxes
        ],
        1,
    )


def _amaxes_in_pieces(columns: Columns, decoupled: bool, work: Work) -> Tensor:
    """Returns the amaxes [3] of one tensor."""
    amaxes = torch.zeros(3, dtype=torch.float32, device=work.hyper.device)
    for part, _ in _pieces(columns, work):
        values = moved(columns, decoupled, part, work.hyper)
        amaxes = torch.maximum(amaxes, find_amaxes(columns, values))
    return amaxes


@contextmanager
def _dtypes_may_mix() -> Iterator[None]:
    """Context without Inductor's warning about bf16 and fp16 in one kernel."""
    with warnings.catch_warnings():
        # torch 2.13 warns about both dtypes in one CPU kernel.
        warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed")
        yield


def _in_one(columns: Columns, work: Work, compiled: bool) -> bool:
    """Whether compiled code steps the tensor."""
    return (compiled or compiles(work.hyper.device)) and in_one_piece(
        work.slot.source[0].numel(), columns.block
    )


def _step_in_pieces(columns: Columns, decoupled: bool, work: Work, of_whole: Tensor | None) -> None:
    """Steps one tensor eagerly, a piece at a time."""
    scales = Scales()
    if columns.per_tensor:
        if of_whole is None:
            of_whole = _amaxes_in_pieces(columns, decoupled, work)
        scales = scales_from(columns, of_whole)
    key = key_of_step(work.key, work.hyper)
    for part, start in _pieces(columns, work):
        values = moved(columns, decoupled, part, work.hyper)
        store_step(columns, part, values, key, scales, work.skip, start)
    store_scales(work.slot, scales, work.skip)


def _pieces(columns: Columns, work: Work) -> Iterator[tuple[Slot, Start]]:
    """Yields the pieces of a tensor with the position of their first element in the full tensor."""
    source = work.slot.source[0]
    for start, stop in chunk_ranges(source.numel(), source.device):
        yield _part(columns, work.slot, start, stop), advance_start(work.first, start)


def _step_compiled(
    columns: Columns, decoupled: bool, works: Sequence[tuple[Work, Tensor | None]]
) -> None:
    """Steps tensors in compiled code. Empty lists are allowed."""
    slots = [_in_blocks(work.slot, columns.block) for work, _ in works]
    groups = _groups(columns, [work for work, _ in works])
    scales = (
        _scales(columns, decoupled, slots, works, groups)
        if columns.per_tensor and works
        else [Scales()] * len(works)
    )
    for group in _stored_together(columns, groups):
        store = compiled_code(store_several, columns, decoupled, more=STORED)
        of = [works[i][0] for i in group]
        firsts = ([work.first for work in of],) if of[0].first else ()
        store(
            [slots[i] for i in group],
            of[0].hyper,
            [work.key for work in of],
            [scales[i] for i in group],
            of[0].skip,
            *firsts,
        )
    pairs = [
        (stored[1], scale)
        for slot, new in zip(slots, scales, strict=True)
        for stored, scale in zip(
            (slot.source, slot.weight, slot.exp_avg, slot.exp_avg_sq), new, strict=True
        )
        if stored is not None and scale is not None
    ]
    if pairs:
        old, made = (list(each) for each in zip(*pairs, strict=True))
        skip = works[0][0].skip  # equal for all tensors of a step
        torch._foreach_copy_(
            old,
            (
                made
                if skip is None
                else list(torch.where(skip, torch.stack(old), torch.stack(made)).unbind())
            ),
        )


def _groups(columns: Columns, works: Sequence[Work]) -> list[list[int]]:
    """Returns indices of works for each launch: equal factors, dtypes, and divisibility by ROW.

    Tensors without a per-tensor scale need one launch each. Single tensors compile faster.
    """
    most = together(works[0].hyper.device) if works and columns.per_tensor else 1
    sizes = [work.slot.source[0].numel() for work in works]
    # Inductor tunes kernels for the sizes of its first call.
    order = sorted(range(len(works)), key=sizes.__getitem__)
    kinds = [
        (id(work.hyper), type(work.first), bool(work.first), size % ROW == 0, *_dtypes(work.slot))
        for work, size in ((works[i], sizes[i]) for i in order)
    ]
    return [[order[place] for place in group] for group in launch_groups(kinds, most)]


def _stored_together(columns: Columns, groups: list[list[int]]) -> list[list[int]]:
    """Returns indices that one launch stores. Blockwise codecs need one launch for each tensor."""
    return [[place] for group in groups for place in group] if columns.blocks_written else groups


def _dtypes(slot: Slot) -> list[Hashable]:
    """Returns the dtypes of all tensors in a slot."""
    return [
        x.dtype if isinstance(x, Tensor) else None if x is None else tuple(t.dtype for t in x)
        for x in slot
    ]


def _scales(
    columns: Columns,
    decoupled: bool,
    slots: Sequence[Slot],
    works: Sequence[tuple[Work, Tensor | None]],
    groups: list[list[int]],
) -> list[Scales]:
    """Returns the new scales of each tensor, computed together, from known or new amaxes."""
    named = (*Scales._fields,)
    if known := [of_whole for _, of_whole in works if of_whole is not None]:
        every = torch.stack(known)
        amaxes = torch.stack([every[:, i] for i, wanted in enumerate(columns.amaxes) if wanted], 1)
    else:
        amaxes = _wanted_amaxes(columns, decoupled, slots, [work for work, _ in works], groups)
    made = compiled_code(scales_of_all, columns, decoupled)(amaxes)
    there = [
        name
        for name, codec in zip(named, columns.written, strict=True)
        if codec is not None and codec.per_tensor
    ]
    return [
        Scales(**{name: each[named.index(name), 0] for name in there}) for each in made.unbind()
    ]


def _wanted_amaxes(
    columns: Columns,
    decoupled: bool,
    slots: Sequence[Slot],
    works: Sequence[Work],
    groups: list[list[int]],
) -> Tensor:
    """Returns the needed amaxes [works, amaxes] from amaxes of rows."""
    find = compiled_code(find_row_amaxes_of_several, columns, decoupled, more=REDUCED)
    found = {
        i: rows
        for group in groups
        for i, rows in zip(
            group, find([slots[i] for i in group], works[group[0]].hyper), strict=True
        )
    }
    rows = [row for i in range(len(works)) for row in found[i]]
    return torch.stack(torch._foreach_norm(rows, math.inf)).view(len(works), -1)


def _part(c: Columns, slot: Slot, start: int, stop: int) -> Slot:
    """Returns the elements `start` to `stop` of all tensors in a slot."""
    weight = None if slot.weight is None else c.weight.part(slot.weight, start, stop)
    copy = None if slot.copy is None else slot.copy[start:stop]
    return Slot(
        c.source.part(slot.source, start, stop),
        weight,
        c.exp_avg.part(slot.exp_avg, start, stop),
        c.exp_avg_sq.part(slot.exp_avg_sq, start, stop),
        copy,
        c.read.part(slot.grad, start, stop),
    )


def _in_blocks(slot: Slot, block: int) -> Slot:
    """Returns the tensors of a slot as [blocks, block].

    In a flat tensor the compiler cannot tell which elements share a scale.
    """
    if block == 1:
        return slot
    rows: list[Any] = [
        x.view(-1, block) if isinstance(x, Tensor) else x and (x[0].view(-1, block), *x[1:])
        for x in slot
    ]
    return Slot(*rows)
