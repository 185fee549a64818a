"""Quantization statistics: amax, scales, underflow, overflow and error of each FP8 operand.

They are collected in one pass over a model. The tensors of the layers are quantized once more, by
the same rules, and compared. A larger scale flushes fewer small elements to zero and saturates more
large ones: underflow and overflow are the two ends of one choice. The fractions correspond to
Transformer Engine's debug statistics (underflows%, overflows%), but are not percentages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8cfg.numerics.amax import compute_amax, split_tiles
from fp8cfg.numerics.formats import Format, RandomStream, round_to_format
from fp8cfg.numerics.fp8_linear import FP8Linear, fp8_linears
from fp8cfg.numerics.fp8_weights import GatheredWeight
from fp8cfg.numerics.fsdp_weights import gather_master
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD
from fp8cfg.numerics.linear_operands import CONTRACTED
from fp8cfg.numerics.overflow_counts import pause_overflow_counts
from fp8cfg.numerics.quantize import hadamard_transform
from fp8cfg.numerics.scaling import (
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    Scaling,
    TileScales,
    choose_tensor_scale,
    compute_global_scale,
    compute_tile_scales,
)
from fp8cfg.numerics.stored_state import AMAX, BACKWARD_AMAX, RAN, ROUNDING_COUNT

TENSORS = {INPUT: "input", WEIGHT: "weight", GRAD_OUTPUT: "grad_output"}
"""Names of the tensors of a linear layer."""
CHUNK_ELEMENTS = 1 << 25
"""Elements measured at a time. They take several float32 copies."""


class Statistics(NamedTuple):
    """Statistics of one tensor, as the first of its FP8 GEMMs reads it.

    That is fprop for inputs and weights, and dgrad for gradients of outputs.

    Attributes:
        layer: Name of the layer.
        tensor: "input", "weight" or "grad_output".
        format: Name of the format.
        amax: The largest magnitude. NaN is skipped.
        scale_min: The smallest scale of tiles that are not all zero. None if all are zero.
        scale_max: The largest scale of such tiles.
        underflow: Fraction of the elements that are not zero and are rounded to zero.
        overflow: Fraction of the elements beyond the largest value of the format after scaling.
        error: rms(rounded - tensor) / rms(tensor) over finite elements. 0 for a tensor of zeros.
        zeros: Number of zeros.
        nonfinite: Number of infinities and NaN.
        elements: Number of elements.
    """

    layer: str
    tensor: str
    format: str
    amax: float
    scale_min: float | None
    scale_max: float | None
    underflow: float
    overflow: float
    error: float
    zeros: int
    nonfinite: int
    elements: int


def collect_statistics(
    model: nn.Module,
    run: Callable[[], object],
    masters: Mapping[nn.Parameter, Tensor] | None = None,
) -> list[Statistics]:
    """Collects statistics of the FP8 layers of `model` during one forward and backward pass.

    Compiled models run eagerly. If a layer is called several times, its first call is measured.
    Afterwards gradients, amax histories, records of GEMMs and random numbers are restored. Other
    buffers that a forward pass writes are not.

    Under FSDP2 an FP8-gathered weight is compared with its high-precision shards. All ranks must call
    this function, before weights are gathered.

    Args:
        model: The model.
        run: Runs the forward and backward pass.
        masters: The high-precision weights of parameters that are stored only in FP8. Weights
            without one are left out.

    Returns:
        The statistics in the order of the layers.

    Raises:
        ValueError: No FP8 layer ran.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FP8Linear)}
    shards: dict[nn.Module, nn.Parameter] = {}
    for layer in layers.values():
        if hasattr(layer.parameter, "placements"):  # a DTensor
            shards[layer] = layer.parameter
    probe = _Probe(masters or {}, shards)
    with _restore_state(model), torch.compiler.set_stance("force_eager"):
        handles = []
        for name, layer in layers.items():
            hook = partial(probe.forward, name)
            handles.append(layer.register_forward_hook(hook, with_kwargs=True))
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
    if not probe.measurements:
        raise ValueError("no FP8 layer ran; run the forward pass inside autocast()")
    order = {name: index for index, name in enumerate(layers)}
    keys = sorted(probe.measurements, key=lambda key: (order[key[0]], key[1]))
    return [probe.measurements[layer, role].read(layer, role) for layer, role in keys]


@contextmanager
def _restore_state(model: nn.Module) -> Iterator[None]:
    """Context manager that restores what a forward and a backward pass change."""
    changing = []
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[2]
        if leaf in (*RAN, AMAX, BACKWARD_AMAX, "gemms_ran", ROUNDING_COUNT):
            changing.append(buffer)
        elif leaf == "fp8_amax_history":
            changing.append(buffer[0])  # a pass writes only row 0
    copies = [tensor.clone() for tensor in changing]
    # A weight that this pass would cache would not be recorded by the passes of the step.
    caches = [layer.weight_cache for layer in fp8_linears(model)]
    cache_flags = [(cache.enabled, cache.in_loop) for cache in caches]
    for cache in caches:
        cache.enabled = False
        cache.in_loop = False
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng(sorted(devices)), pause_overflow_counts():
            yield
    finally:
        for tensor, old in zip(changing, copies, strict=True):
            tensor.copy_(old)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for cache, (enabled, in_loop) in zip(caches, cache_flags, strict=True):
            cache.enabled = enabled
            cache.in_loop = in_loop


class _Probe:
    """Measures the tensors of layers in forward hooks and gradient hooks."""

    def __init__(
        self, masters: Mapping[nn.Parameter, Tensor], shards: Mapping[nn.Module, nn.Parameter]
    ) -> None:
        self.masters = masters
        self.shards = shards
        self.measurements: dict[tuple[str, int], _Measurement] = {}
        self._visited: set[str] = set()

    def forward(self, name: str, layer: FP8Linear, args: Any, kwargs: Any, y: Tensor) -> None:
        """Forward hook of a layer."""
        # Activation checkpointing calls it again in the backward pass.
        if name in self._visited or not layer.region.applies():
            return
        self._visited.add(name)
        self._measure(name, layer, INPUT, (*args, *kwargs.values())[0])
        weight = self._high_precision_weight(layer)
        if weight is not None:
            self._measure(name, layer, WEIGHT, weight)
        if y.requires_grad:
            y.register_hook(partial(self._measure, name, layer, GRAD_OUTPUT))

    def _high_precision_weight(self, layer: FP8Linear) -> Tensor | None:
        """Returns the weight before FP8 quantization, or None if it does not exist."""
        weight: Tensor | None = layer.parameter
        if layer.codec:
            return layer.dequantized_weight(torch.float32)
        if isinstance(weight, GatheredWeight):
            if weight.codec:
                return weight.weight_storage(weight.codec).values(torch.float32)
            if layer not in self.shards:
                return None
            return gather_master(self.shards[layer])
        if layer.fp8_params and isinstance(weight, nn.Parameter):
            return self.masters.get(weight)
        return weight

    def _measure(self, name: str, layer: FP8Linear, role: int, t: Tensor) -> None:
        measurement = _measure_in(layer, role, t)
        if measurement is not None:
            self.measurements[name, role] = measurement


class _Measurement(NamedTuple):
    """Statistics of a tensor that are still on its device."""

    format: Format
    elements: int
    # float64: amax, smallest and largest scale, then the sums of `_sum_errors`
    values: Tensor

    def read(self, layer: str, role: int) -> Statistics:
        """Waits for the device and returns the statistics."""
        values = self.values.tolist()
        amax, scale_min, scale_max, underflow, overflow, zeros, nonfinite, lost, total = values
        if scale_max == 0:  # all tiles are zero
            scale_min, scale_max = None, None
        error = 0.0
        if total:
            error = (lost / total) ** 0.5
        return Statistics(
            layer,
            TENSORS[role],
            self.format.name,
            amax,
            scale_min=scale_min,
            scale_max=scale_max,
            underflow=underflow / self.elements,
            overflow=overflow / self.elements,
            error=error,
            zeros=int(zeros),
            nonfinite=int(nonfinite),
            elements=self.elements,
        )


def measure_tensor(name: str, layer: FP8Linear, role: int, t: Tensor) -> Statistics | None:
    """Measures one tensor of an FP8 layer as its first FP8 GEMM would quantize it now.

    Waits for the device. Changes no state of the layer.

    Args:
        name: Name of the layer.
        layer: The layer.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        t: The tensor in high precision.

    Returns:
        The statistics. None if no FP8 GEMM reads such a tensor, or if it is empty.
    """
    measurement = _measure_in(layer, role, t)
    if measurement is None:
        return None
    return measurement.read(name, role)


def _measure_in(layer: FP8Linear, role: int, t: Tensor) -> _Measurement | None:
    """Measures a tensor of a layer, or returns None if no FP8 GEMM reads it."""
    axes = []  # the contracted dimension in each FP8 GEMM that reads the tensor
    for gemm in (FPROP, DGRAD, WGRAD):
        if (role, gemm) in CONTRACTED and not layer.high_precision[gemm]:
            axes.append(CONTRACTED[role, gemm])
    if not axes or t.numel() == 0:
        return None
    axis = axes[0]
    scaling = layer.scaling
    with torch.no_grad(), torch.autocast(t.device.type, enabled=False):
        t = t.detach().reshape(-1, t.shape[-1])
        # The contracted dimension comes last.
        if axis == 0:
            t = t.t()
            if scaling.uses_hadamard(role, axis=0):
                t = hadamard_transform(t)
        scale = None
        if scaling.tile(role, 1) is None:
            scale = choose_tensor_scale(
                t, role, scaling, layer.fp8_scale, layer.fp8_amax_history, record=False
            )
        random = None
        if scaling.rounds_stochastically(role):
            random = layer.random(axis)
        return _measure(t.contiguous(), role, scaling, scale, random)


def _measure(
    t: Tensor, role: int, scaling: Scaling, scale: Tensor | None, random: RandomStream | None
) -> _Measurement:
    """Measures a tensor.

    Args:
        t: Matrix [R, C]. The GEMM contracts its last dimension.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        scaling: The recipe.
        scale: The scale of the tensor, float32 []. None if it has tiles.
        random: The random numbers of stochastic rounding.
    """
    fmt = scaling.format_of(role)
    tile = scaling.tile(role, 1)
    global_scale = None
    if scaling.layout.two_levels:
        global_scale = compute_global_scale(t)
    # A multiple of 128 rows: no tile is higher, so that chunks cut none.
    rows = max(1, CHUNK_ELEMENTS // t.shape[1] // 128) * 128
    scale_ranges = []
    sums = []
    for i, chunk in enumerate(torch.split(t, rows)):
        v = split_tiles(chunk, tile or (0, 0))
        if scale is not None:
            scales = TileScales(scale, scale.reciprocal())
            scale_ranges.append(scale.expand(2))
        else:
            scales = compute_tile_scales(v, fmt, scaling, global_scale)
            scale_ranges.append(_scale_range(scales.encode, v))
        if global_scale is not None:
            scales = scales._replace(decode=scales.decode * global_scale.reciprocal())
        uniform = None
        if random is not None:
            # The numbers depend on the place of an element in the padded matrix.
            start = i * rows * v.shape[2] * v.shape[3]
            uniform = random.uniform(start, v.numel()).view(v.shape)
        sums.append(_sum_errors(chunk, v, fmt, scales, uniform))
    scale_min, scale_max = torch.stack(scale_ranges).double().unbind(1)
    first = torch.stack([compute_amax(t).double(), scale_min.amin(), scale_max.amax()])
    return _Measurement(fmt, t.numel(), torch.cat([first, torch.stack(sums).sum(0)]))


def _scale_range(scales: Tensor, v: Tensor) -> Tensor:
    """Returns the smallest and largest scale of tiles that are not all zero, or infinity and 0."""
    is_nonzero = (v != 0).any(3, keepdim=True).any(1, keepdim=True)
    smallest = torch.where(is_nonzero, scales, torch.inf).amin()
    largest = torch.where(is_nonzero, scales, 0.0).amax()
    return torch.stack([smallest, largest])


def _sum_errors(
    t: Tensor, v: Tensor, fmt: Format, scales: TileScales, uniform: Tensor | None
) -> Tensor:
    """Counts and sums over the elements of a matrix.

    Args:
        t: The matrix.
        v: Its tiles, padded with zeros.
        fmt: The format.
        scales: The scales of the tiles.
        uniform: Random numbers of stochastic rounding, of the shape of `v`.

    Returns:
        float64 [6]: numbers of elements that underflow, overflow, are zero, are not finite; sums of
        squared errors and of squared values.
    """
    x = v.float()
    scaled = x * scales.encode
    rounded = round_to_format(scaled, fmt, torch.float32, uniform)
    is_finite = x.abs() < torch.inf
    counts = [
        (x != 0) & (rounded == 0),
        # amax * (fp8_max / amax) may be the next float32 above fp8_max, which is no overflow.
        scaled.abs() > fmt.max * (1 + 2.0**-20),
        t == 0,  # the padding of `v` is zero too
        ~is_finite,
    ]
    sums = [count.count_nonzero().double() for count in counts]
    for values in (rounded * scales.decode - x, x):
        finite_values = torch.where(is_finite, values, 0.0)
        norm = torch.linalg.vector_norm(finite_values, dtype=torch.float64)
        sums.append(norm * norm)
    return torch.stack(sums)
