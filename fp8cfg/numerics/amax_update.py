"""Scale update of delayed scaling: all-reduced amaxes, rolled histories and new scales, once per step, outside of compiled code.

The order of a step is: forward and backward passes, optimizer, `update_scales`, then `set_weight` of float8 weights. A
step that is skipped because its gradients are not finite calls `discard_amax` instead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fp8cfg.numerics.async_copies import HostCopy
from fp8cfg.numerics.fp8_attention import ROLES, FP8Attention
from fp8cfg.numerics.fp8_linear import CONTRACTED, FP8Linear
from fp8cfg.numerics.scaling import (
    FLT_MAX,
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    Scaling,
    compute_range_used,
    roll_amax_history,
)
from fp8cfg.numerics.statistics import TENSORS
from fp8cfg.numerics.stored_state import amax_record, fold_backward, forget_backward

COLUMNS = {False: tuple(TENSORS.values()), True: ("qkv", "s", "o", "do", "dp", "dqkv")}
"""Names of a layer's tensors: of a linear one, and of attention."""


class Overflow(NamedTuple):
    """Overflow of the last step. `clipped` is how many tensors had finite values beyond their scale's range, `infinite` how many
    had infinite ones; `largest` is the greatest of their amaxes as a multiple of what fits, and `tensor` whose it is, such as
    layers.0.mlp.linear_fc1 grad_output; 0 and empty where all fit."""

    clipped: int
    infinite: int
    largest: float
    tensor: str


class RangesUsed(NamedTuple):
    """Amaxes of a step as multiples of what fitted, float32 [tensors], on the device, and whose they are: to be looked at later. Of
    finite tensors whose scale was their own it is 0."""

    ratios: Tensor
    names: list[str]


def collect_ranges_used(model: nn.Module) -> RangesUsed | None:
    """Those of the last step, of modules that have `compute_range_used`: FP8 layers of ours since the last call of `update_scales`, and of
    Transformer Engine under delayed scaling. None where `model` has none. It waits for nothing."""
    every = ((name, m, vars(m).get("range_used")) for name, m in model.named_modules())
    layers = [(name, m, used) for name, m, used in every if used is not None]
    if not layers:
        return None
    names = [
        f"{name} {column}"
        for name, m, _ in layers
        for column in COLUMNS[isinstance(m, FP8Attention)]
    ]
    return RangesUsed(torch.cat([ratio for _, _, ratio in layers]), names)


def read_overflow(used: RangesUsed | None) -> Overflow | None:
    """What did not fit. Where the ratios are on an accelerator it waits for that, once."""
    if used is None:
        return None
    found, names = used.ratios.cpu(), used.names
    infinite = found.isinf()
    if not (beyond := infinite | (found > 1)).any():
        return Overflow(0, 0, 0.0, "")
    worst = int(found.argmax())
    return Overflow(
        int((beyond & ~infinite).sum()), int(infinite.sum()), found[worst].item(), names[worst]
    )


def overflow(model: nn.Module) -> Overflow | None:
    """What did not fit in the step that ended with the last call of `update_scales`; None where `model` has no FP8 layer of ours,
    or there was none yet. It waits as `read_overflow` does."""
    return read_overflow(collect_ranges_used(model))


FP8Layer = FP8Linear | FP8Attention


def fp8_layers(model: nn.Module) -> Iterator[FP8Layer]:
    """All FP8 layers of `model`, linear and attention, each once, in the order of `model.modules()`."""
    return (module for module in model.modules() if isinstance(module, FP8Layer))


@torch.no_grad()
def update_scales(
    layers: Iterable[FP8Layer],
    group: dist.ProcessGroup | None = None,
    step: int | None = None,
    skip: Tensor | None = None,
) -> None:
    """Reduces the amaxes of this step over `group`, rolls the histories and sets the scales of all delayed `layers`; of the
    others it notes which tensors were infinite.

    One all-reduce (MAX) for all layers together; all ranks must name the same layers in the same order. `group` None reduces
    nothing. `step` counts optimizer steps from 1; with an interval of k scales move at steps k, 2k, ..., except one that was
    never set, which is set as soon as its amax is known. Where `skip`, a bool [] on their device, is true, the layers are left as
    `discard_amax` leaves them: nobody waits to know. Raises ValueError where an interval above 1 lacks `step`."""
    layers = list(layers)
    delayed, linears = [layer for layer in layers if layer.scaling.layout.history], _linears(layers)
    fold_backward(linears)
    _take_infinite(
        [layer for layer in layers if not layer.scaling.layout.history and _quantizes(layer)]
    )
    if not delayed:
        forget_backward(linears)
        return
    kinds = [(layer.scaling, _roles(layer)) for layer in delayed]
    now = torch.cat([_state(layer)[1][0] for layer in delayed])
    if group is not None:
        dist.all_reduce(now, dist.ReduceOp.MAX, group=group)
    rows = torch.split(now, [len(roles) for _, roles in kinds])
    for kind in dict.fromkeys(kinds):
        those = [i for i, other in enumerate(kinds) if other == kind]
        skipped = None if skip is None else (skip, _kept([delayed[i] for i in those], now.device))
        used = _update(
            [_state(delayed[i]) for i in those],
            torch.stack([rows[i] for i in those]),
            *kind,
            step,
            skipped,
        )
        for i, row in zip(those, used.unbind(), strict=True):
            delayed[i].range_used = row
    forget_backward(linears)
    _learn_what_is_set([layer for layer in _linears(delayed) if layer.amax_group])


def _learn_what_is_set(layers: list[FP8Linear]) -> None:
    """Note the scales of `layers`, whose amaxes ranks share, that are set by now: on a GPU by the update before, so that nobody
    waits for this one. Those ranks have the same scales and learn it in the same step."""
    for layer in layers:
        _note_set(layer)
    if not (left := [layer for layer in layers if _may_be_unset(layer)]):
        return
    copies = HostCopy.of(torch.stack([_state(layer)[0] for layer in left])).unbind()
    for layer, copy in zip(left, copies, strict=True):
        layer.scales_read = copy
        if copy.at_hand:
            _note_set(layer)


def _note_set(layer: FP8Linear) -> None:
    if layer.scales_read is not None:
        scales, layer.scales_read = layer.scales_read.read(), None
        layer.note_set(tuple(role for role, scale in enumerate(scales) if scale != 0))


def _may_be_unset(layer: FP8Linear) -> bool:
    """Whether a shared scale is not known to be set, of a tensor that is quantized; one that is not never has any."""
    quantized = {role for (role, product) in CONTRACTED if not layer.high_precision[product]}
    quantized |= {WEIGHT} if _holds_weight(layer) else set()
    return layer.parts is not None and not quantized.isdisjoint(layer.parts.roles)


def _quantizes(layer: FP8Layer) -> bool:
    """Whether it is no layer whose weight alone is held in fewer bits."""
    return not (isinstance(layer, FP8Linear) and all(layer.high_precision))


def _take_infinite(layers: list[FP8Layer]) -> None:
    """What tensors used of the range of scales that are their own: infinity of infinite ones, else 0. The records begin anew."""
    if not layers:
        return
    records = [amax_record(layer) for layer in layers]
    used = F.threshold(torch.cat([record[0] for record in records]), FLT_MAX, 0.0)
    for layer, row in zip(
        layers, torch.split(used, [record.shape[1] for record in records]), strict=True
    ):
        layer.range_used = row
    torch._foreach_zero_(records)


def _linears(layers: Iterable[FP8Layer]) -> list[FP8Linear]:
    return [layer for layer in layers if isinstance(layer, FP8Linear)]


def _roles(layer: FP8Layer) -> tuple[int, ...]:
    """The role in the layer's scaling of each column of its state."""
    return ROLES if isinstance(layer, FP8Attention) else (INPUT, WEIGHT, GRAD_OUTPUT)


def _state(layer: FP8Layer) -> tuple[Tensor, Tensor]:
    scale, history = layer.fp8_scale, layer.fp8_amax_history
    assert scale is not None and history is not None, "delayed scaling has state"
    return scale, history


@functools.lru_cache(maxsize=64)
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Float32 `values` on `device`, copied there once: a copy from the host waits."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _kept(layers: list[FP8Layer], device: torch.device) -> Tensor:
    """1 for the amaxes of this step that a skipped step leaves, else 0, [layers, roles]."""
    rows = [
        [float(role == WEIGHT and _holds_weight(layer)) for role in _roles(layer)]
        for layer in layers
    ]
    return _constants(tuple(value for row in rows for value in row), device).view(len(rows), -1)


def _holds_weight(layer: FP8Layer) -> bool:
    """Whether the amax of its weight was recorded when that was written, and stays until it is written again."""
    return isinstance(layer, FP8Linear) and (
        layer.fp8_params or (layer.sharded and not layer.shard_codec)
    )


def _update(
    states: list[tuple[Tensor, Tensor]],
    now: Tensor,
    scaling: Scaling,
    roles: tuple[int, ...],
    step: int | None,
    skipped: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """One update of layers of one scaling; what their tensors used of the range of the scales before it. `skipped` is whether it
    is skipped, and then which amaxes stay."""
    if step is None and scaling.interval > 1:
        raise ValueError(
            f"update_scales: interval={scaling.interval} needs the number of the optimizer step"
        )
    scales, histories = ([pair[i] for pair in states] for i in range(2))
    old = torch.stack(scales)
    formats = [scaling.format_of(role) for role in roles]
    target = _constants(tuple(f.max * 2.0**-scaling.margin for f in formats), now.device).expand_as(
        now
    )
    reach = _constants(tuple(f.reach for f in formats), now.device)
    before = torch.stack(histories, 1)
    history, new = roll_amax_history(before, old, now, target, scaling.amax_compute_algo)
    stays = step is not None and step % scaling.interval != 0
    if stays:
        new = torch.where(old == 0, new, old)
    if skipped is not None:
        skip, kept = skipped
        new = torch.where(skip, old, new)
        history = torch.where(
            skip, torch.cat([torch.where(kept > 0, before[0], 0)[None], before[1:]]), history
        )
    torch._foreach_copy_(
        histories, list(history.transpose(0, 1).contiguous().unbind())
    )  # one launch, of dense tensors alone
    torch._foreach_copy_(scales, list(new.unbind()))
    return compute_range_used(now, old, reach)


@torch.no_grad()
def discard_amax(layers: Iterable[FP8Layer]) -> None:
    """Forgets the amaxes that `layers` recorded since the last update, and rolls nothing. A float8 weight's amax stays: it was
    recorded when the weight was written, and the weight has not changed.
    """
    layers = list(layers)
    forget_backward(_linears(layers))
    for layer in layers:
        layer.range_used = None
        amax_record(layer)[0, [INPUT, GRAD_OUTPUT] if _holds_weight(layer) else slice(None)] = 0


@torch.no_grad()
def reset_state(layers: Iterable[FP8Layer]) -> None:
    """Scales, histories and counts of random draws as they are before the first pass, in place: for layers that were made on the
    meta device and got memory since, which holds whatever it held."""
    for layer in layers:
        state = layer.fresh_state()
        if isinstance(layer, FP8Linear):
            layer.forget_scales_set()
        for name, buffer in layer.named_buffers():
            buffer.copy_(state.get(name, torch.zeros_like(buffer)))
