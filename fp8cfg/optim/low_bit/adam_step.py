"""Adam step of many stored tensors: in pieces in eager code, or several tensors a launch in compiled code.

Compiled code takes the amaxes of rows. What follows from them is computed for all tensors at once, and their scales are written when
all are stored.
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
"""Elements below which a tensor is left to eager code: torch.compile takes sizes of 0 and 1 for constants, and a size that is also
that of `hyper` or of a key for the same one, and would compile for each anew."""
OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # round where the code says so
    "eager_numerics.division_rounding": (
        True
    ),  # and as eager code does: Triton's own division is an approximation
    **dict.fromkeys(
        ("realize_reads_threshold", "realize_acc_reads_threshold", "realize_opcount_threshold"),
        1 << 20,
    ),
}
"""Inductor's options. Large thresholds: compute again rather than keep a float32 copy of a tensor."""
TOGETHER = 4
"""Tensors of one launch on a GPU. Of eight the compiler needs twice as long, and makes two kernels for want of arguments."""
Options = tuple[tuple[str, int], ...]
REDUCED: Options = (("combo_kernels", True), ("combo_kernels_autotune", 1))
"""Options of reductions of several tensors. Without Inductor's heuristics for reductions a program would take 1024 rows."""
STORED: Options = (
    ("combo_kernels", True),
    ("combo_kernels_autotune", 0),
    ("combo_kernels_pointwise_only", True),
)
"""Options of code that writes several tensors: to try it out would copy them. Reductions that are combined and not tried out would
take 1024 rows of 256 elements a program, 1024 numbers a thread: code that LLVM optimizes for minutes."""
_CONSTANTS: dict[str, tuple[Any, ...]] = {}


def compiles(device: torch.device) -> bool:
    """Whether steps on `device` are compiled, whoever asks."""
    return HAS_TRITON and device.type == "cuda"


def in_one_piece(count: int, block: int) -> bool:
    """Whether compiled code takes a tensor of `count` elements, so many of which share a scale."""
    return count >= LEAST_COMPILED and count % block == 0


def together(device: torch.device) -> int:
    """The tensors that one piece of code on `device` takes at most."""
    return TOGETHER if compiles(device) else 1


def launch_groups(kinds: Sequence[Hashable], most: int) -> Iterator[list[int]]:
    """Places in `kinds` of what is of one kind, at most so many at a time."""
    places = defaultdict[Hashable, list[int]](list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    for found in places.values():
        yield from (found[i : i + most] for i in range(0, len(found), most))


@functools.cache
def compiled_code(
    function: Callable[..., Any], *constants: Any, more: Options = ()
) -> Callable[..., Any]:
    """`function`, whose first arguments are `constants`, such as columns of codecs, compiled; it takes the other arguments. With
    `more` options the first of these is a list of several tensors, and each length has code of its own.
    """
    if not more:
        return _compiled(function, constants, ())
    of_length = functools.cache(lambda length: _compiled(function, constants, more))

    def run_of_any_sizes(several: Sequence[Any], *args: Any) -> Any:
        # What is of one size now may be of several the next time.
        with shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return of_length(len(several))(several, *args)

    return run_of_any_sizes


def _compiled(
    function: Callable[..., Any], constants: tuple[Any, ...], more: Options
) -> Callable[..., Any]:
    name = f"{function.__name__}_{len(_CONSTANTS)}"
    _CONSTANTS[name] = constants

    def run(*args: Any) -> Any:
        return function(
            *_CONSTANTS[name], *args
        )  # Dynamo takes the numbers in a global for constants, not those in a closure

    # Dynamo counts recompilations by code object and stops at eight, and these would all share one. Seen with torch 2.13, whose
    # isolate_recompiles ends it once no older torch is supported.
    run.__code__ = run.__code__.replace(co_name=name)
    return torch.compile(run, fullgraph=True, dynamic=True, options=OPTIONS | dict(more))


class Work(NamedTuple):
    """One tensor to step: the tensor, ten numbers on its device (`hyper`), the key of its random numbers where a codec rounds
    stochastically, a bool [], whether the step is to be skipped, where the device alone knows, and of a shard the place of its
    first element in the whole."""

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
    """Step every tensor of `works`, in place. Compiled code gives the same bits on a CPU; on a GPU a compiler contracts products
    and sums, which changes the last bit of a float32 before it is rounded. `amaxes` are those of whole tensors of which works are
    shards, as `amaxes_of_steps` found them in each."""
    with _dtypes_may_mix():
        in_one = list[tuple[Work, Tensor | None]]()
        for work, of_whole in zip(works, amaxes):  # noqa: B905  # of works alone there is an end
            if _in_one(columns, work, compiled):
                in_one.append((work, of_whole))
            elif (
                work.slot.source[0].numel() or of_whole is not None
            ):  # an empty shard has the scales of the whole too
                _step_in_pieces(columns, decoupled, work, of_whole)
        _step_compiled(columns, decoupled, in_one)


@torch.no_grad()
def amaxes_of_steps(
    columns: Columns, decoupled: bool, works: Sequence[Work], compiled: bool = False
) -> Tensor:
    """The amaxes [works, 3] of weight and moments that steps are about to store; 0 for a column without a scale for the whole
    tensor."""
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
    """The amaxes [3] of a tensor."""
    amaxes = torch.zeros(3, dtype=torch.float32, device=work.hyper.device)
    for part, _ in _pieces(columns, work):
        values = moved(columns, decoupled, part, work.hyper)
        amaxes = torch.maximum(amaxes, find_amaxes(columns, values))
    return amaxes


@contextmanager
def _dtypes_may_mix() -> Iterator[None]:
    with warnings.catch_warnings():
        # Inductor advises against both dtypes in one CPU kernel. Seen with torch 2.13; ends with the torch that does not.
        warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed")
        yield


def _in_one(columns: Columns, work: Work, compiled: bool) -> bool:
    """Whether compiled code steps the tensor."""
    return (compiled or compiles(work.hyper.device)) and in_one_piece(
        work.slot.source[0].numel(), columns.block
    )


def _step_in_pieces(columns: Columns, decoupled: bool, work: Work, of_whole: Tensor | None) -> None:
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
    """The pieces of a tensor, each with the place of its first element in the whole."""
    source = work.slot.source[0]
    for start, stop in chunk_ranges(source.numel(), source.device):
        yield _part(columns, work.slot, start, stop), advance_start(work.first, start)


def _step_compiled(
    columns: Columns, decoupled: bool, works: Sequence[tuple[Work, Tensor | None]]
) -> None:
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
        skip = works[0][0].skip  # of the step, and so of each tensor
        torch._foreach_copy_(
            old,
            (
                made
                if skip is None
                else list(torch.where(skip, torch.stack(old), torch.stack(made)).unbind())
            ),
        )


def _groups(columns: Columns, works: Sequence[Work]) -> list[list[int]]:
    """Places in `works` of what one launch takes: of one set of factors, of the same dtypes, of whole rows or not. Tensors without
    a scale for the whole need one launch each alone, and are compiled sooner so."""
    most = together(works[0].hyper.device) if works and columns.per_tensor else 1
    sizes = [work.slot.source[0].numel() for work in works]
    order = sorted(
        range(len(works)), key=sizes.__getitem__
    )  # Inductor takes the first ones' sizes for typical
    kinds = [
        (id(work.hyper), type(work.first), bool(work.first), size % ROW == 0, *_dtypes(work.slot))
        for work, size in ((works[i], sizes[i]) for i in order)
    ]
    return [[order[place] for place in group] for group in launch_groups(kinds, most)]


def _stored_together(columns: Columns, groups: list[list[int]]) -> list[list[int]]:
    """What of `groups` one launch stores: of blocks, which it reduces for their scales, a tensor, else all."""
    return [[place] for group in groups for place in group] if columns.blocks_written else groups


def _dtypes(slot: Slot) -> list[Hashable]:
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
    """The new scales of each tensor, for all together, of amaxes that are known, or of those that are found."""
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
    """The amaxes [works, amaxes] that are wanted, of those of rows."""
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
    """The data as [blocks, block]: in a flat tensor a compiler cannot tell which elements share a scale."""
    if block == 1:
        return slot
    rows: list[Any] = [
        x.view(-1, block) if isinstance(x, Tensor) else x and (x[0].view(-1, block), *x[1:])
        for x in slot
    ]
    return Slot(*rows)
