"""Scale update of delayed scaling: all-reduced amaxes, rolled histories and new scales, once per step, outside of compiled code.

The order of a step is: forward and backward passes, optimizer, `update_scales`, then `set_weight` of float8 weights. A
step that is skipped because its gradients are not finite calls `discard_amax` instead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.numerics.attention import ROLES, FP8Attention
from fp8cfg.numerics.linear import FP8Linear
from fp8cfg.numerics.pass_records import fold_backward, forget_backward
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Scaling, range_used, roll

FP8Layer = FP8Linear | FP8Attention


def fp8_layers(model: nn.Module) -> Iterator[FP8Layer]:
    """All FP8 layers of `model`, linear and attention, each once, in the order of `model.modules()`."""
    return (module for module in model.modules() if isinstance(module, FP8Layer))


@torch.no_grad()
def update_scales(
    layers: Iterable[FP8Layer], group: dist.ProcessGroup | None = None, step: int | None = None, skip: Tensor | None = None,
    late: Tensor | None = None,
) -> None:
    """Reduces the amaxes of this step over `group`, rolls the histories and sets the scales of all delayed `layers`.

    One all-reduce (MAX) for all layers together; all ranks must name the same layers in the same order. `group` None reduces
    nothing. `step` counts optimizer steps from 1; with an interval of k scales move at steps k, 2k, ..., except one that was
    never set, which is set as soon as its amax is known. Where `skip`, a bool [] on their device, is true, the layers are left as
    `discard_amax` leaves them: nobody waits to know. Where `late`, likewise, is true, this is step number `step` - 1. Raises
    ValueError where an interval above 1 lacks `step`."""
    delayed = [layer for layer in layers if layer.scaling.layout.history]
    if not delayed:
        return
    kinds, linears = [(layer.scaling, _roles(layer)) for layer in delayed], _linears(delayed)
    fold_backward(linears)
    now = torch.cat([_state(layer)[1][0] for layer in delayed])
    if group is not None:
        dist.all_reduce(now, dist.ReduceOp.MAX, group=group)
    rows = torch.split(now, [len(roles) for _, roles in kinds])
    for kind in dict.fromkeys(kinds):
        those = [i for i, other in enumerate(kinds) if other == kind]
        skipped = None if skip is None else (skip, _kept([delayed[i] for i in those], now.device))
        used = _update([_state(delayed[i]) for i in those], torch.stack([rows[i] for i in those]), *kind, step, skipped, late)
        for i, row in zip(those, used.unbind(), strict=True):
            delayed[i].range_used = row
    forget_backward(linears)
    for layer in linears:
        if layer.amax_group and not layer.scales_set:
            layer.scales_set = bool((_state(layer)[0] != 0).all())  # alike on all ranks that share amaxes


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
    rows = [[float(role == WEIGHT and _holds_weight(layer)) for role in _roles(layer)] for layer in layers]
    return _constants(tuple(value for row in rows for value in row), device).view(len(rows), -1)


def _holds_weight(layer: FP8Layer) -> bool:
    """Whether the amax of its weight was recorded when that was written, and stays until it is written again."""
    return isinstance(layer, FP8Linear) and (layer.fp8_params or layer.sharded)


def _update(
    states: list[tuple[Tensor, Tensor]], now: Tensor, scaling: Scaling, roles: tuple[int, ...], step: int | None,
    skipped: tuple[Tensor, Tensor] | None = None, late: Tensor | None = None,
) -> Tensor:
    """One update of layers of one scaling; what their tensors used of the range of the scales before it. `skipped` is whether it
    is skipped, and then which amaxes stay."""
    if step is None and scaling.interval > 1:
        raise ValueError(f"update_scales: interval={scaling.interval} needs the number of the optimizer step")
    scales, histories = ([pair[i] for pair in states] for i in range(2))
    old = torch.stack(scales)
    formats = [scaling.format_of(role) for role in roles]
    target = _constants(tuple(f.max * 2.0**-scaling.margin for f in formats), now.device).expand_as(now)
    reach = _constants(tuple(f.reach for f in formats), now.device)
    before = torch.stack(histories, 1)
    history, new = roll(before, old, now, target, scaling.amax_compute_algo)
    stays = step is not None and step % scaling.interval != 0
    if step is not None and late is not None and ((step - 1) % scaling.interval != 0) != stays:
        new = torch.where((late != stays) & (old != 0), old, new)
    elif stays:
        new = torch.where(old == 0, new, old)
    if skipped is not None:
        skip, kept = skipped
        new = torch.where(skip, old, new)
        history = torch.where(skip, torch.cat([torch.where(kept > 0, before[0], 0)[None], before[1:]]), history)
    torch._foreach_copy_(histories, list(history.unbind(1)))
    torch._foreach_copy_(scales, list(new.unbind()))
    return range_used(now, old, reach)


@torch.no_grad()
def discard_amax(layers: Iterable[FP8Layer]) -> None:
    """Forgets the amaxes that `layers` recorded since the last update, and rolls nothing. A float8 weight's amax stays: it was
    recorded when the weight was written, and the weight has not changed.
    """
    layers = list(layers)
    forget_backward(_linears(layers))
    for layer in layers:
        layer.range_used = None
        if layer.fp8_amax_history is not None:
            layer.fp8_amax_history[0, [INPUT, GRAD_OUTPUT] if _holds_weight(layer) else slice(None)] = 0


@torch.no_grad()
def reset_state(layers: Iterable[FP8Layer]) -> None:
    """Scales, histories and counts of random draws as they are before the first pass, in place: for layers that were made on the
    meta device and got memory since, which holds whatever it held."""
    for layer in layers:
        state = layer.fresh_state() if layer.scaling.layout.history else {}
        if isinstance(layer, FP8Linear):
            layer.scales_set = False
        for name, buffer in layer.named_buffers():
            buffer.copy_(state.get(name, torch.zeros_like(buffer)))
