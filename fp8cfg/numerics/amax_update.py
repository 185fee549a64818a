"""Scale update of delayed scaling: once per optimizer step, outside of compiled code.

Passes fold amaxes into row 0 of each layer's history. `update_scales` reduces these rows over the
ranks, rolls the histories and sets the next scales (`scaling.roll_amax_history`). Transformer
Engine does the same after each forward pass, in reduce_and_update_fp8_tensors of its
pytorch/quantization.py.

Order of a step:

    forward and backward passes
    optimizer.step()                 updates the master weights; the next two run inside it in a job
    update_scales(layers)
    layer.set_weight(...)            quantizes FP8 weights with the new scales

A step that is skipped because its gradients are not finite calls `discard_amax` instead.
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
from fp8cfg.numerics.fp8_linear import FP8Linear
from fp8cfg.numerics.linear_operands import CONTRACTED
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

LINEAR_TENSORS = tuple(TENSORS.values())
ATTENTION_TENSORS = ("qkv", "s", "o", "do", "dp", "dqkv")
"""Names of the tensors of a layer, in the order of its scales."""

FP8Layer = FP8Linear | FP8Attention


def fp8_layers(model: nn.Module) -> Iterator[FP8Layer]:
    """Iterates over the FP8 layers of `model`, linear and attention, in module order."""
    return (module for module in model.modules() if isinstance(module, FP8Layer))


@torch.no_grad()
def update_scales(
    layers: Iterable[FP8Layer],
    group: dist.ProcessGroup | None = None,
    step: int | None = None,
    skip: Tensor | None = None,
) -> None:
    """Reduces the amaxes of this step, rolls the histories and sets the scales of delayed layers.

    For layers without a history it records which tensors were infinite. The host waits for nothing.

    Args:
        layers: FP8 layers. All ranks must pass the same layers in the same order.
        group: Process group to reduce the amaxes over, in one all-reduce (MAX). None reduces
            nothing.
        step: Number of the optimizer step, from 1. With `Scaling.interval` k, scales change at
            steps k, 2k, ... A scale that was never set is set as soon as its amax is known.
        skip: bool [] on the device of the layers. If true, scales and histories are left as
            `discard_amax` leaves them.

    Raises:
        ValueError: `step` is missing and an interval is above 1.
    """
    layers = list(layers)
    linears = _linears(layers)
    delayed = [layer for layer in layers if layer.scaling.layout.history]
    others = [layer for layer in layers if not layer.scaling.layout.history]

    # Backward passes record in another buffer. From here on the amax records have all amaxes.
    fold_backward(linears)
    _take_infinite_amaxes([layer for layer in others if _quantizes(layer)])
    if delayed:
        _update_delayed(delayed, group, step, skip)
    forget_backward(linears)
    _learn_which_scales_are_set([layer for layer in _linears(delayed) if layer.amax_group])


def _update_delayed(
    layers: list[FP8Layer],
    group: dist.ProcessGroup | None,
    step: int | None,
    skip: Tensor | None,
) -> None:
    # One all-reduce for all layers: row 0 of each history, one after the other.
    step_amaxes = torch.cat([_delayed_state(layer)[1][0] for layer in layers])
    if group is not None:
        dist.all_reduce(step_amaxes, dist.ReduceOp.MAX, group=group)
    rows = torch.split(step_amaxes, [len(_roles(layer)) for layer in layers])

    # Layers with the same recipe and tensors are stacked and updated by the same few kernels.
    indices_by_kind: dict[tuple[Scaling, tuple[int, ...]], list[int]] = {}
    for index, layer in enumerate(layers):
        indices_by_kind.setdefault((layer.scaling, _roles(layer)), []).append(index)
    for (scaling, roles), indices in indices_by_kind.items():
        stacked_layers = [layers[index] for index in indices]
        stacked_rows = torch.stack([rows[index] for index in indices])
        range_used = _update_stacked(stacked_layers, stacked_rows, scaling, roles, step, skip)
        for layer, row in zip(stacked_layers, range_used.unbind(), strict=True):
            layer.range_used = row


def _update_stacked(
    layers: list[FP8Layer],
    step_amaxes: Tensor,
    scaling: Scaling,
    roles: tuple[int, ...],
    step: int | None,
    skip: Tensor | None,
) -> Tensor:
    """Updates layers with the same recipe.

    Args:
        layers: The layers.
        step_amaxes: Their reduced amaxes, float32 [layers, roles].
        scaling: Their recipe.
        roles: The roles of their tensors.
        step: See `update_scales`.
        skip: See `update_scales`.

    Returns:
        `compute_range_used` under the scales before the update, float32 [layers, roles].
    """
    if step is None and scaling.interval > 1:
        raise ValueError(
            f"update_scales: interval={scaling.interval} needs the number of the optimizer step"
        )
    device = step_amaxes.device
    scales = [_delayed_state(layer)[0] for layer in layers]
    histories = [_delayed_state(layer)[1] for layer in layers]
    old_scale = torch.stack(scales)
    old_history = torch.stack(histories, 1)  # [length, layers, roles]
    scaled_max = _constants(tuple(scaling.scaled_max(role) for role in roles), device)
    history, scale = roll_amax_history(
        old_history,
        old_scale,
        step_amaxes,
        scaled_max.expand_as(step_amaxes),
        scaling.amax_compute_algo,
    )

    # Between two updates of an interval only scales change that were never set.
    if step is not None and step % scaling.interval != 0:
        scale = torch.where(old_scale == 0, scale, old_scale)

    if skip is not None:
        kept = torch.where(_keeps_amax(layers, device) > 0, old_history[0], 0)
        discarded = torch.cat([kept[None], old_history[1:]])
        scale = torch.where(skip, old_scale, scale)
        history = torch.where(skip, discarded, history)

    # One kernel for all layers. It takes only dense tensors.
    torch._foreach_copy_(histories, list(history.transpose(0, 1).contiguous().unbind()))
    torch._foreach_copy_(scales, list(scale.unbind()))
    reach = _constants(tuple(scaling.format_of(role).reach for role in roles), device)
    return compute_range_used(step_amaxes, old_scale, reach)


def _keeps_amax(layers: list[FP8Layer], device: torch.device) -> Tensor:
    """Returns 1 for amaxes that a skipped step keeps and 0 for others, float32 [layers, roles]."""
    flags = []
    for layer in layers:
        for role in _roles(layer):
            flags.append(float(role == WEIGHT and _has_fp8_weight(layer)))
    return _constants(tuple(flags), device).view(len(layers), -1)


@functools.lru_cache(maxsize=64)
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns `values`, float32, on `device`. Each copy from the host waits, so they are cached."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@torch.no_grad()
def discard_amax(layers: Iterable[FP8Layer]) -> None:
    """Discards the amaxes of `layers` since the last update without rolling the histories.

    The amax of an FP8 weight stays: it was recorded when the weight was written.
    """
    layers = list(layers)
    forget_backward(_linears(layers))
    for layer in layers:
        layer.range_used = None
        step_amaxes = amax_record(layer)[0]
        if _has_fp8_weight(layer):
            step_amaxes[[INPUT, GRAD_OUTPUT]] = 0
        else:
            step_amaxes[:] = 0


@torch.no_grad()
def reset_state(layers: Iterable[FP8Layer]) -> None:
    """Resets scales, histories and counts of random draws to their first values, in place.

    For layers that were built on the meta device: their new memory has arbitrary contents.
    """
    for layer in layers:
        state = layer.fresh_state()
        if isinstance(layer, FP8Linear):
            layer.forget_scales_set()
        for name, buffer in layer.named_buffers():
            buffer.copy_(state.get(name, torch.zeros_like(buffer)))


def _take_infinite_amaxes(layers: list[FP8Layer]) -> None:
    """Sets `range_used` of layers whose scales fit each tensor, and clears their amax records.

    It is infinity for infinite tensors and 0 for others.
    """
    if not layers:
        return
    records = [amax_record(layer) for layer in layers]
    range_used = F.threshold(torch.cat([record[0] for record in records]), FLT_MAX, 0.0)
    rows = torch.split(range_used, [record.shape[1] for record in records])
    for layer, row in zip(layers, rows, strict=True):
        layer.range_used = row
    torch._foreach_zero_(records)


def _learn_which_scales_are_set(layers: list[FP8Linear]) -> None:
    """Tells layers that share amaxes with other ranks which of their scales are set.

    A scale that is set needs no amax of other ranks in the next pass. On a GPU the scales of the
    previous update are read, so that the host does not wait for this one. The ranks of a group have
    the same scales and learn it in the same step.
    """
    for layer in layers:
        _read_set_scales(layer)
    unknown = [layer for layer in layers if _may_have_unset_scales(layer)]
    if not unknown:
        return
    copies = HostCopy.of(torch.stack([_delayed_state(layer)[0] for layer in unknown])).unbind()
    for layer, copy in zip(unknown, copies, strict=True):
        layer.scales_read = copy
        if copy.is_ready:
            _read_set_scales(layer)


def _read_set_scales(layer: FP8Linear) -> None:
    if layer.scales_read is None:
        return
    scales = layer.scales_read.read()
    layer.scales_read = None
    layer.mark_scales_set(tuple(role for role, scale in enumerate(scales) if scale != 0))


def _may_have_unset_scales(layer: FP8Linear) -> bool:
    """Whether a shared scale of a tensor that is quantized may not be set yet."""
    if layer.pass_amax_group is None:
        return False
    quantized = {role for role, gemm in CONTRACTED if not layer.high_precision[gemm]}
    if _has_fp8_weight(layer):
        quantized.add(WEIGHT)
    return not quantized.isdisjoint(layer.pass_amax_group.roles)


# --- overflow of the last step


class Overflow(NamedTuple):
    """Overflow of the last step.

    Attributes:
        clipped: Tensors with finite values beyond the range of their scale.
        infinite: Tensors with infinite values.
        largest: The largest amax as a multiple of the range. 0 if all tensors fit.
        tensor: Its name, such as "layers.0.mlp.linear_fc1 grad_output". Empty if all tensors fit.
    """

    clipped: int
    infinite: int
    largest: float
    tensor: str


class RangesUsed(NamedTuple):
    """Amaxes of a step as multiples of the range, still on the device.

    Attributes:
        ratios: float32 [tensors]. 0 for a finite tensor that is scaled by its own amax.
        names: Names of the tensors.
    """

    ratios: Tensor
    names: list[str]


def collect_ranges_used(model: nn.Module) -> RangesUsed | None:
    """Collects the ranges used in the step of the last `update_scales`. The host waits for nothing.

    Modules with an attribute `range_used` take part: FP8 layers, and Transformer Engine's modules
    under delayed scaling. Returns None if `model` has none.
    """
    ratios: list[Tensor] = []
    names: list[str] = []
    for name, module in model.named_modules():
        range_used = vars(module).get("range_used")
        if range_used is None:
            continue
        ratios.append(range_used)
        tensors = LINEAR_TENSORS
        if isinstance(module, FP8Attention):
            tensors = ATTENTION_TENSORS
        names.extend(f"{name} {tensor}" for tensor in tensors)
    if not ratios:
        return None
    return RangesUsed(torch.cat(ratios), names)


def read_overflow(ranges_used: RangesUsed | None) -> Overflow | None:
    """Counts the tensors that did not fit. The host waits for an accelerator, once."""
    if ranges_used is None:
        return None
    ratios = ranges_used.ratios.cpu()
    is_infinite = ratios.isinf()
    is_clipped = (ratios > 1) & ~is_infinite
    clipped = int(is_clipped.sum())
    infinite = int(is_infinite.sum())
    if clipped + infinite == 0:
        return Overflow(0, 0, 0.0, "")
    worst = int(ratios.argmax())
    return Overflow(clipped, infinite, ratios[worst].item(), ranges_used.names[worst])


def overflow(model: nn.Module) -> Overflow | None:
    """Returns the overflow of the step of the last `update_scales`. The host waits for it.

    None if `model` has no FP8 layer or was not updated yet.
    """
    return read_overflow(collect_ranges_used(model))


# --- layers


def _linears(layers: Iterable[FP8Layer]) -> list[FP8Linear]:
    return [layer for layer in layers if isinstance(layer, FP8Linear)]


def _roles(layer: FP8Layer) -> tuple[int, ...]:
    """Returns the role of each tensor of the layer, in the order of its scales."""
    if isinstance(layer, FP8Attention):
        return ROLES
    return INPUT, WEIGHT, GRAD_OUTPUT


def _delayed_state(layer: FP8Layer) -> tuple[Tensor, Tensor]:
    """Returns the scales [roles] and the amax history [length, roles] of a layer."""
    assert layer.fp8_scale is not None, "delayed scaling has scales"
    assert layer.fp8_amax_history is not None, "delayed scaling has a history"
    return layer.fp8_scale, layer.fp8_amax_history


def _quantizes(layer: FP8Layer) -> bool:
    """Whether a GEMM of the layer runs in FP8. A layer may only store its weight in FP8."""
    return not (isinstance(layer, FP8Linear) and all(layer.high_precision))


def _has_fp8_weight(layer: FP8Layer) -> bool:
    """Whether the weight's amax is recorded when the weight is written, and stays until then."""
    if not isinstance(layer, FP8Linear):
        return False
    return layer.fp8_params or (layer.fsdp_shard is not None and layer.fsdp_shard.codec is None)
