"""Adam step of many stored tensors: eagerly in pieces, or several tensors per launch when compiled.

Compiled code computes amaxes of rows. Scales of all tensors follow in one launch. They are written
after all tensors are stored.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
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
    derive_step_key,
    find_amaxes,
    find_row_amaxes_of_several,
    scales_from_amaxes,
    scales_of_all,
    store_scales,
    store_several,
    store_step,
    updated_values,
)
from fp8cfg.optim.low_bit.columns import Columns

MIN_COMPILED_ELEMENTS = 64
"""Smallest tensor for compiled code.

torch.compile treats sizes 0 and 1 as constants, and a size equal to the size of `factors` or of a
key as the same symbol. It would recompile for each of these.
"""
INDUCTOR_OPTIONS: dict[str, Any] = {
    # Same rounding as eager code. Triton's default division is approximate.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    # Large thresholds recompute values instead of storing float32 copies.
    "realize_reads_threshold": 1 << 20,
    "realize_acc_reads_threshold": 1 << 20,
    "realize_opcount_threshold": 1 << 20,
}
TENSORS_PER_LAUNCH = 4
"""Tensors per launch on a GPU.

Eight take twice as long to compile and split into two kernels, because the number of
arguments is limited.
"""
Options = tuple[tuple[str, int], ...]
REDUCTION_OPTIONS: Options = (("combo_kernels", True), ("combo_kernels_autotune", 1))
"""Options for reductions of several tensors. Without autotuning a program would take 1024 rows."""
STORE_OPTIONS: Options = (
    ("combo_kernels", True),
    ("combo_kernels_autotune", 0),
    ("combo_kernels_pointwise_only", True),
)
"""Options for code that writes several tensors.

Autotuning would copy them. Combined reductions without autotuning would take 1024 values per
thread, and LLVM would optimize such code for minutes.
"""
_CONSTANTS: dict[str, tuple[Any, ...]] = {}


def is_compiled_on(device: torch.device) -> bool:
    """Returns whether steps on `device` are always compiled."""
    return HAS_TRITON and device.type == "cuda"


def can_compile(numel: int, block: int) -> bool:
    """Returns whether compiled code supports a tensor with scales for each `block` elements."""
    return numel >= MIN_COMPILED_ELEMENTS and numel % block == 0


def tensors_per_launch(device: torch.device) -> int:
    """Returns the largest number of tensors in one launch on `device`."""
    return TENSORS_PER_LAUNCH if is_compiled_on(device) else 1


def launch_groups(kinds: Sequence[Hashable], max_size: int) -> Iterator[list[int]]:
    """Yields groups of indices with equal `kinds`, at most `max_size` in each."""
    indices_by_kind = defaultdict[Hashable, list[int]](list)
    for index, kind in enumerate(kinds):
        indices_by_kind[kind].append(index)
    for indices in indices_by_kind.values():
        for start in range(0, len(indices), max_size):
            yield indices[start : start + max_size]


@functools.cache
def compiled_code(
    function: Callable[..., Any], *constants: Any, options: Options = ()
) -> Callable[..., Any]:
    """Returns a compiled function with its first arguments fixed.

    Args:
        function: The function.
        constants: Its first arguments, such as columns.
        options: Inductor options for a list of several tensors as the next argument. Each length
            of the list is compiled separately.
    """
    if not options:
        return _compile(function, constants, ())
    compile_for_length = functools.cache(lambda length: _compile(function, constants, options))

    def run(several: Sequence[Any], *args: Any) -> Any:
        # Tensors with equal sizes now may have different sizes next time.
        with shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return compile_for_length(len(several))(several, *args)

    return run


def _compile(
    function: Callable[..., Any], constants: tuple[Any, ...], options: Options
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
    all_options = INDUCTOR_OPTIONS | dict(options)
    return torch.compile(run, fullgraph=True, dynamic=True, options=all_options)


class TensorUpdate(NamedTuple):
    """A tensor to step.

    Attributes:
        slot: The stored tensors.
        factors: Factors of the step, float32 [10] on the device.
        key: Random key of the tensor, if a codec rounds stochastically.
        skip: Whether to skip the step, bool [] on the device, or None if the host has decided.
        first: Position of the first element in the full tensor.
    """

    slot: Slot
    factors: Tensor
    key: Tensor | None = None
    skip: Tensor | None = None
    first: Start = 0


@torch.no_grad()
def adam_step(
    columns: Columns,
    decoupled: bool,
    updates: Sequence[TensorUpdate],
    compiled: bool = False,
    amaxes: Sequence[Tensor] | None = None,
) -> None:
    """Steps every tensor of `updates`, in place.

    Compiled code has the same bits as eager code on a CPU. On a GPU the compiler contracts products
    and sums, which changes the last float32 bit before rounding.

    Args:
        columns: Codecs of the tensors.
        decoupled: Whether weight decay is decoupled (AdamW).
        updates: The tensors.
        compiled: Whether to compile on a CPU too.
        amaxes: Amaxes of the full tensors [3] if `updates` are shards, from `amaxes_of_steps`.
    """
    with _mixed_dtypes_allowed():
        compiled_updates = []
        compiled_amaxes = []
        for i, update in enumerate(updates):
            full_amaxes = None if amaxes is None else amaxes[i]
            if _is_compiled(columns, update, compiled):
                compiled_updates.append(update)
                if full_amaxes is not None:
                    compiled_amaxes.append(full_amaxes)
            # An empty shard still stores the scales of the full tensor.
            elif update.slot.source[0].numel() or full_amaxes is not None:
                _step_in_pieces(columns, decoupled, update, full_amaxes)
        _step_compiled(columns, decoupled, compiled_updates, compiled_amaxes)


@torch.no_grad()
def amaxes_of_steps(
    columns: Columns, decoupled: bool, updates: Sequence[TensorUpdate], compiled: bool = False
) -> Tensor:
    """Returns the amaxes of weight and moments after the steps, [updates, 3].

    0 for a column without a per-tensor scale.
    """
    with _mixed_dtypes_allowed():
        compiled_updates = {}
        for i, update in enumerate(updates):
            if _is_compiled(columns, update, compiled):
                compiled_updates[i] = update
        amaxes = _compiled_amaxes(columns, decoupled, compiled_updates)
        for i, update in enumerate(updates):
            if i not in amaxes:
                amaxes[i] = _amaxes_in_pieces(columns, decoupled, update)
        return torch.stack([amaxes[i] for i in range(len(updates))])


def _compiled_amaxes(
    columns: Columns, decoupled: bool, updates: dict[int, TensorUpdate]
) -> dict[int, Tensor]:
    """Computes `amaxes_of_steps` of numbered tensors in compiled code."""
    if not updates:
        return {}
    tensors = [*updates.values()]
    slots = [_in_blocks(update.slot, columns.block) for update in tensors]
    groups = _launch_groups_of(columns, tensors)
    needed = iter(_needed_amaxes(columns, decoupled, slots, tensors, groups).unbind(1))
    amaxes = []
    for is_needed in columns.needs_amax:
        if is_needed:
            amaxes.append(next(needed))
        else:
            amaxes.append(tensors[0].factors.new_zeros(len(tensors)))
    return dict(zip(updates, torch.stack(amaxes, 1).unbind(), strict=True))


def _amaxes_in_pieces(columns: Columns, decoupled: bool, update: TensorUpdate) -> Tensor:
    """Returns the amaxes [3] of one tensor."""
    amaxes = torch.zeros(3, dtype=torch.float32, device=update.factors.device)
    for piece, _ in _pieces(columns, update):
        values = updated_values(columns, decoupled, piece, update.factors)
        amaxes = torch.maximum(amaxes, find_amaxes(columns, values))
    return amaxes


@contextmanager
def _mixed_dtypes_allowed() -> Iterator[None]:
    """Context without Inductor's warning about bf16 and fp16 in one kernel."""
    with warnings.catch_warnings():
        # torch 2.13 warns about both dtypes in one CPU kernel.
        warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed")
        yield


def _is_compiled(columns: Columns, update: TensorUpdate, compiled: bool) -> bool:
    """Returns whether compiled code steps the tensor."""
    if not compiled and not is_compiled_on(update.factors.device):
        return False
    return can_compile(update.slot.source[0].numel(), columns.block)


def _step_in_pieces(
    columns: Columns, decoupled: bool, update: TensorUpdate, full_amaxes: Tensor | None
) -> None:
    """Steps one tensor eagerly, a piece at a time."""
    scales = Scales()
    if columns.per_tensor:
        if full_amaxes is None:
            full_amaxes = _amaxes_in_pieces(columns, decoupled, update)
        scales = scales_from_amaxes(columns, full_amaxes)
    key = derive_step_key(update.key, update.factors)
    for piece, start in _pieces(columns, update):
        values = updated_values(columns, decoupled, piece, update.factors)
        store_step(columns, piece, values, key, scales, update.skip, start)
    store_scales(update.slot, scales, update.skip)


def _pieces(columns: Columns, update: TensorUpdate) -> Iterator[tuple[Slot, Start]]:
    """Yields the pieces of a tensor with the position of their first element in the full tensor."""
    source = update.slot.source[0]
    for start, stop in chunk_ranges(source.numel(), source.device):
        yield _slice_slot(columns, update.slot, start, stop), advance_start(update.first, start)


def _step_compiled(
    columns: Columns,
    decoupled: bool,
    updates: Sequence[TensorUpdate],
    full_amaxes: Sequence[Tensor],
) -> None:
    """Steps tensors in compiled code.

    Args:
        columns: Codecs of the tensors.
        decoupled: Whether weight decay is decoupled (AdamW).
        updates: The tensors. May be empty.
        full_amaxes: Amaxes of the full tensors [3], if the tensors are shards. Otherwise empty.
    """
    if not updates:
        return
    slots = [_in_blocks(update.slot, columns.block) for update in updates]
    groups = _launch_groups_of(columns, updates)
    scales = [Scales()] * len(updates)
    if columns.per_tensor:
        if full_amaxes:
            stacked = torch.stack([*full_amaxes])
            needed = [i for i, is_needed in enumerate(columns.needs_amax) if is_needed]
            amaxes = torch.stack([stacked[:, i] for i in needed], 1)
        else:
            amaxes = _needed_amaxes(columns, decoupled, slots, updates, groups)
        scales = _scales(columns, decoupled, amaxes)

    if columns.blocks_written:
        # Blockwise codecs compute scales while they store, and such a reduction takes one launch
        # for each tensor.
        groups = [[i] for group in groups for i in group]
    store = compiled_code(store_several, columns, decoupled, options=STORE_OPTIONS)
    for group in groups:
        first_update = updates[group[0]]
        arguments: list[Any] = [
            [slots[i] for i in group],
            first_update.factors,
            [updates[i].key for i in group],
            [scales[i] for i in group],
            first_update.skip,
        ]
        # Full tensors begin at 0. Code without positions is compiled for them.
        if first_update.first:
            arguments.append([updates[i].first for i in group])
        store(*arguments)
    _write_scales(slots, scales, updates[0].skip)


def _write_scales(slots: Sequence[Slot], scales: Sequence[Scales], skip: Tensor | None) -> None:
    """Writes the per-tensor scales of all slots. `skip` is equal for all tensors of a step."""
    old_scales = []
    new_scales = []
    for slot, slot_scales in zip(slots, scales, strict=True):
        tensors = (slot.source, slot.weight, slot.exp_avg, slot.exp_avg_sq)
        for stored, scale in zip(tensors, slot_scales, strict=True):
            if stored is not None and scale is not None:
                old_scales.append(stored[1])
                new_scales.append(scale)
    if not old_scales:
        return
    if skip is not None:
        chosen = torch.where(skip, torch.stack(old_scales), torch.stack(new_scales))
        new_scales = list(chosen.unbind())
    torch._foreach_copy_(old_scales, new_scales)


def _launch_groups_of(columns: Columns, updates: Sequence[TensorUpdate]) -> list[list[int]]:
    """Returns indices for each launch: equal factors, dtypes, and divisibility by ROW.

    Tensors without a per-tensor scale need one launch each. Single tensors compile faster.
    """
    max_size = 1
    if columns.per_tensor:
        max_size = tensors_per_launch(updates[0].factors.device)
    sizes = [update.slot.source[0].numel() for update in updates]
    # Inductor tunes kernels for the sizes of its first call.
    order = sorted(range(len(updates)), key=sizes.__getitem__)
    kinds: list[Hashable] = []
    for i in order:
        update = updates[i]
        kinds.append(
            (
                id(update.factors),
                type(update.first),
                bool(update.first),
                sizes[i] % ROW == 0,
                *_dtypes(update.slot),
            )
        )
    return [[order[place] for place in group] for group in launch_groups(kinds, max_size)]


def _dtypes(slot: Slot) -> list[Hashable]:
    """Returns the dtypes of all tensors in a slot."""
    dtypes: list[Hashable] = []
    for stored in slot:
        if stored is None:
            dtypes.append(None)
        elif isinstance(stored, Tensor):
            dtypes.append(stored.dtype)
        else:
            dtypes.append(tuple(tensor.dtype for tensor in stored))
    return dtypes


def _scales(columns: Columns, decoupled: bool, amaxes: Tensor) -> list[Scales]:
    """Returns the new scales of each tensor from the needed amaxes [tensors, amaxes].

    One launch computes all of them.
    """
    rows = compiled_code(scales_of_all, columns, decoupled)(amaxes)
    scales = []
    for row in rows.unbind():
        fields = {}
        for i, (name, codec) in enumerate(zip(Scales._fields, columns.written, strict=True)):
            if codec is not None and codec.per_tensor:
                fields[name] = row[i, 0]
        scales.append(Scales(**fields))
    return scales


def _needed_amaxes(
    columns: Columns,
    decoupled: bool,
    slots: Sequence[Slot],
    updates: Sequence[TensorUpdate],
    groups: list[list[int]],
) -> Tensor:
    """Returns the needed amaxes [updates, amaxes] from amaxes of rows."""
    find = compiled_code(find_row_amaxes_of_several, columns, decoupled, options=REDUCTION_OPTIONS)
    rows_of: dict[int, list[Tensor]] = {}
    for group in groups:
        found_rows = find([slots[i] for i in group], updates[group[0]].factors)
        rows_of |= zip(group, found_rows, strict=True)
    rows = [row for i in range(len(updates)) for row in rows_of[i]]
    return torch.stack(torch._foreach_norm(rows, math.inf)).view(len(updates), -1)


def _slice_slot(columns: Columns, slot: Slot, start: int, stop: int) -> Slot:
    """Returns the elements `start` to `stop` of all tensors in a slot."""
    weight = None
    if slot.weight is not None:
        weight = columns.weight.part(slot.weight, start, stop)
    copy = None
    if slot.copy is not None:
        copy = slot.copy[start:stop]
    return Slot(
        source=columns.source.part(slot.source, start, stop),
        weight=weight,
        exp_avg=columns.exp_avg.part(slot.exp_avg, start, stop),
        exp_avg_sq=columns.exp_avg_sq.part(slot.exp_avg_sq, start, stop),
        copy=copy,
        grad=columns.read.part(slot.grad, start, stop),
    )


def _in_blocks(slot: Slot, block: int) -> Slot:
    """Returns the tensors of a slot as [blocks, block].

    In a flat tensor the compiler cannot tell which elements share a scale.
    """
    if block == 1:
        return slot
    rows: list[Any] = []
    for stored in slot:
        if stored is None:
            rows.append(None)
        elif isinstance(stored, Tensor):
            rows.append(stored.view(-1, block))
        else:
            data, *scale = stored
            rows.append((data.view(-1, block), *scale))
    return Slot(*rows)
